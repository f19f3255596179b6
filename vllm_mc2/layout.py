"""Where the layers and blocks of a paged KV cache lie: in a pool, and in the address range of a decode.

A *pool* holds ``num_blocks`` blocks of every layer. A *region* is the part of it in which block ``b`` starts at
``offset_bytes + b * block_bytes``; a layer-major cache has one region per layer, a block-major cache has one for all
its layers. Decode keeps, behind the local blocks of each region, a *window*: address space in which peers' pools are
mapped, so that one block id means the same place in every layer::

    region of layer l:  | local blocks 0..n_local-1 | pad | peer A's blocks | pad | peer B's blocks | ... free ... |
    block id:             0 .. n_local-1                    base_A + remote     base_B + remote

Region starts and window bases are aligned to 2 MiB so that huge pages can be mapped as such.
Pure arithmetic; no vllm, no torch, no native code.
"""

from math import gcd, lcm

import msgspec

from vllm_mc2.errors import LayoutError

ALIGNMENT_BYTES = 2 << 20
"""Huge page size: regions and windows start at multiples of it."""

MAX_REGIONS = 4096
MAX_BLOCKS = 1 << 31
"""Block tables hold int32 ids."""

MAX_BLOCK_BYTES = 1 << 40


def align_up(value: int, alignment: int) -> int:
    """The smallest multiple of ``alignment`` that is at least ``value``."""
    return -(-value // alignment) * alignment


class Region(msgspec.Struct, frozen=True, kw_only=True):
    """One run of equally spaced blocks. ``name`` is the layer, or the first layer of a block-major group."""

    name: str
    offset_bytes: int
    block_bytes: int


class PoolLayout(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer must know of a pool to map it: sent in the handshake, so everything in it is checked by the receiver."""

    num_blocks: int
    pool_bytes: int
    regions: tuple[Region, ...]

    @property
    def bytes_per_block(self) -> int:
        """KV bytes of one block over all layers."""
        return sum(region.block_bytes for region in self.regions)

    def region_bytes(self, region: Region) -> int:
        """Bytes of the region's blocks, rounded up to the alignment. The padding belongs to the same pool."""
        return align_up(self.num_blocks * region.block_bytes, ALIGNMENT_BYTES)

    def check(self) -> None:
        """Refuse a layout that does not describe disjoint regions inside the pool.

        Raises:
            LayoutError: names what is wrong. Call it on every layout that came from a peer.
        """
        if not 0 < self.num_blocks < MAX_BLOCKS or not 0 < len(self.regions) <= MAX_REGIONS:
            raise LayoutError(f"pool of {self.num_blocks} blocks in {len(self.regions)} regions")
        end = 0
        for region in self.regions:
            if not 0 < region.block_bytes <= MAX_BLOCK_BYTES:
                raise LayoutError(f"region {region.name!r}: {region.block_bytes} bytes a block")
            if region.offset_bytes < end or region.offset_bytes % ALIGNMENT_BYTES:
                raise LayoutError(f"region {region.name!r} at {region.offset_bytes}: overlaps or is not aligned")
            end = region.offset_bytes + self.region_bytes(region)
        if end > self.pool_bytes:
            raise LayoutError(f"regions end at {end}, pool has {self.pool_bytes} bytes")


class AddressPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's address range: its own pool in front, the window behind, per region.

    ``num_local`` blocks are the worker's own; ids from ``window_base`` to ``num_total - 1`` are the window.
    ``granularity`` is the number of blocks that window bases are multiples of.
    """

    num_local: int
    num_total: int
    granularity: int
    regions: tuple[Region, ...]
    """Offsets are in the address range, not in the pool."""
    range_bytes: int

    @property
    def window_base(self) -> int:
        """First block id of the window."""
        return align_up(self.num_local, self.granularity)

    @property
    def num_window(self) -> int:
        """Block ids that peers can be mapped to."""
        return max(0, self.num_total - self.window_base)

    def pool_layout(self) -> PoolLayout:
        """The worker's own pool: the same regions without the windows."""
        regions = []
        cursor = 0
        for region in self.regions:
            regions.append(Region(name=region.name, offset_bytes=cursor, block_bytes=region.block_bytes))
            cursor += align_up(self.num_local * region.block_bytes, ALIGNMENT_BYTES)
        return PoolLayout(num_blocks=self.num_local, pool_bytes=cursor, regions=tuple(regions))

    def block_offset(self, region: Region, block_id: int) -> int:
        """Byte offset in the address range of a (local or global) block id."""
        return region.offset_bytes + block_id * region.block_bytes


class HeadSlice(msgspec.Struct, frozen=True, kw_only=True):
    """What one of our workers takes from one of the peer's, when the ranks' numbers differ: KV heads are split over ranks, in
    order, and within a block a head's keys and values lie together. So it is a slice of every block, on one side or the other.
    """

    peer_rank: int
    own_index: int = 0
    """Which of ``own_parts`` equal slices of our block it fills."""
    own_parts: int = 1
    peer_index: int = 0
    """Which of ``peer_parts`` equal slices of the peer's block it is."""
    peer_parts: int = 1

    def num_bytes(self, own_block_bytes: int, peer_block_bytes: int) -> int:
        """Bytes of the slice.

        Raises:
            LayoutError: the two blocks do not hold the same heads.
        """
        num_bytes, rest = divmod(own_block_bytes, self.own_parts)
        if rest or num_bytes * self.peer_parts != peer_block_bytes:
            raise LayoutError(
                f"1/{self.own_parts} of a block of {own_block_bytes} bytes is not 1/{self.peer_parts} of {peer_block_bytes}"
            )
        return num_bytes

    def cut(self, own_block_bytes: int, peer_block_bytes: int) -> tuple[int, int, int]:
        """``(offset in our block, offset in the peer's, bytes)`` of the slice.

        Raises:
            LayoutError: the two blocks do not hold the same heads.
        """
        num_bytes = self.num_bytes(own_block_bytes, peer_block_bytes)
        return self.own_index * num_bytes, self.peer_index * num_bytes, num_bytes


def head_slices(own_rank: int, own_size: int, peer_size: int) -> list[HeadSlice]:
    """Which slices make up the blocks of ``own_rank``, of ``own_size`` ranks, when the peer has ``peer_size`` ranks.

    Raises:
        LayoutError: neither number is a multiple of the other.
    """
    if own_size == peer_size:
        return [HeadSlice(peer_rank=own_rank)]
    if peer_size % own_size == 0:
        factor = peer_size // own_size
        return [
            HeadSlice(peer_rank=own_rank * factor + index, own_index=index, own_parts=factor) for index in range(factor)
        ]
    if own_size % peer_size == 0:
        factor = own_size // peer_size
        return [HeadSlice(peer_rank=own_rank // factor, peer_index=own_rank % factor, peer_parts=factor)]
    raise LayoutError(f"tensor parallel size {peer_size} there, {own_size} here: one must be a multiple of the other")


def mirror_plan(layout: PoolLayout) -> AddressPlan:
    """An address range with no blocks of its own, in which one peer's pool lies as it does at home, from block 0 on.

    Raises:
        LayoutError: the layout is not valid.
    """
    layout.check()
    return AddressPlan(
        num_local=0, num_total=layout.num_blocks, granularity=1, regions=layout.regions, range_bytes=layout.pool_bytes
    )


DEFAULT_WINDOW_FACTOR = 8
DEFAULT_WINDOW_BYTES = 256 << 30
"""Room for a peer whose pool is many times larger than a small decode's. Costs nothing until it is mapped."""


def make_plan(blocks: list[tuple[str, int]], num_local: int, window_pool_factor: float | None) -> AddressPlan:
    """Lay out regions of ``(name, block_bytes)`` with ``num_local`` own blocks and a window of ``factor`` times as many.

    Without a factor the window is 8 times as large, and at least 256 GiB.

    Raises:
        LayoutError: no regions, or sizes that no block table can address.
    """
    if not blocks or len(blocks) > MAX_REGIONS:
        raise LayoutError(f"{len(blocks)} regions; 1 to {MAX_REGIONS} can be shared")
    for name, block_bytes in blocks:
        if not 0 < block_bytes <= MAX_BLOCK_BYTES:
            raise LayoutError(f"layer {name!r}: {block_bytes} bytes a block")
    # A window base must fall on a huge page in every region at once.
    granularity = lcm(*(ALIGNMENT_BYTES // gcd(block_bytes, ALIGNMENT_BYTES) for _, block_bytes in blocks))
    if window_pool_factor is None:
        least = DEFAULT_WINDOW_BYTES // sum(block_bytes for _, block_bytes in blocks)
        wanted = min(max(num_local * DEFAULT_WINDOW_FACTOR, least), MAX_BLOCKS // 2)
    else:
        wanted = int(num_local * window_pool_factor)
    num_window = align_up(wanted, granularity) if wanted else 0
    num_total = align_up(num_local, granularity) + num_window if num_window else num_local
    if num_total >= MAX_BLOCKS:
        raise LayoutError(f"{num_total} block ids do not fit an int32 block table; lower window_pool_factor")
    regions = []
    cursor = 0
    for name, block_bytes in blocks:
        regions.append(Region(name=name, offset_bytes=cursor, block_bytes=block_bytes))
        cursor += align_up(num_total * block_bytes, ALIGNMENT_BYTES)
    return AddressPlan(
        num_local=num_local,
        num_total=num_total,
        granularity=granularity,
        regions=tuple(regions),
        range_bytes=cursor,
    )


class WindowAllocator:
    """Gives each attached peer a run of block ids in the window. First fit; scheduler thread only."""

    def __init__(self, base: int, num_blocks: int, granularity: int) -> None:
        self._free: list[tuple[int, int]] = [(base, num_blocks)] if num_blocks > 0 else []
        self._granularity = granularity

    @property
    def num_free(self) -> int:
        """Block ids not given away."""
        return sum(size for _, size in self._free)

    def claim(self, num_blocks: int) -> int | None:
        """First block id of a run of at least ``num_blocks``, or None when the window is full."""
        wanted = align_up(num_blocks, self._granularity)
        for index, (base, size) in enumerate(self._free):
            if size >= wanted:
                rest = [(base + wanted, size - wanted)] if size > wanted else []
                self._free[index : index + 1] = rest
                return base
        return None

    def release(self, base: int, num_blocks: int) -> None:
        """Give a run back; ``num_blocks`` as it was claimed."""
        runs = sorted([*self._free, (base, align_up(num_blocks, self._granularity))])
        merged: list[tuple[int, int]] = []
        for start, size in runs:
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((start, size))
        self._free = merged
