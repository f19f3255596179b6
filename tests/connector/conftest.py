"""Engines for the connector tests; each test's engines share a socket directory and leave nothing in it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.connector.rig import MakeEngine, RigEngine


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
