"""Engines in containers: own process ids, mounts, network and perhaps users; what they share is a socket directory."""

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.footprint import POOL, footprint
from tests.chaos.zygote import SETTINGS
from tests.support.fake_model import expected_tokens
from tests.support.processes import ROOT, Message, Pipe, ZygoteClient

PATIENCE_SECONDS = 60.0
INSIDE = Path("/mnt")
"""Where a container finds the socket directory; what is there on this host is hidden from it."""


class Cell:
    """One engine in its container."""

    def __init__(self, pipe: Pipe, life: socket.socket, log: Path, directory: str) -> None:
        self._pipe, self._life, self.log = pipe, life, log
        self.directory = directory
        self._pidfd = -1
        self._seq = 0
        self.finished: dict[str, Message] = {}
        self._replies: dict[int, Message] = {}
        self.born: Message = {}
        self.ready: Message | None = None
        self.crash = ""
        self.has_ended = False

    def wait_until(self, what: Callable[[], Any]) -> None:
        """Take in messages until ``what()`` holds."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not what():
            assert time.monotonic() < deadline, f"{self.crash}\n{self.log.read_text()[-4000:]}"
            assert not self.has_ended, f"the engine has ended\n{self.crash}\n{self.log.read_text()[-4000:]}"
            if select.select([self._pipe], [], [], 0.02)[0]:
                self._take(*self._pipe.receive())

    def _take(self, message: Message | None, fds: list[int]) -> None:
        if message is None:
            self.has_ended = True
            return
        match message["type"]:
            case "born":
                self.born, (self._pidfd,) = message, fds
            case "ready":
                self.ready = message
            case "finished":
                self.finished[message["id"]] = message
            case "reply":
                self._replies[message["seq"]] = message
            case "crash":
                self.crash = message["trace"]
            case "wrong":
                pytest.fail(str(message))

    @property
    def host_pid(self) -> int:
        """Of the engine, as this process sees it."""
        text = Path(f"/proc/self/fdinfo/{self._pidfd}").read_text()
        return int(next(line.split()[1] for line in text.splitlines() if line.startswith("Pid:")))

    def tell(self, op: str, **more: Any) -> None:
        """Give an order that has no answer."""
        self._pipe.send({"op": op, **more})

    def ask(self, op: str, **more: Any) -> Message:
        """Give an order and wait for its answer."""
        self._seq += 1
        self.tell(op, seq=self._seq, **more)
        self.wait_until(lambda: self._seq in self._replies)
        return self._replies.pop(self._seq)

    def add(self, request_id: str, prompt: Sequence[int], params: Any, max_tokens: int = 4) -> None:
        """A request."""
        self.tell("add", id=request_id, prompt=prompt, params=params, max_tokens=max_tokens, gone=False)

    def result(self, request_id: str) -> Message:
        """A request's end."""
        self.wait_until(lambda: request_id in self.finished)
        return self.finished.pop(request_id)

    def run(self, request_id: str, prompt: Sequence[int], params: Any, max_tokens: int = 4) -> Message:
        """A request and its end, whose tokens are right."""
        self.add(request_id, prompt, params, max_tokens)
        result = self.result(request_id)
        assert result["tokens"] == expected_tokens(prompt, max_tokens), result
        return result

    def prefill(self, request_id: str, prompt: Sequence[int]) -> dict[str, Any]:
        """The prefill leg; what its response says to decode."""
        params: dict[str, Any] = self.run(request_id, prompt, {"do_remote_decode": True}, 1)["params"]
        return params

    def pools_mapped(self) -> int:
        """How many KV pools of any engine this one has mapped."""
        found = footprint(self.host_pid)
        assert found is not None
        return len(found.inodes(POOL))

    def settle(self) -> Message:
        """The books, once they are empty; asked with a step in between, as reaping happens in hooks."""
        number = 0

        def is_clean() -> bool:
            nonlocal number, report
            number += 1
            self.run(f"settle-{number}", [1, 2, 3], None, 1)
            report = self.ask("report")
            return not (report["book"] or report["used_blocks"] or any(report["snapshot"].values()))

        report: Message = {}
        self.wait_until(is_clean)
        return report

    def kill(self) -> None:
        """SIGKILL for the engine alone; its container stays."""
        signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        select.select([self._pidfd], [], [], PATIENCE_SECONDS)

    def close(self) -> None:
        """Shut the engine down in order if it runs, and give up the container."""
        with contextlib.suppress(OSError):
            self._pipe.send({"op": "close"})
        if self._pidfd >= 0:
            select.select([self._pidfd], [], [], PATIENCE_SECONDS)
            os.close(self._pidfd)
            self._pidfd = -1
        self._life.close()
        self._pipe.close()


class Nursery:
    """Starts engines; see ``nursery.py``."""

    def __init__(self, workdir: Path, model: Path) -> None:
        self._workdir, self._count = workdir, 0
        environment = {**os.environ, **SETTINGS}
        log = workdir / "nursery.log"
        self._zygote = ZygoteClient("tests.isolation.nursery", [str(model)], log, environment)

    def start(
        self,
        role: str,
        directory: Path,
        *,
        container: bool = True,
        uid_ranges: Sequence[tuple[int, int, int]] | None = None,
        uid: int | None = None,
        num_blocks: int = 64,
        **extra: Any,
    ) -> Cell:
        """An engine, not awaited. ``uid``: inside its user namespace, if it has one."""
        self._count += 1
        inside = str(INSIDE / f"s{self._count}") if container else None
        box = {"inside": inside, "uid_ranges": uid_ranges, "uid": uid}
        engine = {
            "directory": str(directory), "role": role, "engine_id": f"isolated-{self._count}", "extra": extra,
            "num_blocks": num_blocks, "policy": "recompute", "max_num_batched_tokens": 512, "armed": [],
        }  # fmt: skip
        log = self._workdir / f"{self._count}-{role}.log"
        mine, theirs = Pipe.pair()
        life, their_life = socket.socketpair()
        with log.open("wb") as output:
            fds = [theirs.fileno(), their_life.fileno()]
            _pid, pidfd = self._zygote.fork({"box": box, "engine": engine}, fds, output.fileno())
        os.close(pidfd)
        theirs.close()
        their_life.close()
        return Cell(mine, life, log, inside or str(directory))

    def close(self) -> None:
        """Everything that it started ends with it."""
        self._zygote.close()


@pytest.fixture(scope="session")
def why_no_containers() -> str | None:
    """Found by trying, in a process of its own."""
    command = [sys.executable, "-m", "tests.isolation.namespaces"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    return done.stdout.strip() or (done.stderr[-500:] if done.returncode else None)


@pytest.fixture(scope="session")
def nursery(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, why_no_containers: str | None
) -> Iterator[Nursery]:
    if why_no_containers is not None:
        pytest.skip(f"no namespaces can be made here: {why_no_containers}")
    workdir = tmp_path_factory.mktemp("isolation")
    # Where an engine of another uid can read it too.
    for parent in (workdir, *workdir.parents):
        if parent.stat().st_uid == os.geteuid() and str(parent).startswith("/tmp/"):
            parent.chmod(0o755)
    model = workdir / "model"
    shutil.copytree(tiny_model, model)
    nursery = Nursery(workdir, model)
    yield nursery
    nursery.close()


StartEngine = Callable[..., Cell]


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """The socket directory on this host."""
    path = tmp_path / "s"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def start(nursery: Nursery, shared: Path) -> Iterator[StartEngine]:
    """Starts engines that share a directory; all of them are up when the last call returns, unless it says otherwise."""
    cells: list[Cell] = []

    def begin(role: str, *, wait: bool = True, **more: Any) -> Cell:
        cell = nursery.start(role, more.pop("directory", shared), **more)
        cells.append(cell)
        if wait:
            cell.wait_until(lambda: cell.ready)
        return cell

    yield begin
    for cell in reversed(cells):
        cell.close()
