"""``docs/operations.md`` explains every line of level WARNING or above that the connector writes."""

import ast
import re
from pathlib import Path

from tests.docs.pages import ROOT

PACKAGE = ROOT / "vllm_mc2"
SOURCES = [
    *(PACKAGE / "connector").rglob("*.py"),
    *(PACKAGE / "network").rglob("*.py"),
    PACKAGE / "session.py",
    PACKAGE / "plugin.py",
]
LOUD = {"warning", "error", "exception", "critical", "warning_once", "log"}
QUIET = {"info", "info_once"}
TABLE = (ROOT / "docs" / "operations.md").read_text()


def messages(path: Path, levels: set[str]) -> list[str]:
    """The formats of a file's log calls, as they are written."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in levels:
            if ast.unparse(node.func.value) in {"logger", "log", "_logger"}:
                text = node.args[1 if node.func.attr == "log" else 0]  # ``log`` may be of any level
                assert isinstance(text, ast.Constant) and isinstance(text.value, str), f"{path.name}:{node.lineno}"
                found.append(text.value)
    return found


def pattern_of(message: str) -> str:
    """Its first words, up to 40 characters, with anything for what is filled in."""
    words: list[str] = []
    for word in message.split():
        words.append(r"\S+" if "%" in word else re.escape(word))
        if len(" ".join(words)) >= 40:
            break
    return " ".join(words)


def test_every_warning_is_explained() -> None:
    rows = re.sub(r"\s+", " ", TABLE.replace("`", ""))
    found = [(path.name, message) for path in SOURCES for message in messages(path, LOUD)]
    assert len(found) > 20
    assert [(name, message) for name, message in found if not re.search(pattern_of(message), rows)] == []


def test_the_explained_warnings_still_exist() -> None:
    """Every quoted line of the table is one that some code of ours can write."""
    section = TABLE.partition("## What the log says")[2].partition("\n## ")[0]
    quoted = re.findall(r"^\| `([^`]+)`", section, re.MULTILINE)
    assert len(quoted) > 30
    patterns = [pattern_of(message) for path in PACKAGE.rglob("*.py") for message in messages(path, LOUD | QUIET)]
    assert [line for line in quoted if not any(re.search(pattern, line) for pattern in patterns)] == []


def test_the_check_finds_what_is_missing() -> None:
    assert not re.search(pattern_of("nobody has ever written %s"), TABLE)
    assert re.search(
        pattern_of("refused a decode: %s differs (here %r, there %r)"),
        "| refused a decode: dtype differs (here 1, there 2) |",
    )
