"""Ours as a child of vLLM's ``MultiConnector``: first or second, chosen or not, attaching or copying."""

from collections.abc import Iterator

import pytest

from tests.connector.other import OtherConnector
from tests.connector.rig import MakeEngine, RigEngine, assert_clean, prefill
from tests.support.fake_model import expected_tokens, prompt_of

OTHER = {
    "kv_connector": "OtherConnector",
    "kv_connector_module_path": "tests.connector.other",
    "kv_role": "kv_both",
}
ORDERS = [["MC2Connector", OTHER], [OTHER, "MC2Connector"]]


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    OtherConnector.brings.clear()
    OtherConnector.chosen.clear()


def let_other_bring(consumer: RigEngine, request_id: str, prompt: list[int], num_tokens: int) -> None:
    """The other connector has this many of the prompt's tokens."""

    def load(request_id: str, block_ids: list[int], first: int, last: int) -> None:
        consumer._tables[request_id] = [block_ids]
        for position in range(first, last):
            consumer._slot_write(request_id, position, prompt[: position + 1])

    OtherConnector.brings[request_id] = num_tokens
    OtherConnector.load = staticmethod(load)  # type: ignore[assignment]


@pytest.mark.parametrize("mode", ["auto", "pull"])
@pytest.mark.parametrize("order", ORDERS, ids=["first", "second"])
def test_chosen(make_engine: MakeEngine, order: list[object], mode: str) -> None:
    producer = make_engine("kv_producer", others=order)
    consumer = make_engine("kv_consumer", others=order, extra={"mode": mode})
    for length in (5, 48, 100):
        prompt, name = prompt_of(length, seed=length), f"r{length}"
        consumer.add(name, prompt, prefill(producer, name, prompt), max_tokens=20)
        consumer.run()
        tokens, _, answer = consumer.finished[name]
        assert tokens == expected_tokens(prompt, 20)
        assert answer is not None and answer["mc2"]["way"] == {"auto": "attach", "pull": "pull"}[mode]
        assert consumer.num_computed_prompt_tokens[name] == 1
    assert_clean(producer, consumer)


@pytest.mark.parametrize("mode", ["auto", "pull"])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_not_chosen(make_engine: MakeEngine, mode: str, policy: str) -> None:
    """The other one is asked first and has 64 of 100 tokens; nothing of ours is left behind."""
    producer = make_engine("kv_producer")
    consumer = make_engine("kv_consumer", others=ORDERS[1], extra={"mode": mode}, policy=policy)
    prompt = prompt_of(100)
    let_other_bring(consumer, "r", prompt, 64 if mode == "pull" else 99)
    consumer.add("r", prompt, prefill(producer, "r", prompt), max_tokens=20)
    consumer.run()
    tokens, _, answer = consumer.finished["r"]
    assert tokens == expected_tokens(prompt, 20)
    assert answer is not None
    if mode == "pull":
        assert (answer["mc2"]["way"], answer["mc2"]["reason"]) == ("recompute", "another_connector")
        assert ("r", 64) in OtherConnector.chosen
    else:
        assert (
            answer["mc2"]["way"] == "attach"
        )  # the full blocks are prefix-cache hits; the tail came from the other one
        assert ("r", 3) in OtherConnector.chosen
    assert_clean(producer, consumer)


def test_what_we_refuse_may_come_from_the_other(make_engine: MakeEngine) -> None:
    """A wrong ticket fails its request by policy, but not one that the other connector serves."""
    producer = make_engine("kv_producer")
    consumer = make_engine("kv_consumer", others=ORDERS[1], policy="fail")
    prompt = prompt_of(50)
    let_other_bring(consumer, "r", prompt, 49)
    consumer.add("r", prompt, prefill(producer, "r", prompt_of(50, seed=3)), max_tokens=8)
    consumer.run()
    assert consumer.finished["r"][0] == expected_tokens(prompt, 8)
    assert not any(key.startswith("handoffs|failed") for key in consumer.stats)
