"""Device memory of another process as Python sees it; the core has its own tests in csrc/tests.

Every simulated process is a child: a simulator belongs to one process and to the folder that it was started with.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ascend.environment import ROOT, library
from tests.ascend.native_children import IMPORTERS
from vllm_mc2 import _native
from vllm_mc2._native import Acl, AclError, AclNotSupportedError


def start(path: Path, folder: Path, *what: str, **settings: str) -> subprocess.Popen[str]:
    code = "import sys\nfrom tests.ascend import native_children\ngetattr(native_children, sys.argv[1])(*sys.argv[2:])"
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "MC2_ACL_SIM_DIR": str(folder), **settings}
    command = [sys.executable, "-c", code, what[0], str(path), *what[1:]]
    return subprocess.Popen(
        command, env=environment, cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> None:
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors


@pytest.fixture(scope="module")
def simulator() -> Path:
    return library()


@pytest.fixture
def machine(simulator: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts children, and ends those that a failed test left."""
    children = []

    def starter(*arguments: Any, **settings: str) -> subprocess.Popen[str]:
        children.append(start(*arguments, **settings))
        return children[-1]

    yield starter
    for child in children:
        if child.poll() is None:
            child.kill()
        child.communicate()


@pytest.mark.parametrize("name", sorted(IMPORTERS))
def test_importer(simulator: Path, machine: Callable[..., subprocess.Popen[str]], tmp_path: Path, name: str) -> None:
    settings = {"MC2_ACL_SIM_MIXED": "1"} if name == "do_mixed_probe" else {}
    first = machine(simulator, tmp_path, "exporter", **settings)
    second = machine(simulator, tmp_path, "importer", name, **settings)
    assert first.stdin and first.stdout and second.stdin and second.stdout
    second.stdin.write(first.stdout.readline())
    second.stdin.flush()
    for line in second.stdout:  # whom to admit
        first.stdin.write(line)
        first.stdin.flush()
        second.stdin.write(first.stdout.readline())
        second.stdin.flush()
    finish(second)
    finish(first)


def test_public_surface() -> None:
    for name in (
        "Acl",
        "AclError",
        "AclNotSupportedError",
        "AddressProbe",
        "DeviceCopier",
        "DeviceExport",
        "DeviceImport",
    ):
        assert hasattr(_native, name)
    assert issubclass(AclNotSupportedError, AclError)
    assert AclError.__module__ == "vllm_mc2._native"


def test_a_library_that_is_not_there() -> None:
    with pytest.raises(OSError, match="no-such-library"):
        Acl("no-such-library.so")
    with pytest.raises(OSError, match="has no aclInit"):
        Acl("libc.so.6")


def test_questions(simulator: Path, machine: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    finish(machine(simulator, tmp_path, "questions"))


@pytest.mark.parametrize("variant", ["8.5", "8.3"])
def test_old_release(machine: Callable[..., subprocess.Popen[str]], tmp_path: Path, variant: str) -> None:
    finish(machine(library(variant), tmp_path, "old_release"))


def test_fabric(simulator: Path, machine: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    finish(machine(simulator, tmp_path, "fabric", MC2_ACL_SIM_FABRIC="1"))
