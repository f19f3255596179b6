"""Real vLLM servers for tests: `vllm_server` of `examples/pair.py`, forked from a process that has vLLM imported."""

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from examples import pair
from examples.pair import ROOT
from tests.support.vllm_zygote import read_at_import
from vllm_mc2.bench.servers import Process, Server, launch

VLLM = [sys.executable, "-m", "vllm.entrypoints.cli.main"]


class ForkedServer:
    """A server's first process; the part of `subprocess.Popen` that `Server` needs."""

    def __init__(self, zygote: "Zygote", pid: int, pidfd: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._zygote, self._pidfd = zygote, pidfd

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._pidfd], [], [], 0)[0]:
            while self.returncode is None:  # it has ended; the zygote reaps it within half a second
                self.returncode = self._zygote.status(self.pid)
            os.close(self._pidfd)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not select.select([self._pidfd], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._pidfd, number)


class Zygote:
    """Starts :mod:`tests.support.vllm_zygote` when the first server is wanted. One thread uses it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._environment: dict[str, str] = {}
        self._control: socket.socket | None = None

    def launch(self, command: Sequence[str], log: IO[bytes], environment: Mapping[str, str]) -> Process:
        """Fork the server, or start it as `Server` itself would where it is not one that can be forked."""
        words, network = list(command), None
        if words[0] == "nsenter":
            # Of :class:`examples.hosts.Host`.
            network, words = words[1].removeprefix("--net="), words[2:]
        if words[: len(VLLM)] != VLLM:
            return launch(command, log, environment)
        if self._control is None:
            self._start(environment)
        assert self._control is not None
        if read_at_import(environment) != read_at_import(self._environment):
            return launch(command, log, environment)
        order = {"command": words[2:], "environment": dict(environment), "network": network}
        socket.send_fds(self._control, [json.dumps(order).encode()], [log.fileno()])
        message, fds, _, _ = socket.recv_fds(self._control, 64, 1)
        return ForkedServer(self, int(message), fds[0])

    def _start(self, environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.support.vllm_zygote", str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=dict(environment), pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )
        assert ours.recv(16) == b"ready", "the zygote has ended"
        self._control, self._environment = ours, dict(environment)
        atexit.register(self.close)

    def status(self, pid: int) -> int | None:
        """Exit status of a server's first process; None if it has not been reaped yet."""
        assert self._control is not None
        self._control.send(json.dumps({"status": pid}).encode())
        found: int | None = json.loads(self._control.recv(64))
        return found

    def close(self) -> None:
        if self._control is not None and self._process is not None:
            self._control.close()
            self._process.wait(20)


ZYGOTE = Zygote()


def vllm_server(name: str, model: Path | str, **more: Any) -> Server:
    """`examples.pair.vllm_server`, forked where that can be."""
    return pair.vllm_server(name, model, launch=ZYGOTE.launch, **more)


@contextmanager
def ready(servers: Sequence[Server]) -> Iterator[None]:
    """Wait until all answer; end them afterwards, whatever happens. They were started side by side."""
    try:
        for server in servers:
            server.wait_ready()
        yield
    finally:
        for server in servers:
            server.request_stop()
        for server in servers:
            server.close()
