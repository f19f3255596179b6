"""Start real vLLM servers for the demo and the tests, and be sure to stop them.

`Server` is one process tree: a `vllm serve` or the proxy. It is started on construction, in a session of
its own, with its output in a log file; `close()`, or leaving its `with` block, ends exactly the processes
that it started. `Pair` is a prefill server, a decode server and the proxy, started side by side.

    with Pair(model) as pair:
        pair.wait_ready()
        httpx.post(f"{pair.url}/v1/completions", json={...})

Single-threaded: one owner calls the methods of a `Server`. The servers answer on the loopback address only.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import httpx
import psutil

ROOT = Path(__file__).resolve().parents[1]
QUIET = ROOT / "examples" / "setup" / "quiet"
LOGS = ROOT / "build" / "logs"
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
ORPHAN_SECONDS = 3.0
POLL_SECONDS = 0.2
LOG_TAIL_LINES = 40


class ServerError(RuntimeError):
    """A server ended, or did not answer in time; the message carries the tail of its log."""


class Server:
    """One server process and all its descendants; construction starts it."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        port: int,
        *,
        log_dir: Path = LOGS,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.port = port
        self.url = f"http://{HOST}:{port}"
        self.log_path = log_dir / f"{name}.log"
        self._gone = False
        log_dir.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                # Ctrl-C at the terminal must reach the owner only: it stops the servers in order.
                start_new_session=True,
            )

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
            return httpx.get(f"{self.url}/health", timeout=5.0, trust_env=False).is_success
        except httpx.HTTPError:
            return False

    def wait_ready(
        self,
        timeout: float = READY_SECONDS,
        progress: Callable[[Server, float], None] | None = None,
    ) -> None:
        """Wait until /health answers; `progress` is told the seconds waited at every poll."""
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

    def log_text(self) -> str:
        return self.log_path.read_text(errors="replace")

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """The log's last lines, without vLLM's list of its routes, which would be all there is."""
        kept = [line for line in self.log_text().splitlines() if "] Route: /" not in line]
        tail = "\n".join(f"    {line}" for line in kept[-lines:])
        return f"{tail}\n(whole log: {self.log_path})"

    def request_stop(self) -> None:
        """Ask the server to end, without waiting; `close` does the rest."""
        if self.running:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End every process of this server at once, as a crash would."""
        while processes := self.processes():
            for process in processes:
                _kill(process)
            time.sleep(POLL_SECONDS / 10)
            self._process.poll()

    def close(self) -> None:
        """SIGTERM, then SIGKILL for what is left; returns when all its processes are gone."""
        self.request_stop()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            pass
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


def _session(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid)
    except OSError:
        return None


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        pass


def free_ports(count: int) -> list[int]:
    """Ports that are free now, all different."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((HOST, 0))
        return [int(one.getsockname()[1]) for one in sockets]


def kv_transfer_config(
    role: Role,
    *,
    connector: str = CONNECTOR,
    policy: Policy = "recompute",
    extra: Mapping[str, Any] | None = None,
) -> str:
    """Value of vLLM's --kv-transfer-config."""
    return json.dumps(
        {
            "kv_connector": connector,
            "kv_role": role,
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": dict(extra or {}),
        }
    )


def vllm_server(
    name: str,
    model: Path | str,
    *,
    port: int | None = None,
    kv_config: str | None = None,
    max_model_len: int = 2048,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    log_dir: Path = LOGS,
) -> Server:
    """Start `vllm serve`; a plain server without `kv_config`."""
    port = free_ports(1)[0] if port is None else port
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    command += ["--served-model-name", Path(model).name, "--host", HOST, "--port", str(port)]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", str(max_model_len)]
    command += ["--disable-access-log-for-endpoints", "/health,/metrics"]
    if kv_config is not None:
        command += ["--kv-transfer-config", kv_config]
    search = os.pathsep.join(filter(None, [str(QUIET), os.environ.get("PYTHONPATH")]))
    settings = {**VLLM_ENVIRONMENT, "PYTHONPATH": search, **(environment or {})}
    return Server(name, [*command, *arguments], port, log_dir=log_dir, environment=settings)


def proxy_server(
    prefills: Sequence[str],
    decodes: Sequence[str],
    *,
    name: str = "proxy",
    port: int | None = None,
    log_dir: Path = LOGS,
) -> Server:
    """Start the example proxy in front of these servers (URLs)."""
    port = free_ports(1)[0] if port is None else port
    command = [sys.executable, str(ROOT / "examples" / "proxy.py")]
    command += ["--host", HOST, "--port", str(port)]
    command += [part for url in prefills for part in ("--prefill", url)]
    command += [part for url in decodes for part in ("--decode", url)]
    return Server(name, command, port, log_dir=log_dir)


class Pair:
    """Prefill server, decode server and proxy; construction starts them, `wait_ready` waits."""

    def __init__(
        self,
        model: Path | str,
        *,
        connector: str | None = CONNECTOR,
        policy: Policy = "recompute",
        prefill_extra: Mapping[str, Any] | None = None,
        decode_extra: Mapping[str, Any] | None = None,
        max_model_len: int = 2048,
        arguments: Sequence[str] = (),
        prefill_arguments: Sequence[str] = (),
        decode_arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        log_dir: Path = LOGS,
    ) -> None:
        def start(name: str, role: Role, extra: Mapping[str, Any] | None, more: Sequence[str]) -> Server:
            config = None
            if connector is not None:
                config = kv_transfer_config(role, connector=connector, policy=policy, extra=extra)
            server = vllm_server(
                name,
                model,
                port=ports[name],
                kv_config=config,
                max_model_len=max_model_len,
                arguments=[*arguments, *more],
                environment=environment,
                log_dir=log_dir,
            )
            return starting.enter_context(server)

        names = ("prefill", "decode", "proxy")
        ports = dict(zip(names, free_ports(len(names)), strict=True))
        with ExitStack() as starting:
            self.prefill = start("prefill", "kv_producer", prefill_extra, prefill_arguments)
            self.decode = start("decode", "kv_consumer", decode_extra, decode_arguments)
            self.proxy = starting.enter_context(
                proxy_server([self.prefill.url], [self.decode.url], port=ports["proxy"], log_dir=log_dir)
            )
            # All started: from here on `close` owns them.
            self._stack = starting.pop_all()

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
    def url(self) -> str:
        """Where clients ask: the proxy."""
        return self.proxy.url

    @property
    def servers(self) -> tuple[Server, ...]:
        return (self.prefill, self.decode, self.proxy)

    def wait_ready(
        self,
        timeout: float = READY_SECONDS,
        progress: Callable[[Server, float], None] | None = None,
    ) -> None:
        """Wait until all three answer."""
        for server in self.servers:
            server.wait_ready(timeout, progress)

    def close(self) -> None:
        """Stop all three; side by side, so that it takes as long as the slowest."""
        for server in self.servers:
            server.request_stop()
        self._stack.close()
