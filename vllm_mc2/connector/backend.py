"""What a worker's KV memory is made of, behind one interface: the host's (:mod:`.host_memory`) or an NPU's (:mod:`.npu_memory`).

A backend knows where blocks lie, how peers of the same kind get at them, and how to copy out of theirs. Who may have them and
when is decided elsewhere.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from vllm_mc2.connector.metadata import MapPeer
from vllm_mc2.connector.pulling import PullSource
from vllm_mc2.connector.remote_pulling import Part
from vllm_mc2.device_messages import DeviceGrant, DeviceHello
from vllm_mc2.layout import AddressPlan, HeadSlice, PoolLayout
from vllm_mc2.memory import OwnRegion, WorkerMemory
from vllm_mc2.protocol import Message, WorkerHello
from vllm_mc2.session import Answer, Session

M = TypeVar("M", bound=Message)


class Ask(Protocol):
    """Says hello to the peer's worker ``rank``."""

    def __call__(self, rank: int, expected: type[M], num_fds: int) -> tuple[M, list[int], Session]:
        """The answer, its descriptors and the open session, all of them the caller's from now on.

        Raises:
            PeerUnreachableError, PeerRefusedError, ProtocolError: as :func:`~vllm_mc2.session.open_session`.
        """
        ...


class Backend(Protocol):
    """The KV memory of one worker."""

    plan: AddressPlan | None
    """How many blocks of what size there are; None before they are allocated, where vLLM does that by itself."""
    gives_memory: bool
    """Whether vLLM allocates in our memory: on prefill if it can, on decode for the sake of the window."""
    memory: WorkerMemory | None
    """Host memory of ours that vLLM's cache lies in."""
    own: list[OwnRegion]
    """Where other hosts' blocks can be written to."""

    def allocation_context(self) -> AbstractContextManager[None]:
        """Around vLLM's allocation of the KV cache, if we give the memory."""
        ...

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """VLLM has allocated.

        Raises:
            LayoutError: it did so in a way that is not understood. The engine must not start: it would serve wrong bytes.
        """
        ...

    def facts(self) -> dict[str, str]:
        """What a peer's fingerprint must agree with, of what is known when the cache is allocated."""
        ...

    def pool(self) -> PoolLayout | None:
        """What the scheduler tells peers of our blocks; None unless they are shared."""
        ...

    def summary(self) -> str:
        """What the memory is, in a few words for ``inspect``."""
        ...

    def device_hello(self) -> DeviceHello | None:
        """What a peer must know to let our device map its memory."""
        ...

    def slices(self, rank: int, size: int, peer_size: int) -> list[HeadSlice]:
        """What ``rank`` of our ``size`` ranks takes from a peer with ``peer_size``.

        Raises:
            LayoutError: its part of a block cannot be told apart.
        """
        ...

    def grant(self, hello: WorkerHello) -> Answer:
        """What the worker of a decode, whose fingerprint fits, is answered. Session thread."""
        ...

    def open_source(self, order: MapPeer, parts: Sequence[HeadSlice], ask: Ask) -> PullSource:
        """Map a peer's blocks. On a thread of its own.

        Raises:
            MC2Error, OSError, ValueError: they cannot be mapped, and nothing of them is.
        """
        ...

    def remote_grant(self) -> DeviceGrant | None:
        """What lets other hosts map our memory; None where they cannot, or read it by a transfer engine."""
        ...

    def open_remote(self, grant: DeviceGrant, part: HeadSlice) -> Part:
        """Map another host's memory.

        Raises:
            DeviceError, LayoutError: it cannot be mapped, or its blocks do not fit ours.
        """
        ...

    def watch(self, key: int, source: PullSource) -> None:
        """Orders may name the source as ``key`` from now on: close it when the peer wants that. On the thread that opened it."""
        ...

    def fence(self) -> Callable[[], None] | None:
        """A wait for what this worker's device has been told to do so far; None where that is done when the call returns. Main
        thread.
        """
        ...

    def prefault(self, base: int) -> None:
        """Make first touches of a peer's blocks cheap."""
        ...

    def copy_tails(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy ``(own block, block in the window)`` before a forward pass."""
        ...

    def close(self) -> None:
        """Share nothing any more. vLLM's tensors stay valid."""
        ...
