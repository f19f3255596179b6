"""The table that ``make demo`` prints, as README.md shows it."""

import re

from examples.demo import table
from tests.docs.pages import ROOT, blocks


def titles(text: str) -> list[str]:
    """Of a table's columns, which are two blanks or more apart."""
    return re.split(r"\s{2,}", text.strip().splitlines()[0].strip())


def test_readme_shows_the_columns_that_the_demo_prints() -> None:
    (shown,) = [block.body for block in blocks(ROOT / "README.md") if re.match(r"request\s", block.body)]
    assert titles(shown) == titles(table([]))
