"""D16, D24: what does not fit is refused before anything is mapped, and whatever a ticket or a lease says, the engine lives."""

from typing import Any
from unittest import mock

import pytest

from tests.connector.outcome import finish
from tests.connector.rig import MakeEngine, RigEngine, assert_clean, prefill
from tests.support.fake_model import expected_tokens, prompt_of
from vllm_mc2.connector.fingerprint import OF_A_RANK

PROMPT = prompt_of(70)
FIELDS = [
    "vllm", "model", "dtype", "quantization", "kv_cache_dtype", "kv_cache_groups", "block_size", "num_kv_heads", "head_size",
    "sliding_window", "block_bytes", "head_bytes", "layers", "kv_cache_layout", "attention", "tensor_parallel_size",
    "kv_heads_of_all_ranks", "speculative_config",
]  # fmt: skip


def test_the_list_of_fields_is_complete(make_engine: MakeEngine) -> None:
    assert sorted(make_engine("kv_producer").worker._worker._fingerprint) == sorted(FIELDS)


@pytest.mark.parametrize("mode", ["attach", "pull"])
@pytest.mark.parametrize("field", FIELDS)
def test_d16_one_field_that_differs_is_named_and_nothing_is_mapped(
    make_engine: MakeEngine, field: str, mode: str
) -> None:
    producer, consumer = make_engine("kv_producer"), make_engine("kv_consumer", extra={"mode": mode})
    worker = consumer.worker._worker
    worker._fingerprint[field] = "something else"
    consumer.add("r", PROMPT, prefill(producer, "p", PROMPT))
    if mode == "pull" and field in OF_A_RANK:
        # What depends on the number of ranks is not compared then; what a head's bytes are is.
        consumer.run()
        assert consumer.finished["r"][2]["mc2"]["way"] == "pull"  # type: ignore[index]
        return
    with mock.patch("vllm_mc2.connector.peers.logger.warning") as warning:
        assert finish(consumer, "r", "recompute", PROMPT)["reason"] == "peer_refused"
    (call,) = warning.call_args_list
    assert f"refused: {field} differs" in call.args[0] % call.args[1:]
    assert worker._puller._sources == {}
    assert worker._backend.memory is None or worker._backend.memory.mapped_peers() == []
    assert_clean(consumer)  # prefill keeps what nobody could claim until the offer times out


HOSTILE_TABLES: list[list[int]] = [
    [0] * 5,
    [1, 2, 3, 4, 0],
    [1, 2, 3, 4, 64],
    [1, 2, 3, 4, (1 << 31) - 1],
    [1, 2, 3, 4, (1 << 32) - 1],
    [1, 2, 3, 4, 4],
    [7] * 5,
    [],
    [1, 2, 3, 4],
    [1, 2, 3, 4, 5, 6],
]


def publish_hostile(producer: RigEngine, ticket: dict[str, Any], table: list[int]) -> dict[str, Any]:
    """A prefill that lies: another lease for the same prompt, with its real digest and a table of its own making."""
    half: Any = producer.connector._prefill
    reader_token = bytes.fromhex(ticket["mc2_ticket"]["token"])
    request = producer.request("again", PROMPT)
    from vllm_mc2.connector import compat

    digest = compat.request_digest(request, reader_token, len(PROMPT))
    assert digest is not None
    lie = half.book.publish(reader_token, digest, len(PROMPT), table, 60.0, [])
    return {**ticket, "mc2_ticket": {**ticket["mc2_ticket"], "slot": lie.slot, "generation": lie.generation}}


@pytest.mark.parametrize("mode", ["attach", "pull"])
@pytest.mark.parametrize("table", HOSTILE_TABLES, ids=str)
def test_d24_a_lease_with_a_wrong_block_table_brings_nothing(
    make_engine: MakeEngine, table: list[int], mode: str
) -> None:
    producer, consumer = make_engine("kv_producer"), make_engine("kv_consumer", extra={"mode": mode})
    ticket = prefill(producer, "p", PROMPT)
    consumer.add("r", PROMPT, publish_hostile(producer, ticket, table))
    report = finish(consumer, "r", "recompute", PROMPT)
    assert report["reason"] in {"bad_lease", "prompt_mismatch"}
    consumer.add("good", PROMPT, ticket)
    consumer.run()
    assert consumer.finished["good"][0] == expected_tokens(PROMPT, 4)
    assert_clean(consumer)  # prefill keeps what nobody could claim until the offer times out
