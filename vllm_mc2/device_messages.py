"""What workers tell each other about memory of a device, as parts of the messages in :mod:`vllm_mc2.protocol`.

Addresses are the exporting process's own: the other side maps the segments wherever it can and counts from there. Handles and
keys are capabilities; they travel over the same sockets as descriptors do. No vllm, no torch, no native code.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MAX_SEGMENTS = 16384
MAX_STRIPS = 4096

Address = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
NumBytes = Annotated[int, Meta(gt=0, le=(1 << 62))]
Pid = Annotated[int, Meta(gt=0, lt=1 << 31)]
SegmentKind = Literal["handle_v2", "fabric", "handle_v1", "ipc_key"]


class DeviceHello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who asks for a device's memory."""

    pid: Pid
    """The process as the device's driver knows it, which is the host's number also inside a container."""


class DeviceSegment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One physical allocation."""

    kind: SegmentKind
    address: Address
    num_bytes: NumBytes
    handle: Annotated[bytes, Meta(min_length=8, max_length=128)]


class DeviceStrip(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Equally spaced blocks: block ``b`` is ``num_bytes`` long and begins at ``address + b * stride_bytes``."""

    name: Annotated[str, Meta(max_length=512)]
    address: Address
    stride_bytes: NumBytes
    num_bytes: NumBytes


DeviceSegments = Annotated[tuple[DeviceSegment, ...], Meta(max_length=MAX_SEGMENTS)]


class DeviceGrant(msgspec.Struct, frozen=True, tag="device_grant", forbid_unknown_fields=True):
    """A worker's answer: where its blocks are, and how to map them. The session stays open for as long as they are mapped, and
    what was read is believed only if it still is.
    """

    num_blocks: Annotated[int, Meta(gt=0, lt=1 << 31)]
    strips: Annotated[tuple[DeviceStrip, ...], Meta(min_length=1, max_length=MAX_STRIPS)]
    segments: DeviceSegments
