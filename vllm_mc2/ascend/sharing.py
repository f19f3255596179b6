"""Makes the memory that a KV cache lies in mappable for other processes, in the first way that works.

1. ``handle_v2``: ACL's handle of each physical allocation, retained by its address and exported with a list of the processes
   that may import it. Needs CANN 9.0 and driver 26. ``fabric``: the same, with handles that other servers of an A3 SuperPoD
   can import.
2. ``torch_npu``: the bytes with which torch_npu sends a tensor to another process (:mod:`vllm_mc2.ascend.compat`).
3. ``ipc_key``: ACL's key of a plain allocation, for a torch_npu without that.

The ways are not mixed: an allocation may be exported once only. If none works, nothing is shared, and the reasons are all said.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from vllm_mc2._native import Acl, AclError, DeviceExport
from vllm_mc2.ascend.caches import CacheLayout
from vllm_mc2.ascend.compat import plain_segment, share_storage
from vllm_mc2.device_messages import MAX_SEGMENTS, DeviceGrant, DeviceSegment, DeviceStrip
from vllm_mc2.errors import DeviceError

SharingWay = Literal["handle_v2", "fabric", "torch_npu", "ipc_key"]


class Shared(NamedTuple):
    """What peers need to map a cache, and what keeps it mappable."""

    way: SharingWay
    segments: tuple[DeviceSegment, ...]
    export: DeviceExport | None
    """Ours, with a list of processes that may import; None where torch_npu has exported."""
    passed_over: tuple[str, ...]
    """Why not in one of the ways before."""

    def admit(self, pid: int) -> None:
        """Let a process, by its number on the host, import.

        Raises:
            DeviceError: ACL refuses.
        """
        if self.export is None:
            return
        try:
            self.export.admit(pid)
        except AclError as error:
            raise DeviceError(str(error)) from error

    def close(self) -> None:
        """Share no more; importers must have unmapped."""
        if self.export is not None:
            self.export.close()


def grant_of(layout: CacheLayout, shared: Shared) -> DeviceGrant:
    """What peers are told of a cache."""
    strips = tuple(
        DeviceStrip(strip.name, strip.address, strip.block_stride_bytes, strip.block_bytes) for strip in layout.strips
    )
    return DeviceGrant(layout.num_blocks, strips, shared.segments)


def native_segments(grant: DeviceGrant) -> list[tuple[str, int, int, bytes]]:
    """What :class:`~vllm_mc2._native.DeviceImport` takes."""
    return [(each.kind, each.address, each.num_bytes, each.handle) for each in grant.segments]


def share_storages(acl: Acl, device: int, storages: Sequence[Any], *, fabric: bool = False) -> Shared:
    """Share the allocations that the storages (of NPU tensors) lie in.

    Raises:
        DeviceError: it cannot be done in any way; says why of each.
    """
    reasons: list[str] = []
    ways: list[tuple[str, Callable[[], Shared]]] = [
        ("handle_v2", lambda: _export_allocations(acl, device, storages, "handle_v2")),
        ("torch_npu", lambda: _share_by_torch(storages)),
        ("ipc_key", lambda: _share_by_key(acl, device, storages)),
    ]
    if fabric:
        ways.insert(0, ("fabric", lambda: _export_allocations(acl, device, storages, "fabric")))
    for name, way in ways:
        try:
            shared = way()
        except (AclError, DeviceError) as error:
            reasons.append(f"{name}: {error}")
            continue
        if len(shared.segments) > MAX_SEGMENTS:
            shared.close()
            raise DeviceError(
                f"the KV cache lies in {len(shared.segments)} allocations, at most {MAX_SEGMENTS} are shared"
            )
        return Shared(shared.way, shared.segments, shared.export, tuple(reasons))
    raise DeviceError("the KV cache cannot be shared: " + "; ".join(reasons))


def _export_allocations(acl: Acl, device: int, storages: Sequence[Any], way: Literal["handle_v2", "fabric"]) -> Shared:
    export = DeviceExport(acl, device)
    try:
        found = {
            segment
            for storage in storages
            for segment in export.add_allocation(storage.data_ptr(), storage.nbytes(), fabric=way == "fabric")
        }
    except BaseException:
        export.close()
        raise
    return Shared(way, _in_order(found), export, ())


def _share_by_torch(storages: Sequence[Any]) -> Shared:
    found: set[tuple[str, int, int, bytes]] = set()
    ends: dict[tuple[int, bytes], int] = {}
    for storage in storages:
        share = share_storage(storage)
        if share.key:
            # How long the allocation is only its owner knows; up to the last storage is all that anybody reads.
            place = (share.base, share.key)
            ends[place] = max(ends.get(place, 0), storage.data_ptr() + storage.nbytes())
        for index, handle in enumerate(share.handles):
            address = share.base + index * share.chunk_bytes
            found.add(("handle_v1", address, share.chunk_bytes, handle.to_bytes(8, "little")))
    found |= {("ipc_key", base, end - base, key) for (base, key), end in ends.items()}
    return Shared("torch_npu", _in_order(found), None, ())


def _share_by_key(acl: Acl, device: int, storages: Sequence[Any]) -> Shared:
    export = DeviceExport(acl, device)
    try:
        found = set()
        for storage in storages:
            segment = plain_segment(storage.data_ptr())
            if segment is None:
                raise DeviceError(
                    "the KV cache does not lie in plain allocations (PYTORCH_NPU_ALLOC_CONF expandable_segments)"
                )
            found.add(segment)
        keys = {export.add_key(base, num_bytes) for base, num_bytes in found}
    except BaseException:
        export.close()
        raise
    return Shared("ipc_key", _in_order(keys), export, ())


def _in_order(found: set[tuple[str, int, int, bytes]]) -> tuple[DeviceSegment, ...]:
    segments = (DeviceSegment(kind, address, num_bytes, handle) for kind, address, num_bytes, handle in found)  # type: ignore[arg-type]
    return tuple(sorted(segments, key=lambda segment: segment.address))
