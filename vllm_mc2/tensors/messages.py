"""Prefill's mail to decode: what its pools are, how tensors lie in them, and one short note per request.

Goes over a socket pair that the session's welcome hands out, in one direction, as frames of the usual kind (a 4-byte
little-endian length and MessagePack). A pool and a layout are announced once; after that a request costs one
:class:`KvNotice`, whose size depends on the length of its id and on nothing else. What arrives is checked as any message of
a peer: bounds while decoding, the rest by the receiver on its own copy.
"""

import math
import struct
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from vllm_mc2.errors import LayoutError, ProtocolError
from vllm_mc2.layout import PoolLayout
from vllm_mc2.leases import LeaseId

MAX_POOLS = 1 << 14
MAX_LAYOUTS = 4096
MAX_LAYERS = 4096
MAX_REQUEST_ID = 256

Index = Annotated[int, Meta(ge=0, lt=1 << 31)]
Size = Annotated[int, Meta(gt=0, lt=1 << 48)]
Stride = Annotated[int, Meta(ge=0, lt=1 << 48)]
RequestId = Annotated[str, Meta(min_length=1, max_length=MAX_REQUEST_ID)]
Dtype = Literal[
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
    "int64", "int32", "int16", "int8", "uint8",
]  # fmt: skip
Part = Literal["key", "value", "kv"]

ITEM_BYTES: dict[str, int] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1,
}  # fmt: skip


def span_bytes(shape: Sequence[int], strides: Sequence[int], item_bytes: int) -> int:
    """From a tensor's first byte to behind its last one."""
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return (last + 1) * item_bytes


class TensorSpec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor in a pool: all that a peer must know to read it."""

    layer: Annotated[int, Meta(ge=0, lt=MAX_LAYERS)]
    part: Part
    """``kv``: the layer's keys and values are one tensor."""
    pool: Index
    offset_bytes: Annotated[int, Meta(ge=0, lt=1 << 48)]
    """Of the first element, in the pool."""
    shape: Annotated[tuple[Size, ...], Meta(min_length=1, max_length=8)]
    strides: Annotated[tuple[Stride, ...], Meta(min_length=1, max_length=8)]
    """In elements, as torch counts them."""
    dtype: Dtype

    @property
    def span_bytes(self) -> int:
        """From the first byte to behind the last one."""
        return span_bytes(self.shape, self.strides, ITEM_BYTES[self.dtype])

    def check(self, pool_bytes: int) -> None:
        """Refuse a tensor that is not inside its pool.

        Raises:
            LayoutError: names the layer. Call it on every spec that came from a peer.
        """
        if len(self.shape) != len(self.strides):
            raise LayoutError(f"layer {self.layer}: {len(self.shape)} dimensions with {len(self.strides)} strides")
        if math.prod(self.shape) >= 1 << 60:  # strides of 0 make that many elements of a few bytes, and sizes overflow
            raise LayoutError(f"layer {self.layer}: {math.prod(self.shape)} elements")
        if self.offset_bytes % ITEM_BYTES[self.dtype] or self.offset_bytes + self.span_bytes > pool_bytes:
            raise LayoutError(
                f"layer {self.layer}: {self.span_bytes} bytes at {self.offset_bytes} of a pool of {pool_bytes} bytes"
            )


class PoolNotice(msgspec.Struct, frozen=True, tag=1, array_like=True, forbid_unknown_fields=True):
    """A pool that the following layouts refer to. Comes with its descriptor."""

    pool: Index
    layout: PoolLayout


class LayoutNotice(msgspec.Struct, frozen=True, tag=2, array_like=True, forbid_unknown_fields=True):
    """How the layers of a cache lie in pools."""

    layout: Index
    num_blocks: Annotated[int, Meta(ge=0, lt=1 << 31)]
    """Blocks of a paged cache, the first dimension of every tensor; 0 for a contiguous one, which has no block table."""
    tensors: Annotated[tuple[TensorSpec, ...], Meta(min_length=1, max_length=2 * MAX_LAYERS)]


class KvNotice(msgspec.Struct, frozen=True, tag=3, array_like=True, forbid_unknown_fields=True):
    """A request's KV cache is there. The block table itself is in the index table, under the lease."""

    request_id: RequestId
    lease: Annotated[bytes, Meta(min_length=28, max_length=28)]


Mail = PoolNotice | LayoutNotice | KvNotice
_LEASE = struct.Struct("<III16s")
_decoder = msgspec.msgpack.Decoder(Mail)


class LeaseTicket(NamedTuple):
    """What a :class:`KvNotice` says about its lease; 28 bytes, always."""

    lease_id: LeaseId
    layout: int
    token: bytes


def pack_ticket(lease_id: LeaseId, layout: int, token: bytes) -> bytes:
    """The ticket as it travels."""
    return _LEASE.pack(*lease_id, layout, token)


def unpack_ticket(packed: bytes) -> LeaseTicket:
    """Reverse of :func:`pack_ticket`."""
    slot, generation, layout, token = _LEASE.unpack(packed)
    return LeaseTicket((slot, generation), layout, token)


def decode(payload: bytes | memoryview) -> Mail:
    """The mail in ``payload``.

    Raises:
        ProtocolError: not MessagePack, not one of ours, or a field out of range.
    """
    try:
        return _decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a mail of prefill's: {error}") from error
