"""Real servers are killed: prefill in the middle of a decode, a decode's worker, and prefill again by SIGTERM."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.pair import Server, kv_transfer_config
from tests.e2e.conftest import LOG_DIR, Rig, prompt_of, wait_until
from tests.e2e.test_in_place import pool_mappings, worker_of
from tests.support.ports import own_ports
from tests.support.servers import vllm_server

pytestmark = [pytest.mark.e2e]

PROMPT = prompt_of(600, seed=71)
OTHER = prompt_of(700, seed=72)
LONG = 400
"""Tokens: a decode of a few seconds, so that something can happen in the middle of it."""


def with_engine_id(config: str, engine_id: str) -> str:
    return json.dumps({**json.loads(config), "engine_id": engine_id})


class Mortals:
    """A prefill and a decode that tests may kill; the prefill comes back on the same port with the same engine id."""

    def __init__(self, rig: Rig, model: Path, port: int) -> None:
        self._rig = rig
        self._model = model
        self._port = port
        self.prefill = self._start_prefill("mortal-prefill")
        extra = {"socket_dir": str(rig.socket_dir), "report_in_response": True}
        self._decode_config = kv_transfer_config("kv_consumer", extra=extra)
        self.decode = self._start_decode("mortal-decode")

    def _start_decode(self, name: str, *arguments: str) -> Server:
        return vllm_server(name, self._model, kv_config=self._decode_config, arguments=arguments, log_dir=LOG_DIR)

    def _start_prefill(self, name: str) -> Server:
        config = kv_transfer_config("kv_producer", extra={"socket_dir": str(self._rig.socket_dir)})
        return vllm_server(
            name, self._model, port=self._port, kv_config=with_engine_id(config, "phoenix"), log_dir=LOG_DIR
        )

    def restart_prefill(self) -> None:
        self.prefill.close()
        self.prefill = self._start_prefill("phoenix-prefill")
        self.prefill.wait_ready()

    def restart_both(self) -> None:
        """The decode as one that finishes its requests before it ends."""
        self.prefill.close()
        self.decode.close()
        self.prefill = self._start_prefill("third-prefill")
        self.decode = self._start_decode("draining-decode", "--shutdown-timeout", "60")
        self.prefill.wait_ready()
        self.decode.wait_ready()

    def ticket(self, prompt: list[int]) -> dict[str, Any]:
        params = {"do_remote_decode": True, "do_remote_prefill": False}
        answer = self._rig.complete(self.prefill.url, prompt, 1, kv_transfer_params=params)
        assert answer.params is not None
        return answer.params


@pytest.fixture(scope="module")
def mortals(rig: Rig, tiny_model: Path) -> Iterator[Mortals]:
    with own_ports(1) as (port,):
        mortals = Mortals(rig, tiny_model, port)
        try:
            for server in (mortals.prefill, mortals.decode):
                server.wait_ready()
            yield mortals
        finally:
            mortals.decode.close()
            mortals.prefill.close()


def stream(
    rig: Rig, url: str, prompt: list[int], ticket: dict[str, Any], at: dict[int, Callable[[], None]]
) -> list[int]:
    """Decode ``LONG`` tokens and call ``at[n]`` after the n-th chunk."""
    body = {
        "model": rig.model, "prompt": prompt, "max_tokens": LONG, "temperature": 0, "ignore_eos": True, "stream": True,
        "return_token_ids": True, "kv_transfer_params": ticket,
    }  # fmt: skip
    tokens: list[int] = []
    with rig.client.stream("POST", f"{url}/v1/completions", json=body) as response:
        lines = (line for line in response.iter_lines() if line.startswith("data: {"))
        for number, line in enumerate(lines):
            tokens += json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"] or []
            if number in at:
                at[number]()
    return tokens


def test_decode_outlives_its_prefill_and_meets_its_successor(rig: Rig, mortals: Mortals) -> None:
    rig.complete(rig.decode.url, OTHER, kv_transfer_params=mortals.ticket(OTHER))
    (inode,) = {inode for inode, _ in pool_mappings(worker_of(mortals.prefill).pid)}
    worker = worker_of(rig.decode)
    unclaimed = mortals.ticket(OTHER)
    attached = rig.metric(rig.decode, "vllm:mc2_handoffs_total", way="attach")

    tokens = stream(rig, rig.decode.url, PROMPT, mortals.ticket(PROMPT), {20: mortals.prefill.kill})
    assert tokens == rig.expected(PROMPT, LONG).tokens
    assert rig.metric(rig.decode, "vllm:mc2_handoffs_total", way="attach") == attached + 1

    # Nobody asks decode for anything, and still it gives the dead prefill's memory back.
    wait_until(lambda: inode not in {found for found, _ in pool_mappings(worker.pid)})

    orphan = rig.complete(rig.decode.url, OTHER, kv_transfer_params=unclaimed)
    assert orphan.report["way"] == "recompute"
    assert orphan.report["reason"] in {"peer_gone", "peer_unreachable"}
    assert orphan.tokens == rig.expected(OTHER).tokens

    mortals.restart_prefill()
    old = rig.complete(rig.decode.url, OTHER, kv_transfer_params=unclaimed)
    assert old.report["way"] == "recompute"
    new = rig.complete(rig.decode.url, PROMPT, kv_transfer_params=mortals.ticket(PROMPT))
    assert new.report["way"] == "attach"
    assert new.tokens == rig.expected(PROMPT).tokens
    rig.assert_clean()


@pytest.mark.slow
def test_prefill_gets_its_blocks_back_when_a_decodes_worker_is_killed(rig: Rig, mortals: Mortals) -> None:
    """vLLM ends an engine whose worker has died; prefill hears of it from the kernel."""
    ticket = rig.ticket(PROMPT)
    before = rig.metric(rig.prefill, "vllm:mc2_leases_ended_total", reason="peer_gone")

    def kill_worker() -> None:
        worker = worker_of(mortals.decode)
        os.kill(worker.pid, signal.SIGKILL)

    tokens: list[int] = []
    try:
        tokens = stream(rig, mortals.decode.url, PROMPT, ticket, {20: kill_worker})
    except Exception:
        pass  # the server dies under the client, in one way or another
    assert len(tokens) < LONG
    wait_until(
        lambda: rig.tick() or rig.metric(rig.prefill, "vllm:mc2_leases_ended_total", reason="peer_gone") == before + 1
    )
    rig.assert_clean()


@pytest.mark.slow
def test_decode_outlives_a_worker_of_its_prefill(rig: Rig, mortals: Mortals) -> None:
    """vLLM ends the engine; what decode holds stays."""
    engine = mortals.prefill

    def kill_worker() -> None:
        os.kill(worker_of(engine).pid, signal.SIGKILL)

    tokens = stream(rig, rig.decode.url, PROMPT, mortals.ticket(PROMPT), {20: kill_worker})
    assert tokens == rig.expected(PROMPT, LONG).tokens
    wait_until(lambda: not engine.running)
    rig.assert_clean()


@pytest.mark.slow
def test_stopping_either_side_in_order(rig: Rig, mortals: Mortals) -> None:
    """SIGTERM for both in the middle of a decode: prefill ends at once, decode when its request is done."""
    mortals.restart_both()
    stop_prefill, stop_decode = mortals.prefill.request_stop, mortals.decode.request_stop
    tokens = stream(rig, mortals.decode.url, OTHER, mortals.ticket(OTHER), {20: stop_prefill, 40: stop_decode})
    assert tokens == rig.expected(OTHER, LONG).tokens
    wait_until(lambda: not mortals.prefill.running and not mortals.decode.running)
    rig.assert_clean()
