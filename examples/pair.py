"""Start the servers of the demo and the tests: prefill, decode, the proxy, and plain ones.

`Server` and what goes with it come from `vllm_mc2.bench.servers`; here they get the log folder of this
checkout, and the folder that tames vLLM's busy waiting on a small machine. `Pair` is a prefill server, a
decode server and the proxy, started side by side.

    with Pair(model) as pair:
        pair.wait_ready()
        httpx.post(f"{pair.url}/v1/completions", json={...})

Single-threaded: one owner calls the methods of a `Server`. The servers answer on the loopback address only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from examples.hosts import TwoHosts
from vllm_mc2.bench import servers
from vllm_mc2.bench.servers import (
    CONNECTOR,
    HOST,
    READY_SECONDS,
    VLLM_ENVIRONMENT,
    Policy,
    Role,
    Server,
    ServerError,
    free_ports,
    kv_transfer_config,
)

__all__ = [
    "CONNECTOR",
    "HOST",
    "LOGS",
    "QUIET",
    "ROOT",
    "VLLM_ENVIRONMENT",
    "Pair",
    "Policy",
    "Role",
    "Server",
    "ServerError",
    "free_ports",
    "kv_transfer_config",
    "proxy_server",
    "vllm_server",
]

ROOT = Path(__file__).resolve().parents[1]
QUIET = ROOT / "examples" / "setup" / "quiet"
LOGS = ROOT / "build" / "logs"


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
    host: str = HOST,
    wrapper: Sequence[str] = (),
    launch: servers.Launch = servers.launch,
) -> Server:
    """Start `vllm serve`; a plain server without `kv_config`."""
    search = os.pathsep.join(filter(None, [str(QUIET), os.environ.get("PYTHONPATH")]))
    return servers.vllm_server(
        name,
        model,
        port=port,
        kv_config=kv_config,
        max_model_len=max_model_len,
        arguments=arguments,
        environment={"PYTHONPATH": search, **(environment or {})},
        log_dir=log_dir,
        host=host,
        wrapper=wrapper,
        launch=launch,
    )


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
        hosts: TwoHosts | None = None,
    ) -> None:
        """`hosts`: where prefill and decode run, if not both here."""

        def start(name: str, role: Role, extra: Mapping[str, Any] | None, more: Sequence[str]) -> Server:
            wrapper: tuple[str, ...] = ()
            config, place = None, HOST
            if hosts is not None:
                own = hosts.hosts[0 if role == "kv_producer" else 1]
                extra, place, wrapper = {**own.settings, **(extra or {})}, own.admin, tuple(own.wrapper)
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
                host=place,
                wrapper=wrapper,
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
