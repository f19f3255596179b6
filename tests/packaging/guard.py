"""A pytest plugin for runs against a wheel: it refuses to begin, and to end well, if the package is another one.

``pytest -p tests.packaging.guard``; see :mod:`tests.packaging.installed`.
"""

import subprocess
import sys
from pathlib import Path

import pytest

NAMES = "import vllm_mc2, vllm_mc2._native as native; print(vllm_mc2.__file__); print(native.__file__)"


def strangers(files: list[str]) -> list[str]:
    """Those of `files` that are not in this environment."""
    return [file for file in files if not Path(file).resolve().is_relative_to(Path(sys.prefix).resolve())]


def refuse(files: list[str]) -> None:
    if found := strangers(files):
        raise pytest.UsageError(f"not the installed wheel in {sys.prefix}: {', '.join(found)}")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Ask a process that is started as the tests start theirs: what it imports, this one would import too."""
    said = subprocess.run(
        [sys.executable, "-c", NAMES], cwd=session.config.rootpath, capture_output=True, text=True, check=False
    )
    if said.returncode != 0:
        raise pytest.UsageError(f"no package to test: {said.stderr[-2000:]}")
    refuse(said.stdout.splitlines())


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    loaded = [module for name, module in sys.modules.items() if name.partition(".")[0] == "vllm_mc2"]
    refuse([str(module.__file__) for module in loaded if getattr(module, "__file__", None)])
