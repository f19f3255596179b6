"""Native core: shared memory pools, address ranges and the lease protocol.

Errors: the operating system's refusals are `OSError` with `errno` and a message that names the call and the sizes;
misuse and hostile input are `ValueError`. Offsets and sizes are multiples of the page size (4096, or `HUGE_PAGE_BYTES`
where hugetlb memory is involved). Whatever maps, copies, allocates or pre-faults releases the GIL.
"""

from types import TracebackType
from typing import Final, Literal, Self, final

from typing_extensions import Buffer

_LeaseRow = tuple[
    int,  # slot
    int,  # generation
    Literal["offered", "held", "released", "expired", "peer_gone"],  # the last three: over, but not swept yet
    int,  # num_tokens
    int,  # num_blocks
    int,  # claims
    int,  # releases
    float,  # age_seconds
    list[tuple[int, int, int]],  # (ledger_id, claims, releases) of living decodes that have claimed it
]

HUGE_PAGE_BYTES: Final[int]
"""2 MiB: pools are rounded up to it, address ranges are aligned to it."""

@final
class Pool:
    """One process's paged KV memory: a memfd that peers can map read-only once it is sealed.

    All memory is committed when the constructor returns, so no access ends in SIGBUS later. Too little memory is
    `OSError(ENOMEM)` with the wanted and the available bytes. The owner maps the pool (`AddressRange.map_pool`), then
    calls `seal()`; after that nobody can make a new writable mapping. Existing mappings outlive `close()`.
    Any thread may call, one at a time per object.
    """

    def __init__(
        self,
        num_bytes: int,
        *,
        huge_pages: Literal["auto", "off", "require"] = "auto",
        name: str = "mc2-pool",
    ) -> None: ...
    @property
    def num_bytes(self) -> int:
        """Size, rounded up to 2 MiB."""
    @property
    def fd(self) -> int:
        """Descriptor to hand to peers, borrowed from the pool. `ValueError` before `seal()` and after `close()`."""
    @property
    def page_bytes(self) -> int:
        """2 MiB when all of the pool is in huge pages, else 4096."""
    @property
    def huge_bytes(self) -> int:
        """How much of the pool is in huge pages."""
    @property
    def method(self) -> Literal["hugetlb", "thp", "collapse", "none"]:
        """Where the huge pages come from."""
    @property
    def sealed(self) -> bool: ...
    def seal(self) -> None:
        """Fix the size and forbid new writable mappings, for everybody and for good. Idempotent."""
    def close(self) -> None:
        """Close the descriptor. Idempotent. Mappings stay."""
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...

@final
class AddressRange:
    """A reserved address range, aligned to 2 MiB, of which parts are mapped and unmapped.

    Reserving costs no memory. Unmapped parts are inaccessible (SIGSEGV), never a hole in which others could land.
    Any thread may call: map and unmap exclude copy, and prefault between its chunks. Who unmaps must know that nobody
    uses the addresses any more, through a tensor for instance.
    """

    def __init__(self, num_bytes: int) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    def map_pool(self, offset: int, pool: Pool, pool_offset: int, num_bytes: int) -> None:
        """Map a part of an unsealed pool, shared and writable. May not overlap a mapped part."""
    def map_anonymous(self, offset: int, num_bytes: int) -> None:
        """Map private zeroed memory, huge pages preferred, allocated on first touch."""
    def map_peer(self, offset: int, fd: int, fd_offset: int, num_bytes: int) -> None:
        """Map a part of a peer's memfd, shared and read-only. The descriptor may be closed afterwards.

        `ValueError` unless the memfd is sealed against shrinking and large enough, so that no access ends in SIGBUS.
        """
    def unmap(self, offset: int, num_bytes: int) -> None:
        """Give the part back to the reservation. Parts may be cut; what is not mapped stays so."""
    def prefault(self, offset: int, num_bytes: int) -> None:
        """Fill the page tables of a mapped part, in chunks. Never changes memory."""
    def copy(self, copies: list[tuple[int, int, int]]) -> None:
        """Copy `(dst_offset, src_offset, num_bytes)` each, byte granular.

        All or nothing: everything is checked before the first byte moves. Sources must be mapped, destinations mapped
        and writable, and no destination may overlap a source or another destination.
        """
    def buffer(self) -> memoryview:
        """A writable int8 view over the whole range; it and what is made from it keep the range mapped."""
    def mappings(self) -> list[tuple[int, int, Literal["pool", "anonymous", "peer"]]]:
        """`(offset, num_bytes, kind)` of the mapped parts, in address order."""
    def close(self) -> None:
        """Unmap everything. Idempotent. `ValueError` while a view from `buffer()` is alive."""
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...

@final
class BlockCopier:
    """Copies blocks out of a mapped pool into memory of the caller, with several threads and without the GIL: pull.

    A strip is `(destination, offset of its block 0, stride, offset of the source's block 0, stride, bytes per block)`: one
    layer, or a slice of one. `destination` is a one-dimensional contiguous uint8 array on the CPU (a tensor), which is kept
    alive, as the source is. `ValueError` when a strip leaves either side. Any thread may call.
    """

    def __init__(
        self,
        source: AddressRange,
        strips: list[tuple[object, int, int, int, int, int]],
        num_dst_blocks: int,
        num_src_blocks: int,
    ) -> None: ...
    @property
    def bytes_per_block(self) -> int:
        """Over all strips."""
    def copy(self, dst_ids: list[int], src_ids: list[int], num_threads: int) -> int:
        """Copy block `src_ids[i]` to `dst_ids[i]`, for all i; the number of bytes.

        `ValueError` for an id out of range or a place named twice, before a byte moves; also for a source that is not
        mapped any more, which leaves the destination half written.
        """

@final
class IdSpan:
    """int32 block ids in somebody's memory, a tensor's for instance; `owner` keeps it. The address is believed."""

    def __init__(self, address: int, num_ids: int, owner: object) -> None: ...

@final
class LeaseTable:
    """Prefill's index table and its view of the decodes' ledgers.

    One thread (the scheduler's) publishes and sweeps; `add_ledger`, `drop_ledger` and `view` may be called by any thread.
    """

    def __init__(self, num_slots: int, max_blocks: int) -> None: ...
    @property
    def fd(self) -> int:
        """Descriptor of the index table to hand to decodes, borrowed."""
    @property
    def num_slots(self) -> int: ...
    @property
    def max_blocks(self) -> int: ...
    @property
    def num_active(self) -> int:
        """Leases that are published and have not ended."""
    def publish(
        self,
        token: bytes,
        digest: bytes,
        num_tokens: int,
        block_ids: list[int] | Buffer | IdSpan,
        timeout_seconds: float,
        num_pool_blocks: int = ...,
        is_copy_wanted: bool = False,
    ) -> tuple[int, int] | None:
        """Offer a lease: `(slot, generation)`, or None when no slot is free.

        `block_ids`: a list, or a contiguous one-dimensional buffer of int32 (an `array("i")`, a tensor), which is faster.
        `ValueError` when one is not below `num_pool_blocks`. `is_copy_wanted` asks the claimant to copy the blocks and to
        release soon; it is passed on, nothing else depends on it.
        The blocks must stay pinned until `sweep()` reports the end.
        """
    def add_ledger(self) -> tuple[int, int]:
        """Make and register a ledger for one decode: `(ledger_id, fd)`, the descriptor borrowed until `drop_ledger`."""
    def drop_ledger(self, ledger_id: int) -> None:
        """The decode is gone, it reads no block any more: its claims count as released. Closes the descriptor.

        `ValueError` for an unknown id.
        """
    def sweep(self) -> list[tuple[int, int, Literal["released", "expired", "peer_gone"]]]:
        """`(slot, generation, reason)` of the leases that ended now; their blocks may be reused."""
    def view(self, max_rows: int) -> tuple[int, list[_LeaseRow]]:
        """`(num_leases, rows of the oldest ones)`. Any thread; changes nothing."""
    def close(self) -> None:
        """Unmap and close everything; decodes keep what they mapped. Idempotent. Other calls raise `ValueError` afterwards."""
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...

@final
class LeaseReader:
    """Decode's view of one prefill's leases. One thread (the scheduler's).

    Maps both segments; the descriptors may be closed afterwards. A ledger belongs to one reader: a used one is refused.
    """

    def __init__(self, index_fd: int, ledger_fd: int) -> None: ...
    @property
    def num_slots(self) -> int: ...
    @property
    def max_blocks(self) -> int: ...
    def peek(self, slot: int, generation: int) -> tuple[bytes, bytes, int, int, bool] | None:
        """`(token, digest, num_tokens, num_blocks, is_copy_wanted)` without claiming; None when there is no such live lease.

        Compare token and digest before `claim`: a wrong ticket must never write the ledger.
        """
    def claim(self, slot: int, generation: int) -> Literal["held", "pending", "dead"]:
        """Claim the lease once more. `pending`: prefill is just deciding, ask `poll`."""
    def take(self, slot: int, generation: int, token: bytes) -> tuple[Literal["held", "pending", "dead"], int] | None:
        """`peek`, comparison of the token, and `claim` in one call: the verdict and `num_tokens`. None, and nothing is
        written, when there is no such live lease or the token is another.
        """
    def poll(self, slot: int, generation: int) -> Literal["held", "pending", "dead"]:
        """Verdict of one pending claim; `ValueError` when none is pending."""
    def blocks(self, slot: int, generation: int) -> list[int]:
        """Block ids of a held lease; `ValueError` when it is not held."""
    def block_table(self, slot: int, generation: int, base: int, num_blocks: int) -> memoryview:
        """Block ids of a held lease, each plus `base`, as int32 items; no Python object per block.

        `ValueError` when it is not held, or names a block that a pool of `num_blocks` does not have.
        """
    def release(self, slot: int, generation: int) -> None:
        """Undo one held claim; `ValueError` when none is held."""
    def close(self) -> None:
        """Unmap. Does not release what is held. Idempotent. Other calls raise `ValueError` afterwards."""
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...
