"""What is made of torch_npu's share handles, and which part of a peer's block is whose."""

import struct
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from vllm_mc2.ascend.caches import CacheLayout, CacheStrip
from vllm_mc2.ascend.compat import parse_share
from vllm_mc2.ascend.mapping import strips_between
from vllm_mc2.connector import compat
from vllm_mc2.connector.fingerprint import refusal
from vllm_mc2.connector.npu_memory import cache_facts
from vllm_mc2.device_messages import DeviceGrant, DeviceHello, DeviceStrip
from vllm_mc2.errors import DeviceError, LayoutError
from vllm_mc2.layout import HeadSlice, head_slices
from vllm_mc2.protocol import PROTOCOL_VERSION, WorkerHello

MIB = 1 << 20


def chunks(*handles: int, chunk_bytes: int = 20 * MIB, num: int | None = None) -> bytes:
    return b"\x01e" + struct.pack(f"=QQ{len(handles)}Q", chunk_bytes, len(handles) if num is None else num, *handles)


def test_an_expandable_segment_and_a_plain_one() -> None:
    share = parse_share(chunks(7, 9), 0x1000)
    assert (share.base, share.chunk_bytes, share.handles, share.key) == (0x1000, 20 * MIB, (7, 9), b"")
    share = parse_share(b"\x01c" + b"k" * 65, 0x2000)
    assert (share.base, share.key, share.handles) == (0x2000, b"k" * 65, ())


@pytest.mark.parametrize(
    "handle",
    [
        b"", b"\x01", b"\x02c" + b"k" * 65, b"\x01c" + b"k" * 64, b"\x01c" + b"k" * 66, b"\x01x" + b"k" * 65,
        chunks(), chunks(7, num=2), chunks(7, 9, num=1), chunks(7, chunk_bytes=0), chunks(7, num=1 << 60),
        chunks(0), chunks(7, 0), chunks(7, 7),
    ],
)  # fmt: skip
def test_anything_else_is_refused(handle: bytes) -> None:
    with pytest.raises(DeviceError):
        parse_share(handle, 0)


TOKENS, DIM_BYTES = 4, 8


def layout(heads: int | None, name: str = "layer.0/0", signature: str = "int8[4,2,8]") -> CacheLayout:
    num_bytes = TOKENS * (heads or 1) * DIM_BYTES
    return CacheLayout((CacheStrip(name, 1000, num_bytes + 16, num_bytes, signature, heads),), 8)


def grant(heads: int, name: str = "layer.0/0") -> DeviceGrant:
    num_bytes = TOKENS * heads * DIM_BYTES
    return DeviceGrant(8, (DeviceStrip(name, 5000, num_bytes + 32, num_bytes),), ())


def bytes_of_heads(heads: int, first: int, num: int) -> set[int]:
    """Where in a block ``[tokens, heads, dim]`` some heads are."""
    return {
        (token * heads + head) * DIM_BYTES + byte
        for token in range(TOKENS)
        for head in range(first, first + num)
        for byte in range(DIM_BYTES)
    }


@pytest.mark.parametrize(("own_size", "peer_size"), [(1, 1), (2, 2), (1, 2), (1, 4), (2, 4), (2, 1), (4, 2)])
def test_every_head_comes_from_where_it_is(own_size: int, peer_size: int) -> None:
    """Byte by byte, for each of our ranks, with 4 heads in all."""
    own_heads, peer_heads = 4 // own_size, 4 // peer_size
    for rank in range(own_size):
        filled: dict[int, tuple[int, int]] = {}
        for part in head_slices(rank, own_size, peer_size):
            for strip in strips_between(layout(own_heads), grant(peer_heads), part, TOKENS, is_replicated=False):
                assert strip.own_stride == TOKENS * own_heads * DIM_BYTES + 16
                assert strip.peer_stride == TOKENS * peer_heads * DIM_BYTES + 32
                for byte in range(strip.num_bytes):
                    place = strip.own_address - 1000 + byte
                    assert place not in filled
                    filled[place] = (part.peer_rank, strip.peer_address - 5000 + byte)
        assert set(filled) == bytes_of_heads(own_heads, 0, own_heads)
        for place, (peer_rank, peer_place) in filled.items():
            token, rest = divmod(place, own_heads * DIM_BYTES)
            head = rank * own_heads + rest // DIM_BYTES  # of all
            wanted = (token * peer_heads + head % peer_heads) * DIM_BYTES + rest % DIM_BYTES
            assert (peer_rank, peer_place) == (head // peer_heads, wanted)


def test_a_latent_cache_is_taken_whole_from_one_rank() -> None:
    part = HeadSlice(peer_rank=2, own_index=0, own_parts=2)
    (strip,) = strips_between(layout(1), grant(1), part, TOKENS, is_replicated=True)
    assert (strip.own_address, strip.peer_address, strip.num_bytes) == (1000, 5000, TOKENS * DIM_BYTES)


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({}, None),
        ({"signature": "int8[4,2,8] NZ"}, "cache_blocks"),
        ({"signature": "int8[4,2,8] NZ", "tensor_parallel_size": "2"}, "cache_formats"),
        ({"signature": "int8[4,1,8]", "tensor_parallel_size": "2"}, None),
        ({"signature": "int8[4,1,8]"}, "cache_blocks"),
        ({"signature": "bfloat16[4,2,8]", "tensor_parallel_size": "2"}, "cache_formats"),
        ({"ascend_enable_kv_nz": "True", "tensor_parallel_size": "2"}, "ascend_enable_kv_nz"),
    ],
)
def test_a_cache_of_another_kind_is_refused_by_name(changes: dict[str, str], refused: str | None) -> None:
    def facts(signature: str = "int8[4,2,8]", **more: str) -> dict[str, str]:
        cache = cache_facts(layout(2, signature=signature))
        return {"ascend_enable_kv_nz": "False", "tensor_parallel_size": "1", **cache, **more}

    hello = WorkerHello(PROTOCOL_VERSION, 0, "pull", facts(**changes), DeviceHello(1))
    answer = refusal(facts(), 0, hello)
    assert (None if answer is None else answer.field) == refused


HALF = HeadSlice(peer_rank=0, own_parts=2)


@pytest.mark.parametrize(
    ("own", "peer", "part"),
    [
        (layout(2), grant(2, "layer.1/0"), HeadSlice(peer_rank=0)),
        (layout(2), grant(1), HeadSlice(peer_rank=0)),
        (layout(None), grant(1), HALF),
        (layout(2, signature="int8[4,2,8] NZ"), grant(1), HALF),
        (layout(2), grant(2), HALF),
    ],
    ids=["other layers", "other sizes", "unknown heads", "fractal", "not a half"],
)
def test_what_does_not_fit_is_refused(own: CacheLayout, peer: DeviceGrant, part: HeadSlice) -> None:
    with pytest.raises(LayoutError):
        strips_between(own, peer, part, TOKENS, is_replicated=False)


def kinds_of(*specs: object) -> list[str]:
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    return compat.npu_kinds(SimpleNamespace(kv_cache_groups=groups))  # type: ignore[arg-type]


def test_a_group_is_what_its_layers_are() -> None:
    shape = {"block_size": 16, "num_kv_heads": 1, "dtype": torch.float32}
    full, latent = FullAttentionSpec(head_size=8, **shape), MLAAttentionSpec(head_size=8, **shape)
    window = SlidingWindowSpec(head_size=8, sliding_window=32, **shape)
    mixed = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": latent, "b": latent})
    assert kinds_of(full, latent) == ["FullAttentionSpec", "MLAAttentionSpec"]
    assert kinds_of(mixed, full) == ["MLAAttentionSpec", "FullAttentionSpec"]
    windows = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": window, "b": window})
    assert kinds_of(windows) == ["UniformTypeKVCacheSpecs"]
    assert "UniformTypeKVCacheSpecs" not in compat.NPU_KINDS
