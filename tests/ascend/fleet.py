"""Starts engine processes on the simulated NPUs, and talks to them."""

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.processes import ROOT, ZygoteClient
from vllm_mc2.ascend.calls import receive, send

ANSWER_SECONDS = 300.0
READ_EARLY = ("MC2_ACL_SIM_", "PYTORCH_")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class EngineError(Exception):
    """What an engine process said."""


class Nursery:
    """Forks engines out of a process that has imported everything (:mod:`tests.ascend.nursery`)."""

    def __init__(self, environment: Mapping[str, str], log: Path) -> None:
        self._zygote = ZygoteClient("tests.ascend.nursery", [], log, {**environment, **ONE_THREAD})
        self._log = log.open("ab")
        self._environment = dict(environment)
        self._fresh: list[subprocess.Popen[bytes]] = []

    def start(self, environment: Mapping[str, str], arguments: list[str], theirs: socket.socket, program: str) -> int:
        """The pidfd of an engine."""
        if self._knows(environment):
            spec = {"program": program, "arguments": arguments, "environment": dict(environment)}
            return self._zygote.fork(spec, [theirs.fileno()], self._log.fileno())[1]
        return self._start_afresh(environment, arguments, theirs, program)

    def _knows(self, environment: Mapping[str, str]) -> bool:
        """Whether an engine with this environment can be forked: some settings are read when libraries are loaded."""
        names = {name for name in (*environment, *self._environment) if name.startswith(READ_EARLY)}
        return all(environment.get(name) == self._environment.get(name) for name in names - {"MC2_ACL_SIM_DIR"})

    def _start_afresh(
        self, environment: Mapping[str, str], arguments: list[str], theirs: socket.socket, program: str
    ) -> int:
        """The pidfd of an engine that imports everything itself; it is reaped when the nursery is closed."""
        command = [sys.executable, "-m", f"tests.ascend.{program}", str(theirs.fileno()), *arguments]
        started = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env=dict(environment), cwd=ROOT, stdout=self._log, stderr=self._log
        )
        self._fresh.append(started)
        return os.pidfd_open(started.pid)

    def close(self) -> None:
        self._zygote.close()
        for process in self._fresh:
            process.wait(60)
        self._log.close()


class EngineProcess:
    """One of :mod:`tests.ascend.engine`, or of another program that talks the same way."""

    def __init__(
        self, nursery: Nursery, environment: Mapping[str, str], *arguments: str, program: str = "engine"
    ) -> None:
        self._sock, theirs = socket.socketpair()
        self._sock.settimeout(ANSWER_SECONDS)
        with theirs:
            self._pidfd = nursery.start(environment, list(arguments), theirs, program)
        self._is_ready = False

    def _is_over(self, timeout_seconds: float) -> bool:
        return bool(select.select([self._pidfd], [], [], timeout_seconds)[0])

    def wait_ready(self) -> None:
        if not self._is_ready:
            self._answer()
            self._is_ready = True

    def begin(self, name: str, *arguments: Any) -> None:
        self.wait_ready()
        send(self._sock, [name, list(arguments)])

    def call(self, name: str, *arguments: Any) -> Any:
        self.begin(name, *arguments)
        return self._answer()

    def answer(self) -> Any:
        return self._answer()

    def _answer(self) -> Any:
        answer = receive(self._sock)
        if answer is None:
            raise EngineError("the process has ended, see the log")
        outcome, value = answer
        if outcome != "ok":
            raise EngineError(value)
        return value

    def kill(self) -> None:
        signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        assert self._is_over(60)
        self._sock.close()

    def close(self) -> None:
        self._sock.close()
        if not self._is_over(60):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            assert self._is_over(60)
        os.close(self._pidfd)


class Fleet:
    """The engines of one test: they share a socket directory and a simulated machine."""

    def __init__(self, nursery: Nursery, environment: Mapping[str, str], model: Path, socket_dir: Path) -> None:
        self._nursery = nursery
        self.environment = dict(environment)
        self.socket_dir = socket_dir
        self._model = model
        self._engines: list[EngineProcess] = []

    def start(
        self, role: str, shape: str = "keys and values", npu: int | None = None, **environment: str
    ) -> EngineProcess:
        """Returns at once; the first call waits until the engine is there."""
        device = npu if npu is not None else int(role == "kv_consumer")
        engine = EngineProcess(
            self._nursery,
            {**self.environment, **environment},
            str(self._model),
            str(self.socket_dir),
            role,
            shape,
            str(device),
        )
        self._engines.append(engine)
        return engine

    def start_rank(self, role: str, rank: int, size: int, kind: str) -> EngineProcess:
        """One of :mod:`tests.ascend.rank_side`."""
        npu = str(int(role == "decode"))
        side = EngineProcess(
            self._nursery, self.environment, role, npu, str(rank), str(size), kind, program="rank_side"
        )
        self._engines.append(side)
        return side

    def close(self) -> None:
        for engine in reversed(self._engines):
            engine.close()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [(length * 31 + 7 * i + 101 * seed) % 997 for i in range(length)]


def prefill(engine: EngineProcess, request_id: str, prompt: list[int]) -> dict[str, Any]:
    """The ticket of a request's prefill leg."""
    params: dict[str, Any] = engine.call("run", request_id, prompt, {"do_remote_decode": True}, 1)["params"]
    return params
