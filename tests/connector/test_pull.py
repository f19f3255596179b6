"""Pull between two rig engines: blocks are copied, the lease ends at once, and everything is given back."""

from typing import Any
from unittest import mock

import pytest

from tests.connector.outcome import finish, num_leases, report_of
from tests.connector.rig import MakeEngine, RigEngine, assert_clean, prefill
from tests.support.fake_model import expected_tokens, prompt_of
from vllm_mc2.connector import compat

PULL = {"mode": "pull"}


@pytest.fixture
def puller(make_engine: MakeEngine) -> RigEngine:
    return make_engine("kv_consumer", extra=PULL)


@pytest.fixture
def producer(make_engine: MakeEngine) -> RigEngine:
    return make_engine("kv_producer")


def block_bytes(consumer: RigEngine) -> int:
    half: Any = consumer.connector._decode
    return int(half._bytes_per_block)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 48, 200])
def test_decode_computes_one_token_and_gets_the_right_ones(producer: RigEngine, puller: RigEngine, length: int) -> None:
    prompt = prompt_of(length)
    puller.add("r", prompt, prefill(producer, "r", prompt), max_tokens=20)
    report = report_of(puller, "r", prompt, 20)
    assert report["way"] == "pull" and report["reason"] == "mode"
    assert report["blocks_attached"] == 0 and report["kv_bytes_not_copied"] == 0
    assert report["kv_bytes_copied"] == -(-(length - 1) // 16) * block_bytes(puller)
    assert puller.num_computed_prompt_tokens["r"] == 1
    assert puller.stats["handoffs|pull|mode"] == 1
    assert_clean(producer, puller)


def test_d08_only_what_decode_lacks_is_copied_and_by_position(producer: RigEngine, puller: RigEngine) -> None:
    for index, (num_cached, length) in enumerate([(16, 40), (32, 33), (48, 49), (64, 64), (16, 200)]):
        prompt = prompt_of(length, seed=index)
        puller.add(f"warm{index}", prompt[:num_cached], None, max_tokens=1)
        puller.run()
        puller.add(f"r{index}", prompt, prefill(producer, f"r{index}", prompt))
        report = report_of(puller, f"r{index}", prompt)
        cached = min(num_cached, (length - 1) // 16 * 16)
        assert report["kv_bytes_copied"] == -(-(length - 1 - cached) // 16) * block_bytes(puller)
        assert puller.num_computed_prompt_tokens[f"r{index}"] == 1
        assert_clean(producer, puller)


def test_d08_a_longer_prompt_than_prefill_had(producer: RigEngine, puller: RigEngine) -> None:
    prompt = prompt_of(50)
    ticket = prefill(producer, "r", prompt[:40])
    puller.add("r", prompt, ticket)
    report = report_of(puller, "r", prompt)
    assert report["way"] == "pull"
    assert puller.num_computed_prompt_tokens["r"] == 10
    assert_clean(producer, puller)


def test_d09_prefills_memory_stays_as_it_is(producer: RigEngine, puller: RigEngine) -> None:
    prompt = prompt_of(20)
    ticket = prefill(producer, "r", prompt)
    before = {name: tensor.clone() for name, tensor in producer.kv.items()}
    puller.add("r", prompt, ticket, max_tokens=30)
    report_of(puller, "r", prompt, 30)
    assert all(bool((producer.kv[name] == tensor).all()) for name, tensor in before.items())
    again = [*prompt_of(20), 7]
    producer.add("again", again, None, max_tokens=3)
    producer.run()
    assert producer.finished["again"][0] == expected_tokens(again, 3)


def test_d10_chunked_prefill_hands_over_only_at_its_end(make_engine: MakeEngine, puller: RigEngine) -> None:
    producer = make_engine("kv_producer", max_num_batched_tokens=16)
    prompt = prompt_of(100)
    producer.add("r", prompt, {"do_remote_decode": True}, max_tokens=1)
    for _ in range(6):
        producer.step()
        assert num_leases(producer) == 0 and "r" not in producer.finished
    producer.run()
    puller.add("r", prompt, producer.finished["r"][2])
    assert report_of(puller, "r", prompt)["way"] == "pull"
    assert puller.num_computed_prompt_tokens["r"] == 1


def test_the_lease_ends_while_the_request_goes_on(producer: RigEngine, puller: RigEngine) -> None:
    prompt = prompt_of(70)
    puller.add("r", prompt, prefill(producer, "r", prompt), max_tokens=100)
    assert num_leases(producer) == 1
    while not puller._outputs.get("r"):
        puller.step()
    assert num_leases(producer) == 0
    assert producer.num_free_blocks == len(producer.scheduler.kv_cache_manager.block_pool.blocks) - 1
    report_of(puller, "r", prompt, 100)
    assert_clean(producer, puller)


def test_pulled_blocks_serve_the_next_request_from_the_prefix_cache(producer: RigEngine, puller: RigEngine) -> None:
    prompt = prompt_of(64)
    puller.add("a", prompt, prefill(producer, "a", prompt))
    report_of(puller, "a", prompt)
    puller.add("b", [*prompt, 5], None)
    puller.run()
    assert puller.num_computed_prompt_tokens["b"] == 1
    assert puller.finished["b"][0] == expected_tokens([*prompt, 5], 4)
    puller.add("c", prompt, prefill(producer, "c", prompt))
    report = report_of(puller, "c", prompt)
    assert report["way"] == "pull" and report["kv_bytes_copied"] == 1 * block_bytes(puller)  # the last, by vLLM's rule
    assert_clean(producer, puller)


def test_many_at_once(producer: RigEngine, puller: RigEngine) -> None:
    prompts = {f"r{i}": prompt_of(20 + 7 * i, seed=i) for i in range(6)}
    for name, prompt in prompts.items():
        puller.add(name, prompt, prefill(producer, name, prompt), max_tokens=10)
    puller.run()
    for name, prompt in prompts.items():
        assert puller.finished[name][0] == expected_tokens(prompt, 10)
        assert puller.num_computed_prompt_tokens[name] == 1
    assert_clean(producer, puller)


def test_one_ticket_for_two_requests(producer: RigEngine, puller: RigEngine) -> None:
    prompt = prompt_of(60)
    ticket = prefill(producer, "r", prompt)
    puller.add("a", prompt, ticket)
    puller.add("b", prompt, ticket)
    puller.run()
    for name in "ab":
        assert puller.finished[name][0] == expected_tokens(prompt, 4)
    assert_clean(producer, puller)


@pytest.mark.parametrize("mode", ["auto", "pull"])
def test_without_prefix_caching_blocks_are_copied(make_engine: MakeEngine, producer: RigEngine, mode: str) -> None:
    consumer = make_engine("kv_consumer", enable_prefix_caching=False, extra={"mode": mode})
    prompt = prompt_of(50)
    consumer.add("r", prompt, prefill(producer, "r", prompt))
    report = report_of(consumer, "r", prompt)
    assert (report["way"], report["reason"]) == ("pull", {"auto": "attach_off", "pull": "mode"}[mode])
    assert consumer.num_computed_prompt_tokens["r"] == 1
    assert_clean(producer, consumer)


def test_a_vllm_that_lacks_what_attach_needs_copies(make_engine: MakeEngine, producer: RigEngine) -> None:
    """Decode's cache lies in vLLM's own memory then."""
    with mock.patch.object(compat, "check_contract", return_value=["BlockPool.something"]):
        consumer = make_engine("kv_consumer")
    assert consumer.worker._worker._backend.memory is None
    prompt = prompt_of(50)
    consumer.add("r", prompt, prefill(producer, "r", prompt))
    report = report_of(consumer, "r", prompt)
    assert (report["way"], report["reason"]) == ("pull", "attach_off")
    assert_clean(producer, consumer)


def test_a_window_that_is_too_small_copies(make_engine: MakeEngine, producer: RigEngine) -> None:
    consumer = make_engine("kv_consumer", extra={"window_pool_factor": 0.0})
    prompt = prompt_of(50)
    consumer.add("r", prompt, prefill(producer, "r", prompt))
    report = report_of(consumer, "r", prompt)
    assert (report["way"], report["reason"]) == ("pull", "window_full")
    assert_clean(producer, consumer)


def test_mode_attach_never_copies(make_engine: MakeEngine, producer: RigEngine) -> None:
    consumer = make_engine("kv_consumer", extra={"window_pool_factor": 0.0, "mode": "attach"})
    prompt = prompt_of(50)
    consumer.add("r", prompt, prefill(producer, "r", prompt))
    assert finish(consumer, "r", "recompute", prompt)["reason"] == "window_full"
    assert "kv_bytes_copied" not in consumer.stats


def test_a_prefill_that_lends_a_lot_asks_for_copies(make_engine: MakeEngine) -> None:
    """63 blocks, 16 for the longest request: 12 may be used in place, 35 more only be copied."""
    producer = make_engine("kv_producer", max_model_len=256, extra={"max_lent_fraction": 0.2})
    consumer = make_engine("kv_consumer", max_model_len=256)
    prompts = {f"r{i}": prompt_of(100, seed=i) for i in range(3)}
    tickets = {name: prefill(producer, name, prompt) for name, prompt in prompts.items()}
    for name, prompt in prompts.items():
        consumer.add(name, prompt, tickets[name], max_tokens=30)
    consumer.run()
    ways = []
    for name, prompt in prompts.items():
        tokens, _, answer = consumer.finished[name]
        assert tokens == expected_tokens(prompt, 30)
        assert consumer.num_computed_prompt_tokens[name] == 1
        ways.append((answer["mc2"]["way"], answer["mc2"]["reason"]))  # type: ignore[index]
    assert ways == [("attach", None), ("pull", "prefill_asks"), ("pull", "prefill_asks")]
    assert_clean(producer, consumer)


@pytest.mark.parametrize("mode", ["auto", "attach"])
def test_a_prefill_in_mode_pull_asks_everybody(make_engine: MakeEngine, mode: str) -> None:
    producer = make_engine("kv_producer", extra=PULL)
    consumer = make_engine("kv_consumer", extra={"mode": mode})
    prompt = prompt_of(50)
    consumer.add("r", prompt, prefill(producer, "r", prompt))
    report = report_of(consumer, "r", prompt)
    assert report["way"] == {"auto": "pull", "attach": "attach"}[mode]
    assert_clean(producer, consumer)


def begin_pull(consumer: RigEngine, request_id: str) -> Any:
    """Step until the order to copy is out, with the copying thread held up; returns its lock."""
    puller = consumer.worker._worker._puller
    half: Any = consumer.connector._decode
    while half._handoffs[request_id].state.value != "claimed":
        consumer.step()
    puller._lock.acquire()
    while half._handoffs[request_id].state.value != "pulling":
        consumer.step()
    return puller._lock


def test_an_abort_while_blocks_are_copied_keeps_both_sides_blocks_until_the_end(
    producer: RigEngine, puller: RigEngine
) -> None:
    prompt = prompt_of(100)
    puller.add("warm", prompt_of(10, seed=9), prefill(producer, "warm", prompt_of(10, seed=9)))
    puller.run()  # the peer is mapped now
    puller.add("r", prompt, prefill(producer, "r", prompt))
    lock = begin_pull(puller, "r")
    try:
        free = puller.num_free_blocks
        puller.abort("r")
        for _ in range(5):
            puller.step()
        assert puller.num_free_blocks == free  # they are being written
        assert num_leases(producer) == 1  # they are being read
    finally:
        lock.release()
    puller.run()
    assert_clean(producer, puller)


def test_prefill_may_die_while_blocks_are_copied(make_engine: MakeEngine, puller: RigEngine) -> None:
    producer = make_engine("kv_producer")
    prompt = prompt_of(100)
    puller.add("r", prompt, prefill(producer, "r", prompt))
    lock = begin_pull(puller, "r")
    producer.close()
    lock.release()
    assert report_of(puller, "r", prompt)["way"] == "pull"


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_d17_a_copy_that_fails_follows_the_policy(make_engine: MakeEngine, producer: RigEngine, policy: str) -> None:
    consumer = make_engine("kv_consumer", extra=PULL, policy=policy)
    prompt = prompt_of(100)
    consumer.add("r", prompt, prefill(producer, "r", prompt))
    lock = begin_pull(consumer, "r")
    (source,) = consumer.worker._worker._puller._sources.values()
    source.memories[0].unmap_peer(0)
    lock.release()
    assert finish(consumer, "r", policy, prompt)["reason"] == "pull_failed"
    assert_clean(producer, consumer)


def test_a_preempted_request_is_computed_here(make_engine: MakeEngine, producer: RigEngine) -> None:
    consumer = make_engine("kv_consumer", extra=PULL, num_blocks=14, max_model_len=192)
    prompts = {f"r{i}": prompt_of(70, seed=i) for i in range(3)}
    for name, prompt in prompts.items():
        consumer.add(name, prompt, prefill(producer, name, prompt), max_tokens=60)
    consumer.run()
    for name, prompt in prompts.items():
        assert consumer.finished[name][0] == expected_tokens(prompt, 60)
    assert_clean(producer, consumer)


def test_inspect_says_how_and_why(producer: RigEngine, puller: RigEngine) -> None:
    prompt = prompt_of(40)
    puller.add("r", prompt, prefill(producer, "r", prompt))
    puller.run()
    inspector: Any = puller.connector._inspector
    (peer,) = inspector.report().peers
    assert (peer.way, peer.way_reason, peer.base, peer.state) == ("pull", "mode", -1, "ready")


def test_a_dead_prefill_is_unmapped(make_engine: MakeEngine, puller: RigEngine) -> None:
    producer = make_engine("kv_producer")
    prompt = prompt_of(40)
    puller.add("r", prompt, prefill(producer, "r", prompt))
    puller.run()
    sources = puller.worker._worker._puller._sources
    assert len(sources) == 1
    producer.close()
    puller.add("other", prompt_of(5), None)
    puller.run()
    for _ in range(100):
        if not sources:
            break
        puller.step()
    assert not sources


@pytest.mark.parametrize("decode_too", [False, True])
def test_a_vllm_that_allocates_by_itself_is_moved_to_shared_memory(make_engine: MakeEngine, decode_too: bool) -> None:
    """As before 0.31: prefill's tensors are moved when they are registered, decode's stay where they are."""
    with mock.patch.object(compat, "check_allocation", return_value=["KVConnectorBase_V1.get_mem_pool_context"]):
        producer = make_engine("kv_producer")
        consumer = make_engine("kv_consumer") if decode_too else None
    consumer = consumer or make_engine("kv_consumer", extra=PULL)
    assert producer.worker._worker.gives_memory is False and producer.worker._worker._backend.memory is not None
    for length in (5, 48, 100):
        prompt = prompt_of(length, seed=length)
        consumer.add(f"r{length}", prompt, prefill(producer, f"r{length}", prompt))
        report = report_of(consumer, f"r{length}", prompt)
        assert (report["way"], report["reason"]) == ("pull", "attach_off" if decode_too else "mode")
        assert consumer.num_computed_prompt_tokens[f"r{length}"] == 1
    assert_clean(producer, consumer)
