"""What an engine tells an onlooker: the reports of ``vllm-mc2 inspect``, and the numbers behind the gauges of ``/metrics``.

Plain data that travels in one frame each. A report is a snapshot made on the session thread while the scheduler goes on, so
two of its numbers may be of moments that lie microseconds apart. Durations are in seconds, never clock readings; sizes are in
bytes where the name says so and in blocks otherwise. No vllm, no torch, no native code.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MAX_LEASE_ROWS = 1000
"""The oldest ones; a report says how many there are."""

MAX_HOLDER_ROWS = 64
"""Per lease."""

MAX_PEER_ROWS = 1024
MAX_DECODE_ROWS = 1024

Name = Annotated[str, Meta(max_length=256)]
Reason = Annotated[str, Meta(max_length=1024)]
Hex = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
LeaseName = Annotated[str, Meta(pattern=r"^[0-9a-f]{8}-[0-9a-f]{8}\Z")]
Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0.0)]


class HolderRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A living decode that has claimed a lease."""

    pid: Count
    """0 when it is in another PID namespace, or on another host."""
    engine_id: Name
    claims: Count
    """Not released yet; 0 when it has given back all of them."""


class LeaseRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A lease whose blocks prefill keeps."""

    ticket: LeaseName
    """``slot-generation``, as in ``remote_request_id`` of prefill's response."""
    state: Literal["offered", "held", "released", "expired", "peer_gone"]
    """The last three are over: prefill takes the blocks back in its next step."""
    age_seconds: Seconds
    num_tokens: Count
    num_blocks: Count
    references: Count
    """1 by prefill, and 1 for each claim that is not released."""
    claims: Count
    releases: Count
    """Those of decodes that have died included."""
    holders: Annotated[list[HolderRow], Meta(max_length=MAX_HOLDER_ROWS)]


class DecodeRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A decode that has a session with this prefill."""

    pid: Count
    engine_id: Name


class PeerRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prefill that this decode knows."""

    engine_id: Name
    """Empty until it has answered."""
    incarnation: Hex
    pid: Count
    state: Literal["connecting", "mapping", "ready", "failed"]
    reason: Reason
    """Why it failed, or empty."""
    way: Literal["attach", "pull"]
    """Whether its blocks are used in place or copied."""
    way_reason: Reason
    """Why they are copied, or empty."""
    base: int
    """Block id where its pool begins in the window; -1 when it is not there."""
    num_blocks: Count
    loans: Count
    """Leases of it that are held here."""
    is_gone: bool
    """Its process has ended; what is held stays valid until it is released. On another host: it is not heard of any more."""
    address: Name = ""
    """Where it listens, if it is on another host."""


class WindowRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The block ids that are kept for peers' pools."""

    base: Count
    num_blocks: Count
    free_blocks: Count


class EngineReport(msgspec.Struct, frozen=True, tag="engine_report", forbid_unknown_fields=True):
    """One engine, as its scheduler's process sees it. Decode's fields are 0 or empty on prefill, and the other way round."""

    role: Literal["prefill", "decode", "both"]
    engine_id: Name
    incarnation: Hex
    """Of prefill: the one in its tickets. Of decode: the name of its socket only."""
    pid: Count
    uptime_seconds: Seconds
    off_reason: Reason
    """Why nothing can be handed over, or empty."""
    block_size: Count
    """Tokens."""
    num_blocks: Count
    """Of the engine's own pool."""
    free_blocks: Count
    """As vLLM counts: neither in use nor lent; cached ones are free."""
    attach_off: Reason = ""
    """Decode: why blocks are copied whoever the peer is, or empty."""
    listens_at: Name = ""
    """Prefill: its address for decodes on other hosts, or empty."""
    lent_blocks: Count = 0
    """Blocks under leases; one under several counts once."""
    num_leases: Count = 0
    leases: Annotated[list[LeaseRow], Meta(max_length=MAX_LEASE_ROWS)] = []
    """The oldest ``MAX_LEASE_ROWS`` at most, oldest first; fewer where a frame does not take them."""
    num_decodes: Count = 0
    decodes: Annotated[list[DecodeRow], Meta(max_length=MAX_DECODE_ROWS)] = []
    window: WindowRow | None = None
    num_peers: Count = 0
    peers: Annotated[list[PeerRow], Meta(max_length=MAX_PEER_ROWS)] = []
    borrowed_blocks: Count = 0
    """In the prefix cache here, but in a peer's memory."""
    loans: Count = 0
    """Leases held here; one serves all requests that came with its ticket."""
    handoffs: Count = 0
    """Requests here that came with a ticket and have not ended."""


class EngineCounts(msgspec.Struct, frozen=True, tag="engine_counts", forbid_unknown_fields=True, kw_only=True):
    """The same engine in a few numbers, for who asks often. What is over does not count, also while it waits for the engine's
    next step: so all is 0 once nothing is handed over any more, but for decodes and living peers.
    """

    incarnation: Hex
    num_blocks: Count
    """Of the engine's own pool, without the null block."""
    offered_leases: Count = 0
    held_leases: Count = 0
    lent_blocks: Count = 0
    """Blocks under these leases; one under several counts once."""
    decodes: Count = 0
    connecting_peers: Count = 0
    mapping_peers: Count = 0
    ready_peers: Count = 0
    gone_peers: Count = 0
    """Ready once, and ended since: what is held of them stays valid."""
    failed_peers: Count = 0
    dead_peer_bytes: Count = 0
    """Pools of the gone ones that are still mapped here, each counted once, however many ranks map it."""
    loans: Count = 0
    borrowed_blocks: Count = 0
    handoffs: Count = 0


class MappedRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A peer's pool as it is mapped in a decode's worker."""

    base: int
    """Block id; -1 when it is mapped only to be copied from."""
    num_blocks: Count
    num_bytes: Count


class WorkerReport(msgspec.Struct, frozen=True, tag="worker_report", forbid_unknown_fields=True):
    """One worker and its memory."""

    engine_id: Name
    rank: Count
    pid: Count
    parent_pid: Count
    """The engine's, unless the worker runs inside the engine's own process."""
    pool_bytes: Count
    num_blocks: Count
    bytes_per_block: Count
    """Over all layers of this rank."""
    pages: Name
    """Which pages the pool got; ``private`` when no peer can map it. Of an NPU: which one, and how it is shared."""
    mapped: Annotated[list[MappedRow], Meta(max_length=MAX_PEER_ROWS)]
