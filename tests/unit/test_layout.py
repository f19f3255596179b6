"""Plans, pools and windows: where things lie, for any sizes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_mc2.errors import LayoutError
from vllm_mc2.layout import ALIGNMENT_BYTES, PoolLayout, Region, WindowAllocator, make_plan

sizes = st.lists(st.integers(1, 1 << 22).map(lambda n: n * 64), min_size=1, max_size=6)


@given(sizes, st.integers(1, 5000), st.none() | st.floats(0, 16))
def test_regions_are_disjoint_and_windows_fall_on_huge_pages(
    block_bytes: list[int], num_local: int, factor: float | None
) -> None:
    blocks = [(f"layer{i}", size) for i, size in enumerate(block_bytes)]
    try:
        plan = make_plan(blocks, num_local, factor)
    except LayoutError:
        return  # more ids than an int32 block table has
    end = 0
    for region in plan.regions:
        assert region.offset_bytes >= end
        assert region.offset_bytes % ALIGNMENT_BYTES == 0
        end = region.offset_bytes + plan.num_total * region.block_bytes
        assert (plan.window_base * region.block_bytes) % ALIGNMENT_BYTES == 0 or plan.num_window == 0
    assert end <= plan.range_bytes
    assert plan.num_window >= num_local * (8 if factor is None else factor) - 1
    pool = plan.pool_layout()
    pool.check()
    assert pool.num_blocks == num_local
    # What a peer maps (padding included) ends before the next thing in its region.
    for region in pool.regions:
        assert pool.region_bytes(region) <= plan.window_base * region.block_bytes or plan.num_window == 0


def test_a_plan_that_no_block_table_can_address_is_refused() -> None:
    with pytest.raises(LayoutError, match="int32"):
        make_plan([("layer", 64)], 1 << 30, 4.0)
    with pytest.raises(LayoutError, match="0 regions"):
        make_plan([], 1, 1.0)


@pytest.mark.parametrize(
    ("num_blocks", "regions"),
    [
        (0, [(0, 64)]),
        (1 << 31, [(0, 64)]),
        (4, []),
        (4, [(0, 0)]),
        (4, [(0, -64)]),
        (4, [(4096, 64)]),
        (4, [(-ALIGNMENT_BYTES, 64)]),
        (4, [(0, 64), (0, 64)]),
        (1 << 30, [(0, 1 << 40)]),
        (1, [(1 << 62, 64)]),
    ],
)
def test_a_hostile_pool_layout_is_refused(num_blocks: int, regions: list[tuple[int, int]]) -> None:
    layout = PoolLayout(
        num_blocks=num_blocks,
        pool_bytes=1 << 30,
        regions=tuple(Region(name="l", offset_bytes=offset, block_bytes=size) for offset, size in regions),
    )
    with pytest.raises(LayoutError):
        layout.check()


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=60))
def test_the_window_never_gives_a_block_twice(steps: list[tuple[bool, int]]) -> None:
    window = WindowAllocator(64, 256, 8)
    held: list[tuple[int, int]] = []
    for is_claim, number in steps:
        if is_claim:
            base = window.claim(number)
            if base is not None:
                assert base % 8 == 0 and 64 <= base and base + number <= 320
                assert all(base + number <= other or other + size <= base for other, size in held)
                held.append((base, number))
        elif held:
            window.release(*held.pop(number % len(held)))
    for base, number in held:
        window.release(base, number)
    assert window.num_free == 256
    assert window.claim(256) == 64
    assert window.claim(1) is None
