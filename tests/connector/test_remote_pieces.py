"""Which bytes are read from another host: the same that a copy on one host takes, in fewer pieces."""

import ctypes
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_mc2.connector.host_memory import own_region
from vllm_mc2.connector.remote_pulling import MAX_PIECE_BYTES, RemoteStrip, pieces_of, strips_of
from vllm_mc2.errors import LayoutError
from vllm_mc2.layout import ALIGNMENT_BYTES, HeadSlice, PoolLayout, Region, head_slices
from vllm_mc2.memory import OwnRegion
from vllm_mc2.protocol import RemoteGrant

NUM_BLOCKS = 12


def layout(*block_bytes: int) -> PoolLayout:
    regions = [
        Region(name=f"layer.{number}", offset_bytes=number * ALIGNMENT_BYTES, block_bytes=size)
        for number, size in enumerate(block_bytes)
    ]
    return PoolLayout(num_blocks=NUM_BLOCKS, pool_bytes=len(regions) * ALIGNMENT_BYTES, regions=tuple(regions))


def granted(pool: PoolLayout, *, is_random: bool = True) -> tuple[RemoteGrant, list[torch.Tensor]]:
    """A peer's memory, as far as reading it goes."""
    sizes = [NUM_BLOCKS * region.block_bytes for region in pool.regions]
    tensors = [
        torch.randint(1, 256, (size,), dtype=torch.uint8) if is_random else torch.zeros(size).byte() for size in sizes
    ]
    return RemoteGrant(pool, "memory", "here", tuple(tensor.data_ptr() for tensor in tensors)), tensors


def own_regions(*block_bytes: int) -> list[OwnRegion]:
    return [
        own_region(f"layer.{number}", size, torch.zeros(NUM_BLOCKS * size, dtype=torch.uint8))
        for number, size in enumerate(block_bytes)
    ]


def read(pieces: list[Any]) -> None:
    for piece in pieces:
        ctypes.memmove(piece.own_address, piece.peer_address, piece.num_bytes)


def block(data: Any, size: int, number: int) -> list[int]:
    content: list[int] = data[number * size : (number + 1) * size].tolist()
    return content


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True, max_size=NUM_BLOCKS).flatmap(
        lambda own: st.tuples(
            st.just(own), st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True, min_size=len(own), max_size=len(own))
        )
    )
)
def test_every_block_arrives_and_nothing_else_changes(ids: tuple[list[int], list[int]]) -> None:
    own_ids, peer_ids = ids
    grant, theirs = granted(layout(48, 80))
    own = own_regions(48, 80)
    pieces = pieces_of(strips_of(own, grant, HeadSlice(peer_rank=0)), own_ids, peer_ids)
    read(pieces)
    assert sum(piece.num_bytes for piece in pieces) == len(own_ids) * 128
    for region, tensor in zip(own, theirs, strict=True):
        for number in range(NUM_BLOCKS):
            expected = [0] * region.block_bytes
            if number in own_ids:
                expected = block(tensor, region.block_bytes, peer_ids[own_ids.index(number)])
            assert block(region.data, region.block_bytes, number) == expected


def test_neighbours_are_one_piece() -> None:
    grant, _ = granted(layout(48, 80))
    strips = strips_of(own_regions(48, 80), grant, HeadSlice(peer_rank=0))
    assert len(pieces_of(strips, [3, 4, 5, 9], [1, 2, 3, 4])) == 4
    assert len(pieces_of(strips, [5, 4, 3], [1, 2, 3])) == 6
    assert pieces_of(strips, [], []) == []


def test_pieces_have_a_largest_size() -> None:
    size = MAX_PIECE_BYTES // 4
    pieces = pieces_of([RemoteStrip(0, size, 1 << 40, size, size)], list(range(10)), list(range(10)))
    assert [piece.num_bytes // size for piece in pieces] == [4, 4, 2]
    assert [piece.own_address // size for piece in pieces] == [0, 4, 8]
    assert [piece.peer_address - (1 << 40) for piece in pieces] == [0, 4 * size, 8 * size]


@pytest.mark.parametrize(("own_size", "peer_size"), [(1, 2), (2, 1), (1, 4), (4, 2)])
def test_ranks_of_other_numbers_read_their_slices(own_size: int, peer_size: int) -> None:
    heads = torch.randint(1, 256, (NUM_BLOCKS, 4, 16), dtype=torch.uint8)  # four heads of 16 bytes in each block
    whole = 4 * 16
    grants = []
    for rank in range(peer_size):
        grant, (tensor,) = granted(layout(whole // peer_size))
        per_rank = 4 // peer_size
        tensor.copy_(heads[:, rank * per_rank : (rank + 1) * per_rank].reshape(-1))
        grants.append((grant, tensor))
    for own_rank in range(own_size):
        own = own_regions(whole // own_size)
        for part in head_slices(own_rank, own_size, peer_size):
            read(pieces_of(strips_of(own, grants[part.peer_rank][0], part), [7, 2, 3], [1, 4, 5]))
        per_rank = 4 // own_size
        mine = heads[:, own_rank * per_rank : (own_rank + 1) * per_rank]
        for number, peer in ((7, 1), (2, 4), (3, 5)):
            assert block(own[0].data, whole // own_size, number) == mine[peer].reshape(-1).tolist()


@pytest.mark.parametrize(
    "pool", [layout(48), layout(48, 80, 16), layout(80, 48)], ids=["a layer less", "one more", "other sizes"]
)
def test_other_layers_are_refused(pool: PoolLayout) -> None:
    grant, _ = granted(pool)
    with pytest.raises(LayoutError):
        strips_of(own_regions(48, 80), grant, HeadSlice(peer_rank=0))


def test_a_grant_without_an_address_for_each_layer_is_refused() -> None:
    grant, _ = granted(layout(48, 80))
    short = RemoteGrant(grant.pool, grant.transport, grant.segment, grant.addresses[:1])
    with pytest.raises(LayoutError, match="layers"):
        strips_of(own_regions(48, 80), short, HeadSlice(peer_rank=0))
