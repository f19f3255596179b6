"""Tests and files that the pages name in passing are there."""

import re

import pytest

from tests.docs.pages import PAGES, ROOT
from tests.docs.test_commands import functions_of

# Other projects have a folder ``tests`` too: ours are those in a folder that we have.
OUR_TESTS = "|".join(sorted(path.name for path in (ROOT / "tests").iterdir() if path.is_dir()))
TEST_PATH = re.compile(rf"`(tests/(?:{OUR_TESTS})/[\w/]+\.py)(?:::(test_\w+))?`")
SOURCE_PATH = re.compile(rf"`((?:vllm_mc2|csrc|examples|tests/(?:{OUR_TESTS})|docs)/[\w./-]*)`")
OF_VLLM = {"examples/disaggregated_prefill_v1"}
FIELD_CASES = range(1, 28)


def test_every_named_test_is_there() -> None:
    named = [(path.name, *match) for path in PAGES for match in TEST_PATH.findall(path.read_text())]
    assert len(named) > 60
    for page, path, function in named:
        assert (ROOT / path).is_file(), f"{page}: {path}"
        assert not function or function in functions_of(path), f"{page}: {path}::{function}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_named_file_is_there(path) -> None:
    named = set(SOURCE_PATH.findall(path.read_text())) - OF_VLLM
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_every_field_case_has_its_tests() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text().partition("## As seen elsewhere")[2]
    cases = dict(re.findall(r"^\*\*D(\d\d): (.*?)(?=^\*\*D|^###|\Z)", text, re.MULTILINE | re.DOTALL))
    assert sorted(map(int, cases)) == list(FIELD_CASES)
    for number, case in cases.items():
        assert TEST_PATH.search(case), f"D{number}"
        assert re.search(r"\w#\d+", case), f"D{number}"


def test_every_figure_of_the_comparison_is_one_of_the_benchmarks() -> None:
    benchmarks = (ROOT / "docs" / "benchmarks.md").read_text()
    text = (ROOT / "docs" / "comparison.md").read_text()
    figures = re.findall(r"(\d[\d.,]*) (?:ms|s|µs|MiB|cores)\b", text)
    assert len(figures) > 12
    assert [
        figure for figure in figures if not re.search(rf"(?<![\d.,]){re.escape(figure)}(?![\d,])", benchmarks)
    ] == []
