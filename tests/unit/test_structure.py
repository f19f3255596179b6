"""Rules about the code itself: who may import what, where private things of vLLM may be touched, how large things may be."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

import vllm_mc2

PACKAGE = Path(vllm_mc2.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
# A module may import those further to the right only.
LAYERS = [
    ["plugin", "cli"],
    ["bench"],
    ["connector", "tensors"],
    ["reporting"],
    ["network"],
    ["ascend"],
    ["session", "memory", "leases"],
    ["channel"],
    ["ticket"],
    ["protocol"],
    ["layout", "digest", "config", "inspection", "device_messages", "findings"],
    ["errors"],
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
MAY_IMPORT = {"vllm": {"connector", "plugin", "bench"}, "torch": {"connector", "tensors", "bench", "ascend"}}
NATIVE_IMPORTERS = {"memory", "leases", "tensors", "bench", "ascend", "connector"}
BROAD_EXCEPTS = {"plugin.py": 1, "session.py": 1, "deathwatch.py": 1, "lender.py": 1, "remote_pulling.py": 1}


def module_of(path: Path) -> str:
    """Top-level part of the package that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_dependencies_point_down(path: Path) -> None:
    mine = module_of(path)
    if mine == "__init__":
        return
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] in {"vllm", "torch"}:
            assert mine in MAY_IMPORT[parts[0]], f"{path.name} imports {name}"
        if parts[0] != "vllm_mc2" or len(parts) < 2:
            continue
        theirs = parts[1]
        if theirs == "_native":
            assert mine in NATIVE_IMPORTERS
        elif theirs != mine and theirs in RANK:
            assert RANK[theirs] > RANK[mine], f"{mine} imports {theirs}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_private_things_are_touched_in_compat_only(path: Path) -> None:
    if path.name == "compat.py":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            owner = node.value
            assert isinstance(owner, ast.Name) and owner.id in {"self", "cls"}, ast.unparse(node)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 420
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < 60, f"{path.name}:{node.name}"


def test_broad_excepts_are_where_we_know_them() -> None:
    found: dict[str, int] = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler) and (node.type is None or ast.unparse(node.type) == "Exception"):
                found[path.name] = found.get(path.name, 0) + 1
    assert found == BROAD_EXCEPTS


def test_nobody_deserialises_objects() -> None:
    for path in FILES:
        assert not {"pickle", "marshal", "shelve", "dill", "cloudpickle"} & {
            name.split(".")[0] for name in imports_of(path)
        }
        for node in ast.walk(ast.parse(path.read_text())):
            assert not (isinstance(node, ast.Name) and node.id in {"eval", "exec"})


@pytest.mark.parametrize(
    "module",
    [
        "vllm_mc2",
        "vllm_mc2.plugin",
        "vllm_mc2.protocol",
        "vllm_mc2.session",
        "vllm_mc2.cli",
        "vllm_mc2.cli.inspect",
        "vllm_mc2.cli.config",
        "vllm_mc2.cli.doctor",
        "vllm_mc2.bench.json_option",
        "vllm_mc2.bench.handoff.arguments",
        "vllm_mc2.bench.serve.arguments",
    ],
)
def test_light_modules_import_nothing_heavy(module: str) -> None:
    code = (
        f"import sys, {module}; print([m for m in ('vllm', 'torch', 'numpy', 'vllm_mc2._native') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"


def test_the_tensor_api_needs_no_vllm() -> None:
    code = "import sys; from vllm_mc2 import MC2Communicator; print('vllm' in sys.modules, MC2Communicator.__name__)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.split() == ["False", "MC2Communicator"]


def test_one_version() -> None:
    assert vllm_mc2.__version__ == version("vllm-mc2")


def test_the_plugin_never_raises_and_may_be_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_mc2 import plugin

    for _ in range(3):
        plugin.register()
    monkeypatch.setitem(sys.modules, "vllm.distributed.kv_transfer.kv_connector.factory", None)
    plugin.register()
