"""``/metrics`` and the log line of real servers: counted once, 0 again while nobody steps, and a stopped engine."""

import math
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.pair import Server, kv_transfer_config
from tests.e2e.conftest import LOG_DIR, Rig, processes_named, prompt_of, wait_until
from tests.support.servers import ready, vllm_server

pytestmark = [pytest.mark.e2e]

PROMPT = prompt_of(600, seed=311)


def leases(rig: Rig, server: Server) -> float:
    return rig.metric(server, "vllm:mc2_leases")


def test_a_hand_off_on_both_sides(rig: Rig) -> None:
    before = {
        name: rig.metric(rig.decode, f"vllm:mc2_{name}")
        for name in ("handoff_seconds_count", "kv_bytes_not_copied_total", "blocks_attached_total")
    }
    attached = rig.metric(rig.decode, "vllm:mc2_handoffs_total", way="attach")
    ticket = rig.ticket(PROMPT)
    # A gauge may be a second old: whoever read it last may have been the test before this one.
    wait_until(lambda: rig.metric(rig.prefill, "vllm:mc2_leases", state="offered") == 1)
    assert rig.metric(rig.prefill, "vllm:mc2_lent_blocks") == 5
    assert 0 < rig.metric(rig.prefill, "vllm:mc2_lent_share") < 1
    answer = rig.complete(rig.decode.url, PROMPT, kv_transfer_params=ticket)
    assert answer.tokens == rig.expected(PROMPT).tokens
    # Prefill has not made a step since; what it says is true all the same.
    wait_until(lambda: leases(rig, rig.prefill) == rig.metric(rig.prefill, "vllm:mc2_lent_blocks") == 0)
    assert rig.metric(rig.decode, "vllm:mc2_handoffs_total", way="attach") == attached + 1
    after = {name: rig.metric(rig.decode, f"vllm:mc2_{name}") for name in before}
    bytes_per_block = 128 * 1024
    assert {name: after[name] - before[name] for name in before} == {
        "handoff_seconds_count": 1, "kv_bytes_not_copied_total": 4 * bytes_per_block, "blocks_attached_total": 4,
    }  # fmt: skip
    # Those that other tests have ended were mapped, too.
    num_mapped = rig.metric(rig.decode, "vllm:mc2_map_seconds_count")
    wait_until(lambda: 1 <= rig.metric(rig.decode, "vllm:mc2_peers", state="ready") <= num_mapped)
    for name in ("loans", "borrowed_blocks", "requests_with_ticket", "dead_peer_bytes"):
        wait_until(lambda name=name: rig.metric(rig.decode, f"vllm:mc2_{name}") == 0)
    # What prefill had cached itself goes to decode, whose usage numbers are made of it.
    assert ticket["remote_prefill_cached_tokens"] == 0
    again = rig.ticket(PROMPT)
    assert again["remote_prefill_cached_tokens"] == 4 * 128
    rig.complete(rig.decode.url, PROMPT, kv_transfer_params=again)
    wait_until(lambda: "KV Transfer metrics: hand-offs in place=" in rig.decode.log_text())
    wait_until(lambda: "leases published=" in rig.prefill.log_text())
    rig.assert_clean()


def test_a_stopped_engine_does_not_stop_its_metrics(rig: Rig) -> None:
    rig.complete(rig.decode.url, PROMPT, kv_transfer_params=rig.ticket(PROMPT))
    wait_until(lambda: leases(rig, rig.prefill) == 0)
    [core] = processes_named(rig.prefill, "EngineCore")
    os.kill(core.pid, signal.SIGSTOP)
    try:
        time.sleep(1.5)  # the last answer is not fresh any more
        assert math.isnan(leases(rig, rig.prefill))
        assert rig.metric(rig.prefill, "vllm:mc2_leases_published_total") > 0
    finally:
        os.kill(core.pid, signal.SIGCONT)
    wait_until(lambda: leases(rig, rig.prefill) == 0)
    rig.assert_clean()


@pytest.fixture
def two_servers(rig: Rig, tiny_model: Path) -> Iterator[Server]:
    """One prefill engine behind two API server processes, which share their values through files."""
    config = kv_transfer_config("kv_producer", extra={"socket_dir": str(rig.socket_dir), "offer_timeout_seconds": 20.0})
    server = vllm_server(
        "prefill-two-api", tiny_model, kv_config=config, arguments=["--api-server-count", "2"], log_dir=LOG_DIR
    )
    with ready([server]):
        yield server


@pytest.mark.slow
def test_two_api_servers(rig: Rig, two_servers: Server) -> None:
    for seed in range(4):
        rig.ticket(prompt_of(300, seed=seed), two_servers)
    assert rig.metric(two_servers, "vllm:mc2_leases_published_total") == 4
    wait_until(lambda: leases(rig, two_servers) > 0)
    wait_until(lambda: leases(rig, two_servers) == 0)
    assert rig.metric(two_servers, "vllm:mc2_lent_share") == 0
    assert rig.metric(two_servers, "vllm:mc2_leases_ended_total") == 0  # it has not made a step since
    rig.complete(two_servers.url, [11, 12], 2)
    assert rig.metric(two_servers, "vllm:mc2_leases_ended_total", reason="expired") == 4
