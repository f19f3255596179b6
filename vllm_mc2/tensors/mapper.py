"""KVCacheMapper: a request's KV cache at the prefill becomes tensors here, without a copy."""

import time
import warnings
from collections.abc import Mapping
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Literal, Self

import torch

from vllm_mc2.errors import ExpiredKVError, OrphanedKVError, ProtocolError, UsageError
from vllm_mc2.leases import LeaseId
from vllm_mc2.tensors.manager import LayerKV
from vllm_mc2.tensors.receiver import Prefill, RemoteKV

if TYPE_CHECKING:
    from vllm_mc2.tensors.communicator import MC2Communicator

VERDICT_SECONDS = 1.0
"""How long a prefill may take to decide on a lease that was about to end. It takes microseconds, unless it is stopped."""


class MappedKV:
    """A request's KV cache, in the prefill's memory, usable until :meth:`release`.

    The tensors are read-only in effect: their pages are mapped without write permission, so that a write ends this process
    (SIGSEGV) and never reaches the peer. After ``release()`` the prefill may write other tokens there. One thread at a time,
    like the communicator; reading the tensors is free for all threads.
    """

    __slots__ = ("__weakref__", "_block_ids", "_is_released", "_layers", "_lease_id", "_prefill", "block_table", "is_paged",
                 "num_tokens", "request_id")  # fmt: skip

    def __init__(self, metadata: RemoteKV, num_tokens: int, block_table: memoryview) -> None:
        self._prefill = metadata.peer
        self._lease_id = metadata.lease_id
        self._layers = metadata.layout.layers
        self._is_released = False
        self._block_ids: torch.Tensor | None = None
        self.request_id = metadata.request_id
        self.num_tokens = num_tokens
        """As the sender said; 0 when it did not."""
        self.is_paged = metadata.layout.num_blocks > 0
        self.block_table = block_table
        """Block ids as int32 items: where the request's blocks are along the first dimension of the tensors in :attr:`layers`."""

    @property
    def layers(self) -> Mapping[int, LayerKV]:
        """``{layer: (key, value)}``: the prefill's tensors, with its shapes, strides and dtypes.

        Raises:
            UsageError: released.
        """
        if self._is_released:
            raise UsageError(f"request {self.request_id!r} has been released")
        return MappingProxyType(self._layers)

    @property
    def block_ids(self) -> torch.Tensor:
        """:attr:`block_table` as an int32 tensor of shape ``[num_blocks]``; empty for a contiguous cache."""
        if self._block_ids is None:
            if len(self.block_table):
                self._block_ids = torch.frombuffer(self.block_table, dtype=torch.int32)
            else:
                self._block_ids = torch.empty(0, dtype=torch.int32)
        return self._block_ids

    @property
    def num_bytes(self) -> int:
        """KV bytes that are used in place: all of a contiguous cache, or the blocks of a paged one."""
        total = 0
        for kv in self._layers.values():
            for _, tensor in kv.parts():
                num_bytes = int(tensor.numel() * tensor.element_size())
                total += num_bytes // int(tensor.shape[0]) * len(self.block_table) if self.is_paged else num_bytes
        return total

    def release(self) -> None:
        """Tell the prefill that its memory is not read any more: one word in shared memory. Idempotent."""
        if not self._is_released:
            self._is_released = True
            self._prefill.release(self._lease_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        if not getattr(self, "_is_released", True):
            self.release()  # first: the warning may be an error
            if warnings is not None:  # else the interpreter is shutting down
                warnings.warn(
                    f"request {self.request_id!r} was never released", ResourceWarning, source=self, stacklevel=2
                )


class KVCacheMapper:
    """Maps what :meth:`MC2Communicator.recv_kv_metadata` has announced. The peer's memory is mapped once, so this costs a claim
    and a block table, whatever the size of the cache. The communicator's thread.
    """

    def __init__(self, mc2: "MC2Communicator") -> None:
        """For decode's communicator.

        Raises:
            UsageError: it is a prefill's.
        """
        mc2.require_decode("KVCacheMapper")
        self._mc2 = mc2

    def map_remote_kv(self, metadata: RemoteKV) -> MappedKV:
        """Claim the request's lease: from now on, until it is released, the prefill leaves its blocks alone.

        Raises:
            OrphanedKVError: the prefill is gone; ``request_id`` says what to compute anew.
            UsageError: the communicator is closed.
            ExpiredKVError: nobody claimed the lease in time, or it was released already.
            ProtocolError: what the prefill has published is not valid.
        """
        prefill, lease_id = metadata.peer, metadata.lease_id
        if prefill.session.is_gone():
            self._mc2.require_decode("map_remote_kv()")  # it ended our sessions itself when it is closed
            raise OrphanedKVError(metadata.request_id)
        if prefill.unsettled:
            _settle(prefill)
        taken = prefill.leases.take(lease_id, metadata.token)
        if taken is None:
            raise ExpiredKVError(metadata.request_id)
        verdict, num_tokens = taken
        if verdict == "pending":
            verdict = _await_verdict(prefill, lease_id)
        if verdict != "held":
            raise (OrphanedKVError if prefill.is_gone() else ExpiredKVError)(metadata.request_id)
        num_blocks = metadata.layout.num_blocks
        try:
            table = prefill.leases.block_table(lease_id, 0, num_blocks)
        except ValueError as error:
            prefill.release(lease_id)
            raise ProtocolError(f"request {metadata.request_id!r}: {error}") from error
        return MappedKV(metadata, num_tokens, table)


def _await_verdict(prefill: Prefill, lease_id: LeaseId) -> Literal["held", "pending", "dead"]:
    deadline = time.monotonic() + VERDICT_SECONDS
    verdict: Literal["held", "pending", "dead"] = "pending"
    while verdict == "pending":
        if time.monotonic() > deadline or prefill.is_gone():
            # Settled later: a claim that is simply forgotten would keep the blocks for good.
            prefill.unsettled.append(lease_id)
            return "dead"
        time.sleep(20e-6)
        verdict = prefill.leases.poll(lease_id)
    return verdict


def _settle(prefill: Prefill) -> None:
    still = []
    for lease_id in prefill.unsettled:
        verdict = prefill.leases.poll(lease_id)
        if verdict == "held":
            prefill.leases.release(lease_id)
        elif verdict == "pending":
            still.append(lease_id)
    prefill.unsettled[:] = still
