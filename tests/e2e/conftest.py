"""Real vLLM servers, started once for all tests: prefill, decode, proxy, a plain server to compare with, and a small decode."""

import functools
import json
import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import psutil
import pytest

from examples import pair
from examples.pair import Server, kv_transfer_config, proxy_server
from tests.support import waiting
from tests.support.locking import own_folder
from tests.support.ports import own_ports
from tests.support.servers import vllm_server
from vllm_mc2.bench import servers as bench_servers

LOG_DIR = own_folder(Path(__file__).resolve().parents[2] / "build" / "logs" / "e2e")
VOCABULARY = 49_000
wait_until = functools.partial(waiting.wait_until, timeout_seconds=60.0, poll_seconds=0.1)
"""A poll asks a server, which has better things to do."""
MAX_TOKENS = 12


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random token ids; a prefix of longer ones with the same seed."""
    return [random.Random(seed * 1_000_003 + i).randrange(10, VOCABULARY) for i in range(length)]


@dataclass
class Answer:
    """One completion."""

    tokens: list[int]
    logprobs: list[float]
    params: dict[str, Any] | None

    @property
    def report(self) -> dict[str, Any]:
        """What decode says it did."""
        assert self.params is not None
        report: dict[str, Any] = self.params["mc2"]
        return report


@dataclass
class Rig:
    """The servers and a client."""

    model: str
    socket_dir: Path
    prefill: Server
    decode: Server
    small_decode: Server
    """Eleven blocks, so that it preempts; fails requests whose ticket cannot be used."""
    pull_decode: Server
    """In mode ``pull``."""
    proxy: Server
    plain: Server
    client: httpx.Client
    plain_answers: dict[tuple[int, ...], Answer] = field(default_factory=dict)

    def complete(self, url: str, prompt: list[int], max_tokens: int = MAX_TOKENS, **more: Any) -> Answer:
        """Greedy completion with token ids and log-probabilities."""
        body = {
            "model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
            "logprobs": 1, "return_token_ids": True, **more,
        }  # fmt: skip
        response = self.client.post(f"{url}/v1/completions", json=body)
        assert response.status_code == 200, response.text
        data = response.json()
        choice = data["choices"][0]
        return Answer(choice["token_ids"], choice["logprobs"]["token_logprobs"], data.get("kv_transfer_params"))

    def expected(self, prompt: list[int], max_tokens: int = MAX_TOKENS) -> Answer:
        """What a plain server answers; asked one at a time."""
        key = (max_tokens, *prompt)
        if key not in self.plain_answers:
            self.plain_answers[key] = self.complete(self.plain.url, prompt, max_tokens)
        return self.plain_answers[key]

    def ticket(self, prompt: list[int], prefill: Server | None = None, **more: Any) -> dict[str, Any]:
        """The prefill leg alone."""
        answer = self.complete(
            (prefill or self.prefill).url,
            prompt,
            1,
            kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": False},
            **more,
        )
        assert answer.params is not None
        return answer.params

    def metric(self, server: Server, name: str, **labels: str) -> float:
        """Sum of a metric's samples with these labels."""
        total = 0.0
        for line in self.client.get(f"{server.url}/metrics").text.splitlines():
            head, _, value = line.rpartition(" ")
            if head.split("{")[0] == name and all(f'{key}="{text}"' in head for key, text in labels.items()):
                total += float(value)
        return total

    @property
    def engines(self) -> list[Server]:
        """All that hand over or take over."""
        return [self.prefill, self.decode, self.small_decode, self.pull_decode]

    def tick(self) -> None:
        """A tiny request to each engine, so that the schedulers' hooks run and the metrics are fresh."""
        for server in self.engines:
            self.complete(server.url, [11, 12], 2)

    def assert_clean(self) -> None:
        """No request runs; every engine's block pool is back to its start value."""
        self.tick()
        for server in self.engines:
            assert self.metric(server, "vllm:num_requests_running") == 0
            assert self.metric(server, "vllm:kv_cache_usage_perc") == 0
        published = self.metric(self.prefill, "vllm:mc2_leases_published_total")
        assert self.metric(self.prefill, "vllm:mc2_leases_ended_total") == published


def footprint(server: Server) -> dict[str, int]:
    """Descriptors, mappings and threads of a server's processes, by kind of process."""
    counts: dict[str, int] = {}
    for process in server.processes():
        name = "/".join(process.cmdline()[:1]) or process.name()
        counts[f"{name} fds"] = counts.get(f"{name} fds", 0) + process.num_fds()
        counts[f"{name} threads"] = counts.get(f"{name} threads", 0) + process.num_threads()
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        counts[f"{name} pools"] = counts.get(f"{name} pools", 0) + maps.count("memfd:mc2")
    return counts


def processes_named(server: Server, part: str) -> list[psutil.Process]:
    """The server's processes whose title contains ``part`` (vLLM sets titles: EngineCore, Worker)."""
    return [process for process in server.processes() if part in " ".join(process.cmdline())]


@pytest.fixture(scope="session", autouse=True)
def _ports() -> Iterator[None]:
    """Servers listen many seconds after their port was chosen: until the end of the session nobody else gets it."""
    with ExitStack() as stack:

        def take(count: int) -> list[int]:
            return stack.enter_context(own_ports(count))

        for module in (pair, bench_servers):
            stack.enter_context(mock.patch.object(module, "free_ports", take))
        yield


@pytest.fixture(scope="session")
def rig(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    socket_dir = tmp_path_factory.mktemp("mc2") / "s"
    extra = {"socket_dir": str(socket_dir)}
    decode_extra = {**extra, "report_in_response": True}
    servers: list[Server] = []

    def start(
        name: str, config: str | None, *arguments: str, max_model_len: int = 2048, plugins: str = "mc2"
    ) -> Server:
        server = vllm_server(
            name, tiny_model, kv_config=config, max_model_len=max_model_len, arguments=arguments, log_dir=LOG_DIR,
            environment={"VLLM_PLUGINS": plugins},
        )  # fmt: skip
        servers.append(server)
        return server

    try:
        prefill = start("prefill", kv_transfer_config("kv_producer", extra=extra))
        decode = start("decode", kv_transfer_config("kv_consumer", extra=decode_extra))
        plain = start("plain", None)
        # This one names the module instead of relying on the plugin.
        by_path = json.loads(kv_transfer_config("kv_consumer", extra=decode_extra, policy="fail"))
        by_path["kv_connector_module_path"] = "vllm_mc2.connector"
        small = start(
            "small-decode",
            json.dumps(by_path),
            "--num-gpu-blocks-override", "12", max_model_len=1400, plugins="",
        )  # fmt: skip
        pull = start("pull-decode", kv_transfer_config("kv_consumer", extra={**decode_extra, "mode": "pull"}))
        proxy = proxy_server([prefill.url], [decode.url], log_dir=LOG_DIR)
        servers.append(proxy)
        for server in servers:
            server.wait_ready()
        with httpx.Client(timeout=300, trust_env=False) as client:
            yield Rig(tiny_model.name, socket_dir, prefill, decode, small, pull, proxy, plain, client)
    finally:
        pids = [process.pid for server in servers for process in server.processes()]
        with ThreadPoolExecutor(max(1, len(servers))) as pool:
            list(pool.map(Server.close, servers))
        # Everything is gone: processes, and with them all memory; and no socket is left.
        assert [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"] == []
        assert not socket_dir.exists() or os.listdir(socket_dir) == []
