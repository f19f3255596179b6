"""Pairs of communicators, child processes, and the rule that no test leaves anything behind."""

import gc
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tensors.rig import Child, Pair, assert_nothing_left, footprint, pool_mappings, prepare_processes
from vllm_mc2 import KVCacheManager


@pytest.fixture(scope="session", autouse=True)
def _processes() -> None:
    """Before anything is counted: the server that forks children keeps a few descriptors open."""
    prepare_processes()
    gc.collect()
    gc.freeze()  # or each look for garbage would go through all of torch


@pytest.fixture
def directory() -> Iterator[Path]:
    """A private socket directory with a short path."""
    with tempfile.TemporaryDirectory(prefix="mc2-") as path:
        assert Path(path).stat().st_mode & 0o777 == 0o700
        yield Path(path)


@pytest.fixture(autouse=True)
def _nothing_left(directory: Path, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    gc.collect()
    before = footprint()
    yield
    KVCacheManager().close()  # the process's own layers
    # What pytest keeps: tensors among the fixtures, and errors, with all their frames, in what was logged.
    request.node.funcargs.clear()
    for when in ("setup", "call"):
        caplog.get_records(when).clear()  # type: ignore[arg-type]
    assert_nothing_left(before, directory)


@pytest.fixture
def make_pair(directory: Path) -> Iterator[Callable[..., Pair]]:
    pairs: list[Pair] = []

    def make(**more: Any) -> Pair:
        pairs.append(Pair(directory, **more))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()


@pytest.fixture
def pair(make_pair: Callable[..., Pair]) -> Pair:
    return make_pair()


@pytest.fixture
def own_pool_mappings() -> Callable[[], list[str]]:
    """What this process has mapped of our pools since the test began: other tests in it may have left some to the collector."""
    before = set(pool_mappings("self"))
    return lambda: [line for line in pool_mappings("self") if line not in before]


@pytest.fixture
def spawn() -> Iterator[Callable[..., Child]]:
    children: list[Child] = []

    def start(*arguments: Any, **more: Any) -> Child:
        children.append(Child(*arguments, **more))
        return children[-1]

    yield start
    for child in children:
        child.end()
