"""Hand-offs between two rig engines: right tokens, right blocks, everything given back."""

import pytest

from tests.connector.outcome import report_of
from tests.connector.rig import MakeEngine, RigEngine, assert_clean, prefill
from tests.support.fake_model import expected_tokens, prompt_of

Pair = tuple[RigEngine, RigEngine]


def hand_over(pair: Pair, request_id: str, prompt: list[int], max_tokens: int = 20) -> dict[str, object]:
    """One request through both; checks the tokens and returns decode's report."""
    producer, consumer = pair
    consumer.add(request_id, prompt, prefill(producer, request_id, prompt), max_tokens=max_tokens)
    return report_of(consumer, request_id, prompt, max_tokens)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 48, 200])
def test_decode_computes_one_token_and_gets_the_right_ones(pair: Pair, length: int) -> None:
    report = hand_over(pair, "r", prompt_of(length))
    assert report["way"] == "attach" and report["reason"] is None
    assert report["blocks_attached"] == (length - 1) // 16
    assert report["tail_tokens"] == (length - 1) % 16
    assert pair[1].num_computed_prompt_tokens["r"] == 1
    assert_clean(*pair)


def test_the_same_prompt_twice(pair: Pair) -> None:
    for request_id in ("a", "b"):
        assert hand_over(pair, request_id, prompt_of(70))["way"] == "attach"
        assert_clean(*pair)


def test_two_prompts_that_share_a_prefix_at_the_same_time(pair: Pair) -> None:
    """Prefill lends the shared blocks twice; decode has them once, and the first to end does not take them away."""
    producer, consumer = pair
    prompts = {"a": prompt_of(64) + [1] * 40, "b": prompt_of(64) + [2] * 20}
    tickets = {name: prefill(producer, name, prompt) for name, prompt in prompts.items()}
    consumer.add("a", prompts["a"], tickets["a"], max_tokens=5)
    consumer.add("b", prompts["b"], tickets["b"], max_tokens=40)
    consumer.run()
    assert consumer.finished["a"][0] == expected_tokens(prompts["a"], 5)
    assert consumer.finished["b"][0] == expected_tokens(prompts["b"], 40)
    assert_clean(*pair)


def test_a_request_without_a_ticket_may_share_borrowed_blocks_and_outlive_their_owner(pair: Pair) -> None:
    producer, consumer = pair
    prompt = prompt_of(64)
    consumer.add("owner", [*prompt, 1], prefill(producer, "owner", [*prompt, 1]), max_tokens=4)
    while consumer.connector._decode.snapshot()["loans"] == 0:  # type: ignore[union-attr]
        consumer.step()
    consumer.add("guest", [*prompt, 2], None, max_tokens=40)
    while "owner" not in consumer.finished:
        consumer.step()
    assert consumer.num_computed_prompt_tokens["guest"] == 1  # the guest found the borrowed blocks
    producer.connector._prefill.reap()  # type: ignore[union-attr]
    assert len(producer.connector._prefill.book) == 1  # type: ignore[union-attr]  # still read by the guest
    late = consumer.add("late", [*prompt, 3], None, max_tokens=1)
    consumer.run()
    assert consumer.num_computed_prompt_tokens[late.request_id] == 65  # nobody new gets blocks whose owner has ended
    assert consumer.finished["owner"][0] == expected_tokens([*prompt, 1], 4)
    assert consumer.finished["guest"][0] == expected_tokens([*prompt, 2], 40)
    assert consumer.finished["late"][0] == expected_tokens([*prompt, 3], 1)
    assert_clean(*pair)


@pytest.mark.parametrize("num_cached", [16, 32, 48])
def test_decode_keeps_what_it_has_cached_itself(pair: Pair, num_cached: int) -> None:
    _producer, consumer = pair
    prompt = prompt_of(60)
    consumer.add("warm", prompt[:num_cached], None, max_tokens=1)
    consumer.run()
    report = hand_over(pair, "r", prompt)
    assert report["way"] == "attach"
    assert consumer.num_computed_prompt_tokens["r"] == 1
    assert_clean(*pair)


def test_a_prompt_longer_than_what_prefill_covered_is_continued_here(pair: Pair) -> None:
    producer, consumer = pair
    prompt = prompt_of(90)
    consumer.add("r", prompt, prefill(producer, "r", prompt[:40]), max_tokens=10)
    consumer.run()
    assert consumer.finished["r"][0] == expected_tokens(prompt, 10)
    assert consumer.num_computed_prompt_tokens["r"] == 50
    assert_clean(*pair)


def test_eight_at_once(make_engine: MakeEngine) -> None:
    pair = producer, consumer = make_engine("kv_producer", num_blocks=128), make_engine("kv_consumer")
    prompts = {f"r{i}": prompt_of(20 + 13 * i, seed=i) for i in range(8)}
    tickets = {name: prefill(producer, name, prompt) for name, prompt in prompts.items()}
    for name, prompt in prompts.items():
        consumer.add(name, prompt, tickets[name], max_tokens=30)
    consumer.run()
    for name, prompt in prompts.items():
        assert consumer.finished[name][0] == expected_tokens(prompt, 30)
        assert consumer.num_computed_prompt_tokens[name] == 1
    assert consumer.stats["handoffs|attach|"] == 8
    assert_clean(*pair)


def test_an_attached_prompt_occupies_no_local_block(pair: Pair) -> None:
    producer, consumer = pair
    prompt = prompt_of(16 * 30 + 5)
    free_before = consumer.num_free_blocks
    consumer.add("r", prompt, prefill(producer, "r", prompt), max_tokens=4)
    while consumer.num_computed_prompt_tokens.get("r") is None:
        consumer.step()
    assert consumer.num_free_blocks == free_before - 1  # the tail's block, which decode writes to
    assert consumer.connector._decode.snapshot()["borrowed_blocks"] == 30  # type: ignore[union-attr]
    consumer.run()
    assert_clean(*pair)


def test_a_decode_smaller_than_the_prompt_serves_it(make_engine: MakeEngine) -> None:
    producer, consumer = make_engine("kv_producer"), make_engine("kv_consumer", num_blocks=6)
    consumer.connector._decode._peers._window  # exists although its own pool is tiny
    report = hand_over((producer, consumer), "r", prompt_of(16 * 20 + 3), max_tokens=10)
    assert report["blocks_attached"] == 20
    assert_clean(producer, consumer)


def test_preempted_requests_find_their_blocks_again(make_engine: MakeEngine) -> None:
    producer, consumer = make_engine("kv_producer"), make_engine("kv_consumer", num_blocks=9)
    prompts = {f"r{i}": prompt_of(40 + i, seed=i) for i in range(4)}
    requests = {
        name: consumer.add(name, prompt, prefill(producer, name, prompt), max_tokens=60)
        for name, prompt in prompts.items()
    }
    consumer.run()
    assert sum(request.num_preemptions for request in requests.values()) > 0
    for name, prompt in prompts.items():
        assert consumer.finished[name][0] == expected_tokens(prompt, 60)
    assert consumer.stats["handoffs|attach|"] == 4
    assert_clean(producer, consumer)


def test_one_ticket_for_several_requests_as_n_greater_than_one_makes(pair: Pair) -> None:
    producer, consumer = pair
    prompt = prompt_of(50)
    ticket = prefill(producer, "p", prompt)
    for index in range(3):
        consumer.add(f"{index}_r", prompt, ticket, max_tokens=5 + 10 * index)
    consumer.run()
    for index in range(3):
        assert consumer.finished[f"{index}_r"][0] == expected_tokens(prompt, 5 + 10 * index)
    assert consumer.stats["handoffs|attach|"] == 3
    assert_clean(*pair)


def test_prefill_is_idle_while_decode_runs(pair: Pair) -> None:
    producer, consumer = pair
    prompt = prompt_of(100)
    ticket = prefill(producer, "p", prompt)
    assert not producer.scheduler.has_requests()  # its engine core sleeps from here on
    num_free = producer.num_free_blocks
    consumer.add("d", prompt, ticket, max_tokens=50)
    consumer.run()
    assert not producer.scheduler.has_requests()
    assert producer.num_free_blocks == num_free  # pinned until its next hook, which the next request brings
    producer.add("next", prompt_of(5), None, max_tokens=1)
    producer.run()
    assert_clean(*pair)


def test_reset_prefix_cache_on_decode_while_blocks_are_borrowed(pair: Pair) -> None:
    producer, consumer = pair
    prompt = prompt_of(70)
    consumer.add("r", prompt, prefill(producer, "r", prompt), max_tokens=30)
    for _ in range(3):
        while consumer.step() == 0:
            pass
    assert consumer.scheduler.reset_prefix_cache(reset_running_requests=True)
    consumer.run()
    assert consumer.finished["r"][0] == expected_tokens(prompt, 30)
    assert consumer.num_computed_prompt_tokens["r"] <= 3  # attached again, not computed
    assert_clean(*pair)


def test_a_local_block_that_is_evicted_before_the_lookup_is_replaced(make_engine: MakeEngine) -> None:
    """Decode had the first block cached when the ticket came, and lost it before it got to schedule the request."""
    producer, consumer = make_engine("kv_producer"), make_engine("kv_consumer", num_blocks=8)
    prompt = prompt_of(40)
    hand_over((producer, consumer), "connect", prompt_of(20, seed=9), max_tokens=1)
    consumer.add("warm", prompt[:16], None, max_tokens=1)
    consumer.run()
    consumer.add("r", prompt, prefill(producer, "r", prompt), max_tokens=5)
    assert consumer.connector._decode.snapshot()["borrowed_blocks"] == 1  # type: ignore[union-attr]  # the other is cached here
    pool = consumer.scheduler.kv_cache_manager.block_pool
    pool.free_blocks(pool.get_new_blocks(pool.get_num_free_blocks()))
    consumer.run()
    assert consumer.finished["r"][0] == expected_tokens(prompt, 5)
    assert consumer.num_computed_prompt_tokens["r"] == 1
    assert_clean(producer, consumer)


def test_both_roles_in_one_engine(make_engine: MakeEngine) -> None:
    left, right = make_engine("kv_both"), make_engine("kv_both")
    assert hand_over((left, right), "a", prompt_of(50))["way"] == "attach"
    assert hand_over((right, left), "b", prompt_of(90, seed=1))["way"] == "attach"
    assert_clean(left, right)


def test_an_engine_does_not_lend_what_it_borrowed(make_engine: MakeEngine) -> None:
    first, middle = make_engine("kv_both"), make_engine("kv_both")
    prompt = prompt_of(64)
    middle.add("r", [*prompt, 1], prefill(first, "r", [*prompt, 1]), max_tokens=50)
    while middle.num_computed_prompt_tokens.get("r") is None:
        middle.step()
    middle.add("p", [*prompt, 2], {"do_remote_decode": True}, max_tokens=1)
    middle.run()
    assert middle.finished["p"][2] is None
    assert middle.stats["leases_refused"] == 1
    assert middle.finished["r"][0] == expected_tokens([*prompt, 1], 50)
    assert_clean(first, middle)


def test_chunked_prefill_and_chunked_decode(make_engine: MakeEngine) -> None:
    producer = make_engine("kv_producer", max_num_batched_tokens=24)
    consumer = make_engine("kv_consumer", max_num_batched_tokens=24)
    prompt = prompt_of(150)
    consumer.add("r", prompt, prefill(producer, "r", prompt[:100]), max_tokens=9)
    consumer.run()
    assert consumer.finished["r"][0] == expected_tokens(prompt, 9)
    assert_clean(producer, consumer)


def test_decode_writes_nothing_into_prefills_pages(pair: Pair) -> None:
    producer, consumer = pair
    prompt = prompt_of(37)
    ticket = prefill(producer, "p", prompt)
    before = {name: tensor.clone() for name, tensor in producer.kv.items()}
    consumer.add("d", prompt, ticket, max_tokens=40)
    consumer.run()
    for name, tensor in producer.kv.items():
        assert (tensor == before[name]).all()
