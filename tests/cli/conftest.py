"""The command in this process, in children of which the world is changed first, and engines that answer it."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.connector.conftest import make_engine, pair  # fixtures
from vllm_mc2.channel import prepare_socket_dir
from vllm_mc2.findings import Finding
from vllm_mc2.protocol import Message
from vllm_mc2.session import Answer, SessionServer

__all__ = ["make_engine", "pair"]
Named = dict[str, dict[str, Any]]
Serve = Callable[[str, Message], SessionServer]

# A child without vLLM starts in a moment; what is asked of it has nothing to do with vLLM.
CHILD = """
import sys
sys.modules["vllm"] = None
{prelude}
from vllm_mc2.cli import main
sys.exit(main(sys.argv[1:]))
"""


def by_name(findings: Sequence[Finding]) -> Named:
    """As ``--json`` has them; names must tell them apart."""
    named = {finding.name: msgspec.to_builtins(finding) for finding in findings}
    assert len(named) == len(findings)
    return named


def run_child(
    *arguments: str, prelude: str = "", env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """``vllm-mc2`` in a process of its own, after ``prelude``."""
    command = [sys.executable, "-c", CHILD.format(prelude=prelude), *arguments]
    environment = {**os.environ, **(env or {})}
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=environment)


def doctor_child(*arguments: str, prelude: str = "", env: dict[str, str] | None = None) -> Named:
    """Doctor's findings there."""
    done = run_child("doctor", "--json", *arguments, prelude=prelude, env=env)
    assert done.returncode in {0, 1}, done.stderr
    return {finding["name"]: finding for finding in json.loads(done.stdout)}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A private socket directory."""
    path = tmp_path / "s"
    prepare_socket_dir(path)
    return path


@pytest.fixture
def serve(directory: Path) -> Iterator[Serve]:
    """Listeners in the directory that answer whatever they are given to answer."""
    with contextlib.ExitStack() as stack:

        def start(digit: str, report: Message) -> SessionServer:
            answer = Answer(report, keep_open=False)
            server = SessionServer(directory, digit * 32, lambda key, hello: answer, lambda key: None)
            stack.callback(server.close)
            return server

        yield start


@pytest.fixture(autouse=True)
def quiet_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of this shell's settings, and no engines of this user that happen to run."""
    for name in ("MC2_TCP_SECRET", "VLLM_PLUGINS", "VLLM_CPU_KVCACHE_SPACE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("vllm_mc2.cli.checks.sockets.other_defaults", list)
    monkeypatch.setattr("vllm_mc2.cli.inspect.ANSWER_SECONDS", 60.0)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    (tmp_path / "run").mkdir(mode=0o700)
