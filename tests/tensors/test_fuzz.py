"""Anything at all, as mail and as a tensor's description: understood within its bounds, or refused."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_mc2.errors import LayoutError, ProtocolError
from vllm_mc2.layout import PoolLayout, Region
from vllm_mc2.protocol import frame
from vllm_mc2.tensors import messages
from vllm_mc2.tensors.messages import KvNotice, LayoutNotice, Mail, PoolNotice, TensorSpec, pack_ticket
from vllm_mc2.tensors.pools import REGISTRY
from vllm_mc2.tensors.receiver import RemotePool

POOL_BYTES = 2 << 20
POOL = PoolLayout(
    num_blocks=1, pool_bytes=POOL_BYTES, regions=(Region(name="r", offset_bytes=0, block_bytes=POOL_BYTES),)
)

many = settings(
    deadline=None, database=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def encoded(mail: Mail) -> bytes:
    return frame(mail)[4:]


SEEDS = [
    encoded(KvNotice("request-1", pack_ticket((3, 4), 5, bytes(range(16))))),
    encoded(PoolNotice(3, POOL)),
    encoded(LayoutNotice(2, 8, (TensorSpec(0, "key", 3, 0, (8, 4, 2), (8, 2, 1), "bfloat16"),))),
]


def assert_decoded_or_refused(payload: bytes) -> None:
    try:
        mail = messages.decode(payload)
    except ProtocolError:
        return
    assert isinstance(mail, (KvNotice, PoolNotice, LayoutNotice))
    if isinstance(mail, KvNotice):
        assert 1 <= len(mail.request_id) <= 256 and len(mail.lease) == 28


@many
@given(payload=st.binary(max_size=200))
def test_random_bytes(payload: bytes) -> None:
    assert_decoded_or_refused(payload)


@many
@given(
    seed=st.sampled_from(SEEDS),
    changes=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), min_size=1, max_size=5),
    cut=st.integers(0, 200),
)
def test_mail_with_some_bytes_changed(seed: bytes, changes: list[tuple[int, int]], cut: int) -> None:
    payload = bytearray(seed)
    for at, value in changes:
        payload[at % len(payload)] = value
    assert_decoded_or_refused(bytes(payload[: len(payload) - cut % len(payload)]))


@pytest.fixture
def remote() -> Iterator[RemotePool]:
    """A pool as decode has it, full of ones."""
    own = REGISTRY.allocate([("all", POOL_BYTES)], "off")
    own.tensor(0, (POOL_BYTES,), torch.uint8).fill_(1)
    yield RemotePool(PoolNotice(0, own.layout), own.fd, prefault=False)
    REGISTRY.forget(own)


sizes = st.one_of(st.integers(1, 9), st.integers(1, POOL_BYTES), st.sampled_from([2**21 + 1, 2**32, 2**47, 2**48 - 1]))
strides = st.one_of(st.integers(0, 9), st.integers(0, POOL_BYTES), st.sampled_from([2**32, 2**47, 2**48 - 1]))


@many
@given(
    offset=st.one_of(st.integers(0, 64), st.integers(0, POOL_BYTES), st.integers(0, 2**48 - 1)),
    dimensions=st.lists(st.tuples(sizes, strides), min_size=1, max_size=8),
    dtype=st.sampled_from(list(messages.ITEM_BYTES)),
)
def test_a_tensor_is_inside_its_pool_or_refused(
    remote: RemotePool, offset: int, dimensions: list[tuple[int, int]], dtype: Any
) -> None:
    shape, stride = (tuple(each) for each in zip(*dimensions, strict=True))
    item_bytes = messages.ITEM_BYTES[dtype]
    span = item_bytes * (1 + sum((size - 1) * step for size, step in dimensions))
    try:
        tensor = remote.tensor(TensorSpec(0, "kv", 0, offset, shape, stride, dtype))
    except LayoutError:
        # Refused for a reason, and not because everything is.
        assert offset % item_bytes or offset + span > POOL_BYTES or math.prod(shape) >= 1 << 60
        return
    assert offset + span <= POOL_BYTES
    # The first and the last element can be read: anything else would end this process.
    first, last = tensor[(0,) * len(shape)], tensor[tuple(size - 1 for size in shape)]
    assert first.item() == last.item()
    assert last.data_ptr() - first.data_ptr() == span - item_bytes
