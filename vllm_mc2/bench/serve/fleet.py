"""The servers of all systems, of which only those whose turn it is may run.

All stay up, since starting takes long, but between turns every process is stopped (SIGSTOP): an idle NIXL agent
alone would take a core from whoever is measured. `Fleet.start` adds systems, `Fleet.turn` lets one run.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import httpx
import psutil

from vllm_mc2.bench.serve.client import Client, RequestError
from vllm_mc2.bench.serve.footprint import memory_bytes
from vllm_mc2.bench.serve.systems import FolderHandOff, HandOff, MooncakeHandOff, Plan, plan, why_not
from vllm_mc2.bench.servers import Server, ServerError, vllm_server

SETTLE_SECONDS = 0.25
"""Between letting servers go on and asking them, and between an answer and stopping them."""
RESERVE_BYTES = 1 << 30
"""Memory that must stay free beside all servers; a peer that would not leave it waits for its own group."""
PEER_EXTRA_BYTES = 300 << 20
"""What a connector may need beyond a plain server, both servers together."""

SAY_SECONDS = 15.0

Say = Callable[[str], None]
T = TypeVar("T")


class System:
    """One running system: its servers, prefill first, and how it hands over."""

    def __init__(self, name: str, servers: Sequence[Server], hand_off: HandOff, how: str) -> None:
        self.name = name
        self.servers = tuple(servers)
        self.hand_off = hand_off
        self.how = how

    @property
    def prefill(self) -> Server:
        """The server that is asked first."""
        return self.servers[0]

    @property
    def decode(self) -> Server:
        """The server that answers."""
        return self.servers[-1]


class Fleet:
    """Owner of every server process of one model; `close`, or leaving the `with` block, ends them all."""

    def __init__(
        self,
        model: Path,
        *,
        arguments: Sequence[str],
        max_model_len: int,
        kv_bytes: int,
        ready_seconds: float,
        log_dir: Path,
        say: Say,
    ) -> None:
        self.systems: dict[str, System] = {}
        self.left_out: dict[str, str] = {}
        """Systems that did not come up, or were given up, with the reason."""
        self._model = model
        self._arguments = (*arguments, "--kv-cache-memory-bytes", str(kv_bytes))
        self._max_model_len = max_model_len
        self._kv_bytes = kv_bytes
        self._ready_seconds = ready_seconds
        self._log_dir = log_dir
        self._say = say
        self._said = time.monotonic()
        self._servers: dict[str, Server] = {}
        # Short, since sockets lie in it.
        self._scratch = Path(tempfile.mkdtemp(prefix="mc2-bench-"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every server, side by side, and remove every file."""
        self._end(list(self._servers.values()))
        for system in self.systems.values():
            _remove_files(system.hand_off)
        self.systems.clear()
        self._servers.clear()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def start(self, names: Sequence[str], client: Client) -> None:
        """Start these systems together and pause them; those that fail are left out."""
        plans: dict[str, Plan] = {}
        for name in names:
            if (reason := why_not(name)) is not None:
                self.leave_out(name, reason)
            else:
                plans[name] = plan(name, self._scratch)
        # In a thread, which no Ctrl-C interrupts: a process that has been started is known here in any case.
        with ThreadPoolExecutor(1) as launching:
            launching.submit(self._launch, plans).result()
        for name in plans:
            self._finish_start(name, client)

    def _launch(self, plans: Mapping[str, Plan]) -> None:
        for name, one in plans.items():
            for launch in one.launches:
                if launch.name not in self._servers:
                    self._servers[launch.name] = vllm_server(
                        launch.name,
                        self._model,
                        log_dir=self._log_dir,
                        kv_config=launch.kv_config,
                        max_model_len=self._max_model_len,
                        arguments=self._arguments,
                        # Its size is given in bytes; the variable would win.
                        environment={"VLLM_CPU_KVCACHE_SPACE": None, **launch.environment},
                    )
            servers = [self._servers[launch.name] for launch in one.launches]
            self.systems[name] = System(name, servers, one.hand_off, one.how)

    def _finish_start(self, name: str, client: Client) -> None:
        system = self.systems[name]
        started = time.monotonic()
        try:
            for server in system.servers:
                server.resume()
                server.wait_ready(self._ready_seconds, self._waiting)
                _unpin(server)
            if isinstance(system.hand_off, MooncakeHandOff):
                system.hand_off.connect(client)
            for server in system.servers:
                server.pause()
        except (ServerError, httpx.HTTPError, OSError, KeyError, ValueError) as error:
            self.leave_out(name, _short(error))
        else:
            self._say(f"{name} is ready ({time.monotonic() - started:.0f} s)")

    def _waiting(self, server: Server, seconds: float) -> None:
        if time.monotonic() - self._said > SAY_SECONDS:
            self._said = time.monotonic()
            self._say(f"waiting for {server.name} ({seconds:.0f} s)")

    def leave_out(self, name: str, reason: str) -> None:
        """Give a system up: end its servers, except those that another one needs."""
        self._say(f"{name} is left out: {reason}")
        self.left_out[name] = reason
        self.stop([name])

    def stop(self, names: Sequence[str]) -> None:
        """End the servers of these systems that no other one needs."""
        gone = [self.systems.pop(name) for name in names if name in self.systems]
        needed = {server.name for system in self.systems.values() for server in system.servers}
        ending = {server.name: server for system in gone for server in system.servers if server.name not in needed}
        self._end(list(ending.values()))
        for name in ending:
            self._servers.pop(name, None)
        for system in gone:
            _remove_files(system.hand_off)

    def _end(self, servers: Sequence[Server]) -> None:
        with ExitStack() as closing:
            for server in servers:
                closing.callback(server.close)
            # All at once, so that it takes as long as the slowest.
            for server in servers:
                server.request_stop()

    @contextmanager
    def turn(self, name: str) -> Iterator[System]:
        """Let one system run, and no other."""
        system = self.systems[name]
        try:
            for server in system.servers:
                server.resume()
            time.sleep(SETTLE_SECONDS)
            yield system
            time.sleep(SETTLE_SECONDS)
        finally:
            for server in system.servers:
                server.pause()

    def attempt(self, name: str, ask: Callable[[System], T]) -> T | None:
        """What ``ask`` returns in this system's turn; None if it fails, which is the end of the system, or is not there."""
        if name not in self.systems:
            return None
        try:
            with self.turn(name) as system:
                return ask(system)
        except (RequestError, ServerError, httpx.HTTPError) as error:
            self.leave_out(name, _short(error))
            return None

    def those_that_fit(self, names: Sequence[str]) -> list[str]:
        """The first of these systems for which there is memory beside the servers that are up."""
        # One that shares a pool says less than it needs; the others say it all, their pools being written at start.
        each = max((memory_bytes([server]) for server in self._servers.values()), default=0)
        free = psutil.virtual_memory().available - RESERVE_BYTES
        per_system = 2 * max(each, self._kv_bytes) + PEER_EXTRA_BYTES
        return list(names[: max(0, int(free // per_system))])


def _unpin(server: Server) -> None:
    """Let every thread run on every core: NixlConnector pins its worker to one, which others then share."""
    every = os.sched_getaffinity(0)
    for process in server.processes():
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            with suppress(OSError):
                os.sched_setaffinity(int(task.name), every)


def _remove_files(hand_off: HandOff) -> None:
    if isinstance(hand_off, FolderHandOff):
        hand_off.remove()


def _short(error: Exception) -> str:
    """The first line, and what looks like the cause in the tail of a log."""
    lines = [line.strip() for line in str(error).splitlines()]
    causes = [line for line in lines[1:] if "Error: " in line]
    return ": ".join([lines[0] if lines else repr(error), *causes[-1:]])[:400]
