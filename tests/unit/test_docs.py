"""Docs say what the code says. ``python -m tests.unit.test_docs`` rewrites the generated parts."""

import ast
import re
from pathlib import Path

import msgspec

from vllm_mc2 import config as config_module
from vllm_mc2.config import MC2Config

ROOT = Path(__file__).resolve().parents[2]
CONFIGURATION = ROOT / "docs" / "configuration.md"
MARKED = re.compile(r"(<!-- settings: begin.*?-->\n).*?(<!-- settings: end -->)", re.DOTALL)


def settings_table() -> str:
    """One row for each setting, from the docstrings under the fields."""
    tree = ast.parse(Path(config_module.__file__).read_text())
    struct = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "MC2Config")
    texts: dict[str, str] = {}
    for field, text in zip(struct.body, struct.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            assert isinstance(field.target, ast.Name)
            texts[field.target.id] = " ".join(str(text.value.value).split()).replace("``", "`")
    rows = ["| key | default | allowed | meaning |", "|---|---|---|---|"]
    for field in msgspec.structs.fields(MC2Config):
        default = msgspec.json.encode(field.default).decode()
        rows.append(f"| `{field.name}` | `{default}` | {config_module.allowed(field.name)} | {texts[field.name]} |")
    return "\n".join(rows) + "\n"


def test_the_settings_in_the_docs_are_those_of_the_code() -> None:
    match = MARKED.search(CONFIGURATION.read_text())
    assert match is not None
    assert match[0] == match[1] + settings_table() + match[2], "run: python -m tests.unit.test_docs"


def test_every_reason_in_the_code_is_in_the_docs() -> None:
    text = (ROOT / "docs" / "how-it-works.md").read_text()
    found: set[str] = set()
    for path in (Path(config_module.__file__).parent / "connector").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {"self._reject", "self._fail"}:
                found |= {
                    n.value for n in ast.walk(node.args[1]) if isinstance(n, ast.Constant) and isinstance(n.value, str)
                }
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "Refusal" and path.name == "loans.py":
                found |= {n.value for n in ast.walk(node.args[0]) if isinstance(n, ast.Constant)}
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "MapResult" and len(node.args) > 2:
                found |= {n.value for n in ast.walk(node.args[2]) if isinstance(n, ast.Constant)}
    assert len(found) > 10
    assert [reason for reason in sorted(found) if f"`{reason}`" not in text] == []


def test_links_between_documents_lead_somewhere() -> None:
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name}: {target}"


if __name__ == "__main__":
    text = CONFIGURATION.read_text()
    CONFIGURATION.write_text(MARKED.sub(lambda match: match[1] + settings_table() + match[2], text))
