"""Real servers on two hosts (network namespaces): right tokens, and a cable that is cut while it is least welcome."""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from examples.hosts import TwoHosts
from examples.pair import Server, kv_transfer_config
from tests.e2e.conftest import LOG_DIR, Answer, Rig, prompt_of, wait_until
from tests.network.conftest import needs_mooncake
from tests.support.servers import ready, vllm_server

pytestmark = [pytest.mark.e2e, needs_mooncake]

TIMEOUT_SECONDS = 2.0
LONG = 1500


@dataclass
class FarPair:
    """Prefill on one host, decode on the other."""

    rig: Rig
    hosts: TwoHosts
    prefill: Server
    decode: Server

    def hand_over(self, prompt: list[int], ticket: dict[str, Any] | None = None) -> Answer:
        """Both legs; checks the tokens against a plain server."""
        ticket = ticket or self.rig.ticket(prompt, self.prefill)
        answer = self.rig.complete(self.decode.url, prompt, kv_transfer_params=ticket)
        expected = self.rig.expected(prompt)
        assert answer.tokens == expected.tokens
        assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-3)
        return answer

    def is_clean(self) -> bool:
        """No block is in use on either side, and every lease has ended."""
        for server in (self.prefill, self.decode):
            self.rig.complete(server.url, [11, 12], 2)
        usage = [self.rig.metric(server, "vllm:kv_cache_usage_perc") for server in (self.prefill, self.decode)]
        published = self.rig.metric(self.prefill, "vllm:mc2_leases_published_total")
        return usage == [0, 0] and self.rig.metric(self.prefill, "vllm:mc2_leases_ended_total") == published


@pytest.fixture(scope="module")
def far(rig: Rig, tiny_model: Path) -> Iterator[FarPair]:
    try:
        hosts = TwoHosts()
    except (PermissionError, FileNotFoundError) as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")
    with hosts:
        servers = []
        for host, role in zip(hosts.hosts, ("kv_producer", "kv_consumer"), strict=True):
            extra = {
                **host.settings,
                "tcp_timeout_seconds": TIMEOUT_SECONDS,
                "handshake_timeout_seconds": 3.0,
                "report_in_response": True,
            }
            server = vllm_server(
                f"far-{host.name}", tiny_model, kv_config=kv_transfer_config(role, extra=extra),  # type: ignore[arg-type]
                log_dir=LOG_DIR, host=host.admin, wrapper=host.wrapper,
            )  # fmt: skip
            servers.append(server)
        with ready(servers):
            yield FarPair(rig, hosts, *servers)


@pytest.mark.parametrize("length", [1, 128, 129, 700, LONG])
def test_right_tokens_from_another_host(far: FarPair, length: int) -> None:
    report = far.hand_over(prompt_of(length, seed=9500 + length)).report
    assert (report["way"], report["reason"]) == ("pull", "other_host")
    assert report["kv_bytes_copied"] == -(-(length - 1) // 128) * 128 * 1024
    wait_until(far.is_clean)


@pytest.mark.slow
def test_eight_at_once_from_another_host(far: FarPair) -> None:
    prompts = [prompt_of(60 + 150 * number, seed=9550 + number) for number in range(8)]
    for prompt in prompts:
        far.rig.expected(prompt)
    with ThreadPoolExecutor(len(prompts)) as pool:
        tickets = list(pool.map(lambda prompt: far.rig.ticket(prompt, far.prefill), prompts))
        answers = list(pool.map(far.hand_over, prompts, tickets))
    assert {answer.report["way"] for answer in answers} == {"pull"}
    wait_until(far.is_clean)


def test_the_ticket_names_an_address_and_no_secret(far: FarPair) -> None:
    ticket = far.rig.ticket(prompt_of(40, seed=9600), far.prefill)
    assert ticket["remote_host"] == far.hosts.hosts[0].data and 0 < ticket["remote_port"] < 65536
    secret = Path(far.hosts.hosts[0].settings["tcp_secret_file"]).read_text()
    assert secret not in json.dumps(ticket)
    assert secret not in far.prefill.log_text() + far.decode.log_text()


@pytest.mark.slow
def test_a_cable_that_is_cut_before_the_first_word(far: FarPair) -> None:
    """Decode cannot reach prefill at all: it computes the prompt itself."""
    prompt = prompt_of(300, seed=9601)
    ticket = far.rig.ticket(prompt, far.prefill)
    far.hosts.cut()
    try:
        # The session of earlier tests must be over, so that a new one is tried.
        time.sleep(2 * TIMEOUT_SECONDS)
        wait_until(lambda: far.rig.complete(far.decode.url, [11, 12], 2) is not None)
        report = far.hand_over(prompt, ticket).report
        assert report["way"] == "recompute"
        assert report["reason"] in {"handshake_timeout", "peer_unreachable"}
    finally:
        far.hosts.mend()
    assert far.hand_over(prompt_of(300, seed=9602)).report["way"] == "pull"
    # The ticket of before the cut was never claimed, and is good until its offer ends.
    assert far.hand_over([*prompt, 7], ticket).report["way"] == "pull"
    wait_until(far.is_clean)


@pytest.mark.slow
def test_a_cable_that_is_cut_while_the_session_is_open(far: FarPair) -> None:
    """The claim is never answered."""
    assert far.hand_over(prompt_of(200, seed=9603)).report["way"] == "pull"
    prompt = prompt_of(300, seed=9604)
    ticket = far.rig.ticket(prompt, far.prefill)
    far.hosts.cut()
    try:
        report = far.hand_over(prompt, ticket).report
        assert report["way"] == "recompute"
        assert report["reason"] in {"peer_gone", "peer_unreachable", "handshake_timeout"}
    finally:
        far.hosts.mend()
    assert far.hand_over(prompt_of(300, seed=9605)).report["way"] == "pull"


@pytest.mark.slow
def test_a_cable_that_is_cut_while_blocks_are_read(far: FarPair) -> None:
    """Prefill takes its blocks back after a while; decode computes the prompt, and its other requests never stop."""
    prompt = prompt_of(LONG, seed=9606)
    ticket = far.rig.ticket(prompt, far.prefill)
    far.hosts.slow_down(2)
    answers: list[Answer] = []
    try:
        thread = threading.Thread(target=lambda: answers.append(far.hand_over(prompt, ticket)))
        thread.start()
        # The claim has been answered; what is read then takes seconds at this speed.
        wait_until(lambda: far.rig.metric(far.prefill, "vllm:mc2_leases", state="held") == 1)
        far.hosts.cut()
        short = prompt_of(60, seed=9607)
        assert far.rig.complete(far.decode.url, short).tokens == far.rig.expected(short).tokens
        thread.join(200)
    finally:
        far.hosts.mend()
        far.hosts.slow_down(0)
    (answer,) = answers
    assert (answer.report["way"], answer.report["reason"]) == ("recompute", "pull_failed")
    wait_until(far.is_clean)
    assert far.hand_over(prompt_of(LONG, seed=9608)).report["way"] == "pull"
    wait_until(far.is_clean)


@pytest.mark.slow
def test_prefill_restarted_at_the_same_address_is_another(far: FarPair) -> None:
    """Tickets of a prefill that was killed are for nobody; its successor is met anew."""
    prompt = prompt_of(300, seed=9609)
    ticket = far.rig.ticket(prompt, far.prefill)
    far.prefill.kill()
    report = far.hand_over(prompt, ticket).report
    assert report["way"] == "recompute"
    assert report["reason"] in {"peer_gone", "peer_unreachable"}
    far.rig.complete(far.decode.url, [11, 12], 2)
    assert far.rig.metric(far.decode, "vllm:kv_cache_usage_perc") == 0
