"""Everything of torch_npu that is not public, in one place. Read in torch_npu 2.10 to 2.14; tried with 2.13.0.

``storage._share_npu_()`` is what ``torch.multiprocessing`` calls to send an NPU tensor to another process. Its handle bytes are
a version byte, a kind byte, and

- ``c``: the IPC key of a plain allocation;
- ``e``: the size of a chunk, the number of chunks (two C ``size_t``), and a shareable handle (``uint64``) for each chunk of an
  expandable segment.

Handles made that way carry no list of processes that may import them: whoever learns one on this host can.
"""

import struct
from typing import Any, NamedTuple

from vllm_mc2.errors import DeviceError

_VERSION = 1
_KEY_BYTES = 65
_CHUNKS = struct.Struct("=QQ")
_MAX_CHUNKS = 16384


class TorchShare(NamedTuple):
    """What torch_npu says of a storage."""

    base: int
    """Address of the allocation that the storage lies in."""
    key: bytes
    """Of a plain allocation; empty otherwise."""
    chunk_bytes: int
    handles: tuple[int, ...]
    """One for each chunk, in the order of their addresses."""


def share_storage(storage: Any) -> TorchShare:
    """torch_npu's own way to send a storage to another process.

    Raises:
        DeviceError: this torch_npu has no such way, cannot go it, or says something that is not understood.
    """
    share = getattr(storage, "_share_npu_", None)
    if share is None:
        raise DeviceError("this torch_npu has no storage._share_npu_")
    try:
        _, handle, _, offset_bytes, *_ = share()
    except (RuntimeError, ValueError, TypeError) as error:
        raise DeviceError(f"torch_npu does not share the storage: {first_line(error)}") from error
    return parse_share(bytes(handle), int(storage.data_ptr()) - int(offset_bytes))


def parse_share(handle: bytes, base: int) -> TorchShare:
    """The handle bytes of ``_share_npu_()``.

    Raises:
        DeviceError: they are not as described above.
    """
    version, kind, rest = handle[:1], handle[1:2], handle[2:]
    if version == bytes([_VERSION]) and kind == b"c" and len(rest) == _KEY_BYTES:
        return TorchShare(base, rest, 0, ())
    if version == bytes([_VERSION]) and kind == b"e" and len(rest) >= _CHUNKS.size:
        chunk_bytes, num_chunks = _CHUNKS.unpack_from(rest)
        if 0 < num_chunks <= _MAX_CHUNKS and chunk_bytes > 0 and len(rest) == _CHUNKS.size + 8 * num_chunks:
            handles = struct.unpack_from(f"={num_chunks}Q", rest, _CHUNKS.size)
            # torch_npu only warns where the driver cannot export, and leaves zeros (seen with 2.13.0 on a simulated driver).
            if 0 in handles or len(set(handles)) < num_chunks:
                raise DeviceError(
                    "torch_npu gives no handles for its expandable segments: the driver does not export them"
                )
            return TorchShare(base, b"", chunk_bytes, handles)
    raise DeviceError(f"torch_npu's share handle of {len(handle)} bytes is not of a form that is known")


def plain_segment(address: int) -> tuple[int, int] | None:
    """``(base, bytes)`` of the allocator's segment at ``address`` if it is one plain allocation, or None."""
    import torch

    for segment in torch.npu.memory_snapshot():
        base, num_bytes = int(segment["address"]), int(segment["total_size"])
        if base <= address < base + num_bytes:
            return None if segment.get("is_expandable") else (base, num_bytes)
    return None


def tensor_at(address: int, num_bytes: int, device: int) -> Any:
    """Bytes of an NPU at an address, as a tensor that does not own them."""
    import torch
    import torch_npu  # type: ignore[import-not-found, unused-ignore]

    where = torch.device("npu", device)
    storage = torch_npu._C._construct_storage_from_data_pointer(address, where, num_bytes)
    return torch.empty(0, dtype=torch.uint8, device=where).set_(storage, 0, (num_bytes,), (1,))


def first_line(error: BaseException) -> str:
    """What torch_npu's errors say before their advice."""
    return (str(error).splitlines() or [type(error).__name__])[0][:500]
