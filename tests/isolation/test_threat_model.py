"""docs/threat-model.md names a test for what it promises; each of them exists."""

import ast
import re

from tests.isolation.conftest import ROOT


def test_every_test_that_is_named_exists() -> None:
    text = (ROOT / "docs" / "threat-model.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)
    assert len(named) > 20
    for file, function in named:
        tree = ast.parse((ROOT / file).read_text())
        functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert not function or function in functions, f"{file}::{function}"
    # A promise without a test says that it is none.
    for line in text.splitlines():
        if line.startswith("| ") and line.endswith("| |") and "|---" not in line and line.count("|") == 4:
            assert "not defended" in line or line.startswith(("| wants |", "| can |")), line
