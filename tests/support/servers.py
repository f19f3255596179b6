"""Real vLLM servers for tests: `vllm_server` of `examples/pair.py`, forked from a process that has vLLM imported."""

import atexit
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from examples import pair
from examples.pair import LOGS
from tests.support.processes import ZygoteClient
from tests.support.vllm_zygote import read_at_import
from vllm_mc2.bench.servers import Process, Server, launch

LOG = LOGS / "vllm-zygote.log"
VLLM = [sys.executable, "-m", "vllm.entrypoints.cli.main"]


class ForkedServer:
    """A server's first process; the part of `subprocess.Popen` that `Server` needs."""

    def __init__(self, zygote: ZygoteClient, pid: int, pidfd: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._zygote, self._pidfd = zygote, pidfd

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._pidfd], [], [], 0)[0]:
            self.returncode = self._zygote.exit_code(self.pid)
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


class ServerZygote:
    """Starts :mod:`tests.support.vllm_zygote` when the first server is wanted. One thread uses it."""

    def __init__(self) -> None:
        self._client: ZygoteClient | None = None
        self._environment: dict[str, str] = {}

    def launch(self, command: Sequence[str], log: IO[bytes], environment: Mapping[str, str]) -> Process:
        """Fork the server, or start it as `Server` itself would where it is not one that can be forked."""
        words, network = list(command), None
        if words[0] == "nsenter":
            # Of :class:`examples.hosts.Host`.
            network, words = words[1].removeprefix("--net="), words[2:]
        if words[: len(VLLM)] != VLLM:
            return launch(command, log, environment)
        if self._client is None:
            LOG.parent.mkdir(parents=True, exist_ok=True)
            self._environment = read_at_import(environment)
            self._client = ZygoteClient("tests.support.vllm_zygote", [], LOG, environment)
            atexit.register(self._client.close)
        if read_at_import(environment) != self._environment:
            return launch(command, log, environment)
        spec = {"command": words[2:], "environment": dict(environment), "network": network}
        return ForkedServer(self._client, *self._client.fork(spec, [], log.fileno()))


ZYGOTE = ServerZygote()


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
