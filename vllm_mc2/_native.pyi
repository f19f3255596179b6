"""Native core: shared memory pools, address ranges, the lease protocol, and device memory of Ascend NPUs.

Errors: the operating system's refusals are `OSError` with `errno` and a message that names the call and the sizes;
misuse and hostile input are `ValueError`. Offsets and sizes are multiples of the page size (4096, or `HUGE_PAGE_BYTES`
where hugetlb memory is involved). Whatever maps, copies, allocates or pre-faults releases the GIL.
"""

from types import TracebackType
from typing import Final, Literal, Self, final

from typing_extensions import Buffer

_Segment = tuple[
    str,  # kind: "handle_v2", "fabric", "handle_v1" or "ipc_key"
    int,  # address in the exporter
    int,  # bytes
    bytes,  # the handle: 8, 128, 8 or 65 bytes
]

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

class AclError(RuntimeError):
    """A call to ACL failed: `aclrtMapMem: error 107000 (PARAM_INVALID): ` and the driver's own text."""

    call: str
    code: int

class AclNotSupportedError(AclError):
    """This libascendcl does not have the call, or the driver cannot do it (207000)."""

@final
class Acl:
    """libascendcl.so, loaded. Any thread may call. ACL is never finalised and the library never unloaded.

    `OSError` when it cannot be loaded, or lacks a function that every supported release has (the message names it).
    What the library cannot tell is None; every other failure is `AclError`.
    """

    def __init__(self, path: str = "libascendcl.so") -> None: ...
    def has(self, name: str) -> bool:
        """Whether the library has this symbol."""
    def initialize(self) -> None:
        """Initialise ACL, unless somebody in the process has done it already."""
    def num_devices(self) -> int: ...
    def set_device(self, device: int) -> None:
        """Choose the calling thread's device. All classes here do so by themselves, in every call that needs one."""
    def bare_tgid(self) -> int:
        """This process's id outside of any container, as `DeviceExport.admit` wants it. `AclNotSupportedError`."""
    def device_info(self, device: int, attribute: int) -> int | None: ...
    def topology(self, device: int, other: int) -> int | None: ...
    def physical_device(self, device: int) -> int | None: ...
    def can_access_peer(self, device: int, other: int) -> bool | None: ...
    def soc_name(self) -> str | None: ...
    def version(self, package: str) -> str | None:
        """Version of a part of CANN, `"runtime"` or `"driver"` for instance."""

@final
class DeviceExport:
    """What this process lets others map of one device's memory; keeps that memory until `close()`.

    Nobody can map anything before `admit` has named them, except by fabric handles, which are for other servers and belong
    to whoever has them. ACL exports a block once: neither two objects nor torch_npu and
    an object may export the same memory. Any thread may call; one call at a time goes through. `AclError` when ACL refuses.
    """

    def __init__(self, acl: Acl, device: int) -> None: ...
    def add_allocation(self, address: int, num_bytes: int, *, fabric: bool = False) -> list[_Segment]:
        """Export the physical blocks that the bytes lie in, in address order; all or nothing.

        A block that was answered before is answered again. `fabric`: for other servers of a SuperPoD. After a failure the
        call can be repeated; what ACL had exported by then stays retained, because it is not exported twice.
        `AclNotSupportedError` below CANN 9.0 or with an old driver.
        """
    def add_key(self, address: int, num_bytes: int) -> _Segment:
        """Export the memory of one `aclrtMalloc`, from its beginning. `AclNotSupportedError` below CANN 8.3."""
    def admit(self, pid: int) -> None:
        """Let a process (its `bare_tgid()`) map all that is here, and all that is added later. Cannot be taken back."""
    @property
    def num_segments(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    def close(self) -> None:
        """Close the keys, let the memory go. Importers close first. Idempotent; `ValueError` from other calls afterwards.

        Does all it can; when ACL refuses something it raises, and another `close()` tries that again.
        """
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...

@final
class DeviceImport:
    """A peer's segments, mapped for one device of this process. Any thread may call.

    Handles that follow each other in the exporter's addresses do so here too. `ValueError` for segments that cannot be
    right (they come from a peer), `AclError` when ACL refuses one; nothing is mapped then. The size of an `ipc_key` is
    believed: ACL does not tell it.
    """

    def __init__(self, acl: Acl, device: int, segments: list[_Segment]) -> None: ...
    def translate(self, address: int, num_bytes: int) -> int:
        """The exporter's address as ours. `ValueError` unless all the bytes are mapped in one piece."""
    @property
    def num_bytes(self) -> int: ...
    @property
    def num_mappings(self) -> int:
        """Pieces that are contiguous on both sides."""
    def close(self) -> None:
        """Unmap, once no copy is running; a `DeviceCopier` keeps the mapping until it is closed too. Idempotent.

        Does all it can; when ACL refuses something it raises, and another `close()` tries that again. `ValueError` from
        other calls afterwards.
        """
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...

@final
class DeviceCopier:
    """Copies a peer's blocks into own device memory, by the copy engines, over several streams of its own: pull.

    A strip is `(own address of block 0, own stride, the exporter's address of its block 0, its stride, bytes per block)`.
    Own memory is believed and must stay; `ValueError` when the peer's blocks are not all mapped. Any thread may call; one
    copy at a time goes through.
    """

    def __init__(
        self,
        acl: Acl,
        device: int,
        source: DeviceImport,
        strips: list[tuple[int, int, int, int, int]],
        num_dst_blocks: int,
        num_src_blocks: int,
        num_streams: int = 4,
    ) -> None: ...
    @property
    def bytes_per_block(self) -> int:
        """Over all strips."""
    def copy(
        self, dst_ids: list[int], src_ids: list[int], num_threads: int = 1, *, timeout_seconds: float = 30.0
    ) -> int:
        """Copy block `src_ids[i]` to `dst_ids[i]`, for all i, and wait; the number of bytes. `num_threads` enqueue.

        `ValueError` for an id out of range or a place named twice, before a byte moves. `AclError` when ACL refuses or the
        time is over: the places are half written, and nothing writes them any more. Should not even that be certain, the
        text says so, and further calls raise until it is.
        """
    def close(self) -> None:
        """Give back the streams and the mapping. Idempotent; `copy` raises `ValueError` afterwards. As `DeviceImport.close`."""
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...

@final
class AddressProbe:
    """Own memory and a peer's in one reserved range, which ACL documents as impossible: `AclError` where it is.

    Own memory of `own_bytes` (a multiple of 2 MiB) in front, the peer's contiguous handles behind. One thread.
    """

    def __init__(self, acl: Acl, device: int, own_bytes: int, peer: list[_Segment]) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def own_bytes(self) -> int: ...
    @property
    def peer_bytes(self) -> int: ...
    def close(self) -> None:
        """Unmap. Idempotent. As `DeviceImport.close`."""
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...
