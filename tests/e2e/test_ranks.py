"""Tensor parallel pairs: two ranks to two in place; two to one and one to two by copying slices of heads."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.pair import Server, kv_transfer_config
from tests.e2e.conftest import LOG_DIR, Answer, Rig, prompt_of
from tests.support.servers import ready, vllm_server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LENGTHS = [1, 129, 700]


@pytest.fixture(scope="module")
def two_ranks(rig: Rig, tiny_model: Path) -> Iterator[tuple[Server, Server]]:
    """A prefill and a decode of two workers each, on the socket directory of the others."""
    extra = {"socket_dir": str(rig.socket_dir), "report_in_response": True}
    size = ["--tensor-parallel-size", "2"]
    configs = {
        "prefill-tp2": kv_transfer_config("kv_producer", extra=extra),
        "decode-tp2": kv_transfer_config("kv_consumer", extra=extra),
    }
    servers = [
        vllm_server(name, tiny_model, kv_config=config, arguments=size, log_dir=LOG_DIR)
        for name, config in configs.items()
    ]
    with ready(servers):
        yield servers[0], servers[1]


def hand_over(rig: Rig, prefill: Server, decode: Server, prompt: list[int]) -> Answer:
    """Both legs; checks the tokens against a plain server of one rank."""
    ticket = rig.ticket(prompt, prefill)
    answer = rig.complete(decode.url, prompt, kv_transfer_params=ticket)
    expected = rig.expected(prompt)
    # Two ranks add in another order than one: equal tokens on this model, and log-probabilities to rounding.
    assert answer.tokens == expected.tokens
    assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-3)
    return answer


@pytest.mark.parametrize("length", LENGTHS)
def test_two_to_two_in_place(rig: Rig, two_ranks: tuple[Server, Server], length: int) -> None:
    report = hand_over(rig, *two_ranks, prompt_of(length, seed=9000 + length)).report
    assert report["way"] == "attach"
    assert report["blocks_attached"] == (length - 1) // 128


@pytest.mark.parametrize("length", LENGTHS)
def test_two_to_one_by_slices(rig: Rig, two_ranks: tuple[Server, Server], length: int) -> None:
    report = hand_over(rig, two_ranks[0], rig.decode, prompt_of(length, seed=9100 + length)).report
    assert (report["way"], report["reason"]) == ("pull", "tensor_parallel")
    assert report["kv_bytes_copied"] == -(-(length - 1) // 128) * 128 * 1024


@pytest.mark.parametrize("length", LENGTHS)
def test_one_to_two_by_slices(rig: Rig, two_ranks: tuple[Server, Server], length: int) -> None:
    report = hand_over(rig, rig.prefill, two_ranks[1], prompt_of(length, seed=9200 + length)).report
    assert (report["way"], report["reason"]) == ("pull", "tensor_parallel")
    assert report["kv_bytes_copied"] == -(-(length - 1) // 128) * 128 * 1024


def test_d18_all_is_given_back(rig: Rig, two_ranks: tuple[Server, Server]) -> None:
    rig.assert_clean()
    for server in two_ranks:
        rig.complete(server.url, [11, 12], 2)
        assert rig.metric(server, "vllm:kv_cache_usage_perc") == 0
    published = rig.metric(two_ranks[0], "vllm:mc2_leases_published_total")
    assert rig.metric(two_ranks[0], "vllm:mc2_leases_ended_total") == published == 2 * len(LENGTHS)


def test_pipeline_parallel_is_refused_by_name(rig: Rig, tiny_model: Path) -> None:
    """Attach is off then; the server serves, and says why."""
    config = json.loads(kv_transfer_config("kv_producer", extra={"socket_dir": str(rig.socket_dir)}))
    with vllm_server(
        "prefill-pp2",
        tiny_model,
        kv_config=json.dumps(config),
        arguments=["--pipeline-parallel-size", "2"],
        log_dir=LOG_DIR,
    ) as server:
        server.wait_ready()
        assert "pipeline_parallel_size 2: only 1 is supported" in server.log_text()
