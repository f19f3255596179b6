"""Two cache groups, full attention and a sliding window, with vLLM's hybrid cache manager: blocks are copied, group by group."""

from typing import Any

import pytest

from tests.connector.rig import MakeEngine, RigEngine, assert_clean, prefill
from tests.support.fake_model import expected_tokens, prompt_of

WINDOW = 40
Pair = tuple[RigEngine, RigEngine]


@pytest.fixture
def hybrid(make_engine: MakeEngine) -> Pair:
    # A request of the longest length takes 64 blocks, 32 of each group.
    return (
        make_engine("kv_producer", window=WINDOW, num_blocks=160),
        make_engine("kv_consumer", window=WINDOW, num_blocks=160),
    )


def hand_over(pair: Pair, request_id: str, prompt: list[int], max_tokens: int = 20) -> dict[str, Any]:
    producer, consumer = pair
    consumer.add(request_id, prompt, prefill(producer, request_id, prompt), max_tokens=max_tokens)
    consumer.run()
    tokens, _, answer = consumer.finished[request_id]
    assert tokens == expected_tokens(prompt, max_tokens, WINDOW)
    assert answer is not None
    report: dict[str, Any] = answer["mc2"]
    return report


def test_the_rig_itself_reads_through_the_window(make_engine: MakeEngine) -> None:
    plain = make_engine(None, window=WINDOW)
    prompt = prompt_of(90)
    plain.add("r", prompt, None, max_tokens=30)
    plain.run()
    assert plain.finished["r"][0] == expected_tokens(prompt, 30, WINDOW)
    assert expected_tokens(prompt, 5, WINDOW) != expected_tokens(prompt, 5, WINDOW - 1)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 39, 40, 41, 54, 56, 57, 72, 100, 200])
def test_blocks_of_both_groups_are_copied(hybrid: Pair, length: int) -> None:
    report = hand_over(hybrid, "r", prompt_of(length))
    assert (report["way"], report["reason"]) == ("pull", "attach_off")
    assert hybrid[1].num_computed_prompt_tokens["r"] == 1
    assert_clean(*hybrid)


def test_every_length_around_the_window_and_the_block(hybrid: Pair) -> None:
    for length in range(WINDOW - 2, WINDOW + 35):
        assert hand_over(hybrid, f"r{length}", prompt_of(length, seed=length), 2)["way"] == "pull"
        assert_clean(*hybrid)


def test_the_same_prompt_twice_and_a_longer_one(hybrid: Pair) -> None:
    prompt = prompt_of(120)
    for request_id, length in (("a", 100), ("b", 100), ("c", 120)):
        assert hand_over(hybrid, request_id, prompt[:length])["way"] == "pull"
        assert_clean(*hybrid)


def test_engines_with_other_windows_refuse_each_other(make_engine: MakeEngine) -> None:
    producer = make_engine("kv_producer", window=WINDOW, num_blocks=160)
    consumer = make_engine("kv_consumer", window=WINDOW + 16)
    prompt = prompt_of(50)
    consumer.add("r", prompt, prefill(producer, "r", prompt))
    consumer.run()
    tokens, _, answer = consumer.finished["r"]
    assert tokens == expected_tokens(prompt, 4, WINDOW + 16)
    assert answer is not None and answer["mc2"]["reason"] == "peer_refused"
