"""Hand-offs between two rig engines: right tokens, right blocks, everything given back."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.connector.rig import RigEngine, expected_tokens, prefill

MakeEngine = Callable[..., RigEngine]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [random.Random(seed * 7919 + i).randrange(1000) for i in range(length)]


@pytest.fixture
def make_engine(tiny_model: Path, tmp_path: Path) -> Iterator[MakeEngine]:
    engines: list[RigEngine] = []

    def make(role: str | None, **more: object) -> RigEngine:
        engine = RigEngine(tiny_model, tmp_path / "s", role, **more)  # type: ignore[arg-type]
        engines.append(engine)
        return engine

    yield make
    for engine in reversed(engines):
        engine.close()
    assert list((tmp_path / "s").glob("*")) == []


@pytest.fixture
def pair(make_engine: MakeEngine) -> tuple[RigEngine, RigEngine]:
    return make_engine("kv_producer"), make_engine("kv_consumer")


def assert_clean(*engines: RigEngine) -> None:
    """Both pools are back to their start value and nothing is borrowed or lent."""
    for engine in engines:
        if engine.connector._prefill is not None:
            engine.connector._prefill.reap()
            assert len(engine.connector._prefill.book) == 0
        if engine.connector._decode is not None:
            assert engine.connector._decode.snapshot() == {"handoffs": 0, "loans": 0, "borrowed_blocks": 0}
        assert engine.scheduler.requests == {}
        assert engine.num_free_blocks == len(engine.scheduler.kv_cache_manager.block_pool.blocks) - 1


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 48, 200])
def test_decode_computes_one_token_and_gets_the_right_ones(pair: tuple[RigEngine, RigEngine], length: int) -> None:
    producer, consumer = pair
    prompt = prompt_of(length)
    ticket = prefill(producer, "p", prompt)
    consumer.add("d", prompt, ticket, max_tokens=20)
    consumer.run()
    tokens, _, answer = consumer.finished["d"]
    assert tokens == expected_tokens(prompt, 20)
    assert answer is not None
    report = answer["mc2"]
    assert report["way"] == "attach" and report["reason"] is None
    assert report["blocks_attached"] == (length - 1) // 16
    assert report["tail_tokens"] == (length - 1) % 16
    assert consumer.num_computed_prompt_tokens["d"] == 1
    assert_clean(producer, consumer)
