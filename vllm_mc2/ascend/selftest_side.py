"""One process of ``vllm-mc2 selftest --device npu``: a worker of a prefill or a decode, without vLLM, that does as it is told.

It is started with the number of a socket, on which calls come as length-prefixed MessagePack ``[name, arguments]`` and go back as
``["ok", value]`` or ``["error", text]``. Only the selftest starts it.
"""

import socket
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from vllm_mc2._native import DeviceCopier, DeviceImport
from vllm_mc2.ascend.acl import load_acl
from vllm_mc2.ascend.attach_probe import decode_grant, why_not_in_one_range
from vllm_mc2.ascend.caches import CacheLayout, read_caches
from vllm_mc2.ascend.calls import receive, send
from vllm_mc2.ascend.mapping import map_memory, strips_between
from vllm_mc2.ascend.sharing import Shared, grant_of, share_storages
from vllm_mc2.errors import MC2Error
from vllm_mc2.layout import HeadSlice

SLACK_BYTES = 2 << 20
NUM_LAYERS = 2
NUM_STREAMS = 4
BLOCK_SHAPE = (128, 2, 128)
"""Tokens, heads, dimension; two bytes each: 64 KiB for keys and as much for values."""


def block_bytes(strip: int, block: int, num_bytes: int) -> torch.Tensor:
    """What stands in a block of prefill: different in every block, strip and place."""
    return ((torch.arange(num_bytes, dtype=torch.int64) * 31 + strip * 7919 + block * 104729) % 251).to(torch.uint8)


def aligned_cache(num_blocks: int, device: str) -> torch.Tensor:
    """A tensor of blocks that begins at a multiple of 2 MiB inside a longer allocation, as vllm-ascend makes them."""
    num_bytes = num_blocks * torch.Size(BLOCK_SHAPE).numel() * 2
    raw = torch.zeros(num_bytes + SLACK_BYTES, dtype=torch.int8, device=device)
    skipped = -raw.data_ptr() % SLACK_BYTES
    return raw[skipped : skipped + num_bytes].view(torch.bfloat16).view(num_blocks, *BLOCK_SHAPE)


class Side:
    """See the module."""

    def __init__(self, device: int) -> None:
        import torch_npu  # type: ignore[import-not-found, unused-ignore]  # noqa: F401

        torch.npu.set_device(device)
        self._device = device
        self._acl = load_acl()
        self._num_blocks = 0
        self._caches: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._layout = CacheLayout((), 0)
        self._shared: Shared | None = None
        self._imported: DeviceImport | None = None
        self._copier: DeviceCopier | None = None

    def allocate(self, num_blocks: int, is_filled: bool) -> int:
        """Make a cache; bytes of it."""
        where = f"npu:{self._device}"
        self._num_blocks = num_blocks
        self._caches = {
            f"layer.{layer}": (aligned_cache(num_blocks, where), aligned_cache(num_blocks, where))
            for layer in range(NUM_LAYERS)
        }
        self._layout = read_caches(self._caches, num_blocks)
        if is_filled:
            for index, tensor in enumerate(self._tensors()):
                rows = [block_bytes(index, block, self._strip_bytes) for block in range(num_blocks)]
                tensor.copy_(torch.stack(rows).view(torch.bfloat16).view(tensor.shape))
        # Also where it was only zeroed: copies over other streams would be overtaken by that.
        torch.npu.synchronize()
        return sum(strip.block_bytes for strip in self._layout.strips) * num_blocks

    def _tensors(self) -> list[torch.Tensor]:
        return [tensor for cache in self._caches.values() for tensor in cache]

    @property
    def _strip_bytes(self) -> int:
        return self._layout.strips[0].block_bytes

    def pid(self) -> int:
        """Of this process, as the driver knows it."""
        return self._acl.bare_tgid()

    def free_bytes(self) -> int:
        """Of the device."""
        torch.npu.synchronize()
        return int(torch.npu.mem_get_info()[0])

    def share(self) -> tuple[str, list[str], bytes]:
        """The way, why not the ones before, and the grant."""
        storages = [tensor.untyped_storage() for tensor in self._tensors()]
        self._shared = share_storages(self._acl, self._device, storages)
        grant = grant_of(self._layout, self._shared)
        return self._shared.way, list(self._shared.passed_over), msgspec.msgpack.encode(grant)

    def admit(self, pid: int) -> None:
        """Let a process import."""
        assert self._shared is not None
        self._shared.admit(pid)

    def end_sharing(self) -> None:
        """Close what is exported."""
        assert self._shared is not None
        self._shared.close()

    def map_peer(self, encoded: bytes) -> int:
        """Map a prefill's memory; bytes of it."""
        grant = decode_grant(encoded)
        strips = strips_between(self._layout, grant, HeadSlice(peer_rank=0), BLOCK_SHAPE[0], is_replicated=False)
        self._imported, self._copier = map_memory(self._acl, self._device, grant, strips, self._num_blocks, NUM_STREAMS)
        return self._imported.num_bytes

    def unmap_peer(self) -> None:
        """Unmap it."""
        if self._copier is not None:
            self._copier.close()
        if self._imported is not None:
            self._imported.close()
        self._copier = self._imported = None

    def pull(self, own_ids: list[int], peer_ids: list[int]) -> int:
        """Copy blocks; bytes of them."""
        assert self._copier is not None
        return self._copier.copy(own_ids, peer_ids)

    def wrong_blocks(self, own_ids: list[int], peer_ids: list[int]) -> int:
        """How many of the copied blocks are not what prefill has written."""
        wrong: set[int] = set()
        for index, tensor in enumerate(self._tensors()):
            rows = tensor.cpu().contiguous().view(torch.uint8).view(self._num_blocks, -1)
            for own, peer in zip(own_ids, peer_ids, strict=True):
                if not torch.equal(rows[own], block_bytes(index, peer, self._strip_bytes)):
                    wrong.add(own)
        return len(wrong)

    def try_attach(self, encoded: bytes) -> str:
        """Why own memory and a prefill's cannot be read through one table; empty if they can."""
        return why_not_in_one_range(self._acl, self._device, decode_grant(encoded), block_bytes)


def serve(sock: socket.socket, device: int) -> None:
    """Do as told until the other end closes."""
    side: Side | None = None
    while (call := receive(sock)) is not None:
        name, arguments = call
        try:
            side = side or Side(device)
            method: Callable[..., Any] = getattr(side, name)
            answer = ["ok", method(*arguments)]
        except (MC2Error, RuntimeError, ValueError, OSError, ImportError, AssertionError, AttributeError) as error:
            answer = ["error", f"{type(error).__name__}: {error}"]
        send(sock, answer)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
