"""A worker's KV memory: its own pool and the windows onto peers' pools, in one address range.

:class:`WorkerMemory` owns the native pool and range. vLLM's KV tensors are views of the range, so it lives as long as
the worker. Mapping and prefaulting may run on a background thread while attention reads other parts of the range; calls
for one peer must not overlap.
"""

import contextlib
import errno
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from vllm_mc2._native import AddressRange, BlockCopier, Pool
from vllm_mc2.errors import LayoutError
from vllm_mc2.layout import AddressPlan, HeadSlice, PoolLayout, align_up, mirror_plan

Copier = BlockCopier
"""What :meth:`WorkerMemory.copier` makes."""


@contextlib.contextmanager
def _with_advice(wanted: Literal["memory", "huge pages", "address space"]) -> Iterator[None]:
    """An ``OSError`` of the native module says in its message what was wanted and what there is; this adds what to do."""
    advice = {
        "memory": "give this host or container more memory, or the KV cache less of it (--kv-cache-memory-bytes, or"
        " VLLM_CPU_KVCACHE_SPACE on CPUs); the size of /dev/shm does not matter",
        "huge pages": "give this host or container more memory, reserve huge pages (sysctl vm.nr_hugepages), or set huge_pages"
        " to 'auto'",
        "address space": "raise the limit on address space (ulimit -v), or lower window_pool_factor; it is no memory",
    }[wanted]
    try:
        yield
    except OSError as error:
        if error.errno == errno.EFBIG:
            advice = "raise the limit on file sizes (ulimit -f), which counts for shared memory too"
        raise OSError(error.errno, f"{error.strerror}: {advice}") from error


class OwnRegion(NamedTuple):
    """A region of our own KV cache, as a place to copy to."""

    name: str
    block_bytes: int
    data: object
    """All of its blocks: a one-dimensional contiguous uint8 array, such as a tensor."""
    address: int
    """Of the data, which is ``num_bytes`` long."""
    num_bytes: int


class WorkerMemory:
    """``shared``: the pool is a memfd that peers can map (prefill); otherwise plain private memory (decode only). A plan
    without local blocks (:func:`~vllm_mc2.layout.mirror_plan`) has windows only.
    """

    def __init__(self, plan: AddressPlan, *, shared: bool, huge_pages: Literal["auto", "off", "require"]) -> None:
        """Allocate and map everything local.

        Raises:
            OSError: too little memory (``ENOMEM``; the message has wanted and available bytes, and what to do), no huge pages
                though they are required, or a limit of this process that is too low.
        """
        self.plan = plan
        self.layout = plan.pool_layout()
        with _with_advice("address space"):
            self._range = AddressRange(plan.range_bytes)
        self._pool: Pool | None = None
        self._peers: dict[int, PoolLayout] = {}
        local = list(zip(plan.regions, self.layout.regions, strict=True))
        if not plan.num_local:
            return
        if not shared:
            for in_range, in_pool in local:
                self._range.map_anonymous(in_range.offset_bytes, self.layout.region_bytes(in_pool))
            return
        with _with_advice("huge pages" if huge_pages == "require" else "memory"):
            self._pool = Pool(self.layout.pool_bytes, huge_pages=huge_pages, name="mc2-kv-pool")
        for in_range, in_pool in local:
            self._range.map_pool(
                in_range.offset_bytes, self._pool, in_pool.offset_bytes, self.layout.region_bytes(in_pool)
            )
        # From here on nobody, this process included, can make another writable mapping of the pool.
        self._pool.seal()

    @property
    def address(self) -> int:
        """Address of the first byte of the range."""
        return self._range.address

    @property
    def pool_fd(self) -> int | None:
        """Descriptor of the sealed pool for peers; borrowed. None when the pool is private."""
        return self._pool.fd if self._pool is not None else None

    @property
    def page_summary(self) -> str:
        """Which pages the pool got, for the log line at start."""
        if self._pool is None:
            return "private"
        return f"{self._pool.huge_bytes / self._pool.num_bytes:.0%} in 2 MiB pages ({self._pool.method})"

    def buffer(self) -> object:
        """A writable buffer over the whole range, for ``torch.frombuffer``. Only mapped parts may be touched."""
        return self._range.buffer()

    def map_peer(self, base: int, layout: PoolLayout, pool_fd: int) -> None:
        """Map a peer's pool read-only so that its block ``b`` is block ``base + b`` here. ``pool_fd`` stays the caller's.

        Raises:
            LayoutError: the peer's regions are not ours, or do not fit the window.
            ValueError: the descriptor is not a sealed memfd that is large enough.
            OSError: the kernel refused a mapping; what was mapped of this peer is unmapped again.
        """
        layout.check()
        self._check_fit(base, layout)
        mapped: list[tuple[int, int]] = []
        try:
            for mine, theirs in zip(self.plan.regions, layout.regions, strict=True):
                offset, num_bytes = self.plan.block_offset(mine, base), layout.region_bytes(theirs)
                self._range.map_peer(offset, pool_fd, theirs.offset_bytes, num_bytes)
                mapped.append((offset, num_bytes))
        except BaseException:
            for offset, num_bytes in mapped:
                self._range.unmap(offset, num_bytes)
            raise
        self._peers[base] = layout

    def _check_fit(self, base: int, layout: PoolLayout) -> None:
        mine = [(region.name, region.block_bytes) for region in self.plan.regions]
        theirs = [(region.name, region.block_bytes) for region in layout.regions]
        if mine != theirs:
            raise LayoutError("the peer's layers or block sizes are not ours")
        blocks = align_up(layout.num_blocks, self.plan.granularity)
        if base % self.plan.granularity or base < self.plan.window_base or base + blocks > self.plan.num_total:
            raise LayoutError(f"{blocks} blocks at {base} are outside the window")

    def prefault_peer(self, base: int) -> None:
        """Fill in the page tables of a mapped peer. Milliseconds with 2 MiB pages; blocks, without the GIL."""
        layout = self._peers[base]
        for mine, theirs in zip(self.plan.regions, layout.regions, strict=True):
            self._range.prefault(self.plan.block_offset(mine, base), layout.region_bytes(theirs))

    def mapped_peers(self) -> list[tuple[int, PoolLayout]]:
        """``(base, layout)`` of the peers that are mapped now. Any thread."""
        return list(self._peers.items())

    def unmap_peer(self, base: int) -> None:
        """Give a peer's part of the window back to the reservation; no-op when nothing is mapped at ``base``."""
        layout = self._peers.pop(base, None)
        if layout is None:
            return
        for mine, theirs in zip(self.plan.regions, layout.regions, strict=True):
            self._range.unmap(self.plan.block_offset(mine, base), layout.region_bytes(theirs))

    def copier(self, base: int, own: Sequence[OwnRegion], num_own_blocks: int, part: HeadSlice) -> Copier:
        """Copies blocks of the peer that is mapped at ``base`` into our own cache, wherever that lies.

        Raises:
            LayoutError: the peer's layers are not ours, or their blocks do not divide as ``part`` says.
        """
        layout = self._peers[base]
        if [region.name for region in own] != [region.name for region in layout.regions]:
            raise LayoutError("the peer's layers are not ours")
        strips = []
        for region, mine in zip(self.plan.regions, own, strict=True):
            own_offset, peer_offset, num_bytes = part.cut(mine.block_bytes, region.block_bytes)
            source = self.plan.block_offset(region, base) + peer_offset
            strips.append((mine.data, own_offset, mine.block_bytes, source, region.block_bytes, num_bytes))
        return BlockCopier(self._range, strips, num_own_blocks, layout.num_blocks)

    def copy_blocks(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy whole blocks ``(destination, source)`` in every layer. Ids may be global; the destination must be local.

        Raises:
            LayoutError: an id is out of range. Nothing was copied then.
        """
        pairs = list(pairs)
        for destination, source in pairs:
            if not 0 <= destination < self.plan.num_local or not 0 <= source < self.plan.num_total:
                raise LayoutError(f"block copy {source} -> {destination} is out of range")
        self._range.copy(
            [
                (
                    self.plan.block_offset(region, destination),
                    self.plan.block_offset(region, source),
                    region.block_bytes,
                )
                for region in self.plan.regions
                for destination, source in pairs
            ]
        )


def map_elsewhere(layout: PoolLayout, pool_fd: int) -> WorkerMemory:
    """A peer's pool in an address range of its own, at base 0, for those who copy out of it. ``pool_fd`` stays the caller's.

    Raises:
        LayoutError, ValueError, OSError: as :meth:`WorkerMemory.map_peer`.
    """
    memory = WorkerMemory(mirror_plan(layout), shared=False, huge_pages="off")
    memory.map_peer(0, layout, pool_fd)
    return memory
