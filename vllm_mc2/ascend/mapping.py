"""A peer's blocks on an NPU: how they fit ours, and how they are mapped to be copied."""

from collections.abc import Iterator
from typing import NamedTuple

from vllm_mc2._native import Acl, AclError, DeviceCopier, DeviceImport
from vllm_mc2.ascend.caches import CacheLayout, CacheStrip
from vllm_mc2.ascend.sharing import native_segments
from vllm_mc2.device_messages import DeviceGrant, DeviceStrip
from vllm_mc2.errors import DeviceError, LayoutError
from vllm_mc2.layout import HeadSlice


class NpuStrip(NamedTuple):
    """Equally spaced pieces on either side."""

    own_address: int
    own_stride: int
    peer_address: int
    """As the peer counts."""
    peer_stride: int
    num_bytes: int


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


def map_memory(
    acl: Acl, device: int, grant: DeviceGrant, strips: list[NpuStrip], num_own_blocks: int, num_streams: int
) -> tuple[DeviceImport, DeviceCopier]:
    """The peer's memory, mapped, and what copies out of it; both to be closed, the copier first.

    Raises:
        DeviceError: ACL refuses, and nothing is mapped.
        ValueError: the segments cannot be right, or the strips are not in them.
    """
    try:
        imported = DeviceImport(acl, device, native_segments(grant))
        try:
            copier = DeviceCopier(acl, device, imported, [*strips], num_own_blocks, grant.num_blocks, num_streams)
        except BaseException:
            imported.close()
            raise
    except AclError as error:
        raise DeviceError(str(error)) from error
    return imported, copier
