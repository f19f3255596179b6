"""A peer's blocks on an NPU: how they fit ours, and the copies out of its mapped memory, from device to device."""

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from vllm_mc2._native import AclError, DeviceCopier, DeviceImport
from vllm_mc2.ascend.caches import CacheLayout, CacheStrip
from vllm_mc2.device_messages import DeviceGrant, DeviceStrip
from vllm_mc2.errors import DeviceError, LayoutError
from vllm_mc2.layout import HeadSlice, PoolLayout, make_plan
from vllm_mc2.session import Session

logger = logging.getLogger("vllm.mc2.npu")

RETRY_SECONDS = 0.1
ATTEMPTS_A_LOG_LINE = 100


class NpuStrip(NamedTuple):
    """Equally spaced pieces on either side."""

    own_address: int
    own_stride: int
    peer_address: int
    """As the peer counts."""
    peer_stride: int
    num_bytes: int


def packed(blocks: list[tuple[str, int]], num_blocks: int) -> PoolLayout:
    """How blocks of ``(name, bytes)`` would lie in a pool: for their sizes, no address is counted from it."""
    return make_plan(blocks, num_blocks, 0.0).pool_layout()


def strips_between(
    own: CacheLayout, grant: DeviceGrant, part: HeadSlice, tokens_per_block: int, *, is_replicated: bool
) -> list[NpuStrip]:
    """How a peer's blocks fit ours. vllm-ascend keeps tokens before heads, so that a part of the heads is a piece of every token.

    Raises:
        LayoutError: its cache is not ours, or does not divide as ``part`` says.
    """
    names = [strip.name for strip in own.strips], [strip.name for strip in grant.strips]
    if names[0] != names[1]:
        raise LayoutError("the peer's layers are not ours")
    strips: list[NpuStrip] = []
    is_whole = is_replicated or part.own_parts == part.peer_parts == 1
    for mine, theirs in zip(own.strips, grant.strips, strict=True):
        if is_whole:
            if mine.block_bytes != theirs.num_bytes:
                raise LayoutError(f"{mine.name}: blocks of {theirs.num_bytes} bytes there, {mine.block_bytes} here")
            strips.append(
                NpuStrip(mine.address, mine.block_stride_bytes, theirs.address, theirs.stride_bytes, mine.block_bytes)
            )
        else:
            strips += _token_strips(mine, theirs, part, tokens_per_block)
    return strips


def _token_strips(mine: CacheStrip, theirs: DeviceStrip, part: HeadSlice, num_tokens: int) -> Iterator[NpuStrip]:
    if mine.num_heads is None or " NZ" in mine.signature:
        raise LayoutError(f"{mine.name} ({mine.signature}): its heads cannot be told apart")
    own_row, own_rest = divmod(mine.block_bytes, num_tokens)
    peer_row, peer_rest = divmod(theirs.num_bytes, num_tokens)
    if own_rest or peer_rest:
        raise LayoutError(
            f"{mine.name}: blocks of {mine.block_bytes} and {theirs.num_bytes} bytes for {num_tokens} tokens"
        )
    own_offset, peer_offset, num_bytes = part.cut(own_row, peer_row)
    for token in range(num_tokens):
        yield NpuStrip(
            mine.address + token * own_row + own_offset,
            mine.block_stride_bytes,
            theirs.address + token * peer_row + peer_offset,
            theirs.stride_bytes,
            num_bytes,
        )


class NpuPart:
    """The memory of one of the peer's workers, mapped. See :class:`~vllm_mc2.connector.remote_pulling.Part`."""

    def __init__(self, imported: DeviceImport, copier: DeviceCopier, layout: PoolLayout) -> None:
        """Takes over both. ``layout``: the peer's blocks, as if they were packed."""
        self.layout = layout
        self._imported = imported
        self._copier = copier

    def read(self, own_ids: Sequence[int], peer_ids: Sequence[int]) -> None:
        """From device to device.

        Raises:
            DeviceError: a copy has failed. Nothing is written any more.
        """
        try:
            self._copier.copy(list(own_ids), list(peer_ids))
        except AclError as error:
            self._wait_until_nothing_is_written()
            raise DeviceError(str(error)) from error

    def _wait_until_nothing_is_written(self) -> None:
        """After a failed copy, nearly always at once. As long as a stream can neither be emptied nor ended, the request's blocks
        must be nobody else's, which they are until this returns.
        """
        for num_attempts in itertools.count():
            try:
                self._copier.copy([], [])
            except AclError as error:
                if num_attempts % ATTEMPTS_A_LOG_LINE == 0:
                    logger.error("a copy that has failed may still be writing, its blocks are kept: %s", error)  # noqa: TRY400
                time.sleep(RETRY_SECONDS)
            else:
                return

    def close(self) -> None:
        """Unmap."""
        try:
            self._copier.close()
            self._imported.close()
        except AclError as error:
            logger.warning("a peer's memory could not be unmapped: %s", error)


class NpuSource:
    """One peer on this host."""

    def __init__(self, on_close: Callable[["NpuSource"], None]) -> None:
        """``on_close`` is called before the sessions end."""
        self._on_close = on_close
        self.sessions: list[Session] = []
        self.parts: list[NpuPart] = []

    def copy(self, own_ids: Sequence[int], peer_ids: Sequence[int]) -> None:
        """Puller's thread."""
        self._require_peer()
        for part in self.parts:
            part.read(own_ids, peer_ids)
        self._require_peer()

    def _require_peer(self) -> None:
        if any(session.is_gone() for session in self.sessions):
            raise DeviceError("prefill has ended: what its memory holds now is not known")

    def mapped(self) -> list[tuple[int, PoolLayout]]:
        """What the peer has shared with us."""
        return [(-1, part.layout) for part in self.parts]

    def close(self) -> None:
        """Unmap, and say so by ending the sessions."""
        for part in self.parts:
            part.close()
        self._on_close(self)
        for session in self.sessions:
            session.close()
