"""vllm-ascend's source as text: what it calls on a connector, and where."""

import ast
import functools
import inspect
from collections.abc import Iterator
from pathlib import Path

from tests.ascend.vllm_ascend_source import source

RECEIVERS = {"connector", "self.connector", "get_kv_transfer_group()", "c", "cast(SupportsHMA, c)"}


@functools.cache
def parsed() -> dict[Path, ast.Module]:
    """Everything but its own connectors; of those, only what calls other connectors."""
    own = source() / "vllm_ascend" / "distributed" / "kv_transfer"
    files = [path for path in (source() / "vllm_ascend").rglob("*.py") if not path.is_relative_to(own)]
    files.append(own / "ascend_multi_connector.py")
    return {path.relative_to(source()): ast.parse(path.read_text()) for path in sorted(files)}


def hook_calls() -> Iterator[tuple[str, ast.Call]]:
    """Where something is called on a connector."""
    for path, tree in parsed().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if ast.unparse(node.func.value) in RECEIVERS and node.func.attr != "get":
                    yield f"{path}:{node.lineno}", node


def optional_hooks() -> set[str]:
    """What is asked for with ``getattr``, so that a connector may lack it."""
    return {
        node.args[1].value
        for tree in parsed().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and len(node.args) == 3
        if ast.unparse(node.args[0]) in RECEIVERS and isinstance(node.args[1], ast.Constant)
    }


def wrong_calls(cls: type) -> list[str]:
    """Calls of hooks in the source that our class could not take."""
    wrong = []
    for place, call in hook_calls():
        hook = getattr(cls, call.func.attr, None)  # type: ignore[attr-defined]
        keywords = {keyword.arg: None for keyword in call.keywords if keyword.arg}
        try:
            inspect.signature(hook).bind(None, *call.args, **keywords)  # type: ignore[arg-type]
        except TypeError as error:
            wrong.append(f"{place}: {ast.unparse(call)}: {error}")
    return wrong
