"""Which slice of whose blocks a rank takes, for every pair of tensor parallel sizes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_mc2.errors import LayoutError
from vllm_mc2.layout import HeadSlice, head_slices

HEADS = 48


@given(own=st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16]), peer=st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16]))
def test_every_head_comes_from_its_place(own: int, peer: int) -> None:
    """Blocks of 48 heads, each head 10 bytes that say which one it is."""
    peer_blocks = [[rank * HEADS // peer + head for head in range(HEADS // peer)] for rank in range(peer)]
    if own % peer and peer % own:
        with pytest.raises(LayoutError, match=f"tensor parallel size {peer} there, {own} here"):
            head_slices(0, own, peer)
        return
    for rank in range(own):
        block: list[int | None] = [None] * (HEADS // own)
        for part in head_slices(rank, own, peer):
            num_bytes = part.num_bytes(10 * len(block), 10 * HEADS // peer)
            heads = num_bytes // 10
            start = part.peer_index * heads
            block[part.own_index * heads : (part.own_index + 1) * heads] = peer_blocks[part.peer_rank][
                start : start + heads
            ]
        assert block == [rank * HEADS // own + head for head in range(HEADS // own)]


def test_blocks_of_other_heads_are_refused() -> None:
    with pytest.raises(LayoutError, match="is not 1/1 of 100"):
        HeadSlice(peer_rank=0, own_parts=2).num_bytes(300, 100)
    with pytest.raises(LayoutError, match="is not"):
        HeadSlice(peer_rank=0, own_parts=3).num_bytes(100, 33)
