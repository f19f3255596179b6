"""Start real vLLM servers, pause them, and be sure to stop them.

`Server` is one process tree, such as a `vllm serve`. It is started on construction, in a session of its own,
with its output in a log file; `close()`, or leaving its `with` block, ends exactly the processes that it
started. `pause()` stops all of them where they are, so that others can be measured without them.

    with vllm_server("prefill", model, log_dir=logs, kv_config=kv_transfer_config("kv_producer")) as server:
        server.wait_ready()
        httpx.post(f"{server.url}/v1/completions", json={...})

Single-threaded: one owner calls the methods of a `Server`. The servers answer on the loopback address only.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, Protocol, Self

import httpx
import psutil

HOST = "127.0.0.1"
CONNECTOR = "MC2Connector"

Role = Literal["kv_producer", "kv_consumer", "kv_both"]
Policy = Literal["recompute", "fail"]

# Two servers on two cores: no thread pinning, one compute thread each, 1 GiB of KV memory, and no word
# to the network.
VLLM_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}

READY_SECONDS = 300.0
STOP_SECONDS = 20.0
# They tidy shared memory; several servers that end together on few cores take some seconds.
ORPHAN_SECONDS = 10.0
PAUSE_SECONDS = 10.0
POLL_SECONDS = 0.2
NUM_PORTS = 12_000
LOG_TAIL_LINES = 40


class ServerError(RuntimeError):
    """A server ended, or did not answer in time; the message carries the tail of its log."""


class Process(Protocol):
    """The part of `subprocess.Popen` that `Server` uses."""

    @property
    def pid(self) -> int:
        """Process id of the server's first process, which leads its session."""
        ...

    @property
    def returncode(self) -> int | None:
        """Exit status, once `poll` or `wait` has seen the end."""
        ...

    def poll(self) -> int | None:
        """Exit status; None while the process runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Exit status; raises `subprocess.TimeoutExpired` after `timeout` seconds."""
        ...

    def send_signal(self, sig: int, /) -> None:
        """Send a signal, unless the process has ended."""
        ...


Launch = Callable[[Sequence[str], IO[bytes], Mapping[str, str]], Process]
"""Starts a command in a session of its own, its output in a file, with a whole environment."""


def launch(command: Sequence[str], log: IO[bytes], environment: Mapping[str, str]) -> Process:
    """Start `command` as an ordinary child process."""
    return subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environment,
        # Ctrl-C at the terminal must reach the owner only: it stops the servers in order.
        start_new_session=True,
    )


class Server:
    """One server process and all its descendants; construction starts it."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        port: int,
        *,
        log_dir: Path,
        environment: Mapping[str, str | None] | None = None,
        host: str = HOST,
        launch: Launch = launch,
    ) -> None:
        """Start it; `environment` is added to this process's own, and None takes a variable out."""
        self.name = name
        self.port = port
        self.url = f"http://{host}:{port}"
        self.log_path = log_dir / f"{name}.log"
        self._gone = False
        merged: dict[str, str | None] = {**os.environ, **(environment or {})}
        log_dir.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("wb") as log:
            self._process = launch(command, log, {name: value for name, value in merged.items() if value is not None})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The server's first process; engine and workers are its descendants."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the first process has not ended; a paused one is running too."""
        return self._process.poll() is None

    def processes(self) -> list[psutil.Process]:
        """Every process of this server that is alive now, its first one included."""
        # By session, since a descendant whose parent died can no longer be found from the root. The
        # session's number is not given to anybody else as long as one of its processes lives.
        if not self._gone:
            members = [process for process in psutil.process_iter() if _session(process) == self.pid]
            alive = [process for process in members if _alive(process)]
            self._gone = not alive and not self.running
            return alive
        return []

    def healthy(self) -> bool:
        """Whether the server answers /health now."""
        try:
            # Plain HTTP; loading certificates at every poll would take more time from the servers than the rest.
            return httpx.get(f"{self.url}/health", timeout=5.0, trust_env=False, verify=False).is_success  # noqa: S501
        except httpx.HTTPError:
            return False

    def wait_ready(
        self,
        timeout: float = READY_SECONDS,
        progress: Callable[[Server, float], None] | None = None,
    ) -> None:
        """Wait until /health answers; `progress` is told the seconds waited at every poll.

        Raises:
            ServerError: the server ended, or `timeout` seconds have passed.
        """
        started = time.monotonic()
        while not self.healthy():
            waited = time.monotonic() - started
            if not self.running:
                code = self._process.returncode
                raise ServerError(f"{self.name} ended with status {code}\n{self.log_tail()}")
            if waited > timeout:
                raise ServerError(f"{self.name} not ready after {waited:.0f} s\n{self.log_tail()}")
            if progress is not None:
                progress(self, waited)
            time.sleep(POLL_SECONDS)

    def pause(self) -> None:
        """Stop every process where it is (SIGSTOP) until `resume`; returns when all of them stand still.

        Raises:
            ServerError: some do not stop within `PAUSE_SECONDS`.
        """
        deadline = time.monotonic() + PAUSE_SECONDS
        # Again and again, since one that was not stopped yet may have started another.
        while moving := [process for process in self.processes() if not _paused(process)]:
            if time.monotonic() > deadline:
                raise ServerError(f"{self.name} cannot be paused: {[process.pid for process in moving]} go on")
            for process in moving:
                _signal(process, signal.SIGSTOP)
            time.sleep(POLL_SECONDS / 100)

    def resume(self) -> None:
        """Let all processes go on after `pause`; nothing happens to those that were not paused."""
        for process in self.processes():
            _signal(process, signal.SIGCONT)

    def log_text(self) -> str:
        """Everything that the server has printed."""
        return self.log_path.read_text(errors="replace")

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """The log's last lines, without vLLM's list of its routes, which would be all there is."""
        kept = [line for line in self.log_text().splitlines() if "] Route: /" not in line]
        tail = "\n".join(f"    {line}" for line in kept[-lines:])
        return f"{tail}\n(whole log: {self.log_path})"

    def request_stop(self) -> None:
        """Ask the server to end, without waiting; `close` does the rest."""
        if self.running:
            # A paused process would get the request only when it goes on.
            self.resume()
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End every process of this server at once, as a crash would."""
        while processes := self.processes():
            for process in processes:
                _signal(process, signal.SIGKILL)
            time.sleep(POLL_SECONDS / 10)
            self._process.poll()

    def close(self) -> None:
        """SIGTERM, then SIGKILL for what is left; returns when all its processes are gone."""
        self.request_stop()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        # Its descendants end by themselves if it ended in order; one of them tidies shared memory.
        deadline = time.monotonic() + ORPHAN_SECONDS
        while self.processes() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS / 4)
        self.kill()


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _paused(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return True


def _session(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid)
    except OSError:
        return None


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def free_ports(count: int) -> list[int]:
    """Return `count` different ports that are free now.

    They lie below those that the kernel gives to connections: a server listens only half a minute after its port was chosen.
    """
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    candidates = range(max(1024, first_ephemeral - NUM_PORTS), max(1024 + NUM_PORTS, first_ephemeral))
    ports: list[int] = []
    with ExitStack() as stack:
        for port in random.sample(candidates, len(candidates)):
            if len(ports) == count:
                break
            sock = stack.enter_context(socket.socket())
            with suppress(OSError):
                sock.bind((HOST, port))
                ports.append(port)
    return ports


def kv_transfer_config(
    role: Role,
    *,
    connector: str = CONNECTOR,
    policy: Policy = "recompute",
    extra: Mapping[str, Any] | None = None,
    module_path: str | None = None,
) -> str:
    """Value of vLLM's --kv-transfer-config; `module_path` is for connectors that vLLM does not know by name."""
    config: dict[str, Any] = {
        "kv_connector": connector,
        "kv_role": role,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": dict(extra or {}),
    }
    if module_path is not None:
        config["kv_connector_module_path"] = module_path
    return json.dumps(config)


def vllm_server(
    name: str,
    model: Path | str,
    *,
    log_dir: Path,
    port: int | None = None,
    kv_config: str | None = None,
    max_model_len: int = 2048,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str | None] | None = None,
    host: str = HOST,
    wrapper: Sequence[str] = (),
    launch: Launch = launch,
) -> Server:
    """Start `vllm serve` in float32 without compilation; a plain server without `kv_config`.

    `environment` overrides `VLLM_ENVIRONMENT`; None takes a variable out. `host`: where it answers. `wrapper`: a command that
    executes the rest of its line, such as `nsenter`.
    """
    port = free_ports(1)[0] if port is None else port
    command = [*wrapper, sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    command += ["--served-model-name", Path(model).name, "--host", host, "--port", str(port)]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", str(max_model_len)]
    command += ["--disable-access-log-for-endpoints", "/health,/metrics"]
    if kv_config is not None:
        command += ["--kv-transfer-config", kv_config]
    settings = {**VLLM_ENVIRONMENT, **(environment or {})}
    return Server(name, [*command, *arguments], port, log_dir=log_dir, environment=settings, host=host, launch=launch)
