"""What the connector's halves tell each other through vLLM, all inside one engine."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from vllm_mc2.device_messages import DeviceGrant
from vllm_mc2.layout import AddressPlan, PoolLayout
from vllm_mc2.protocol import RemoteGrant, Ticket
from vllm_mc2.ticket import TcpAddress


@dataclass(frozen=True)
class MapPeer:
    """Scheduler to workers: map the pool of your counterpart, in the window or elsewhere."""

    incarnation: str
    key: int
    """What this engine calls the peer in later orders."""
    base: int | None
    """Block id in the window, to use it in place; None to copy from it only."""
    socket_ids: tuple[str, ...]
    """Socket of the peer's worker, by rank."""
    address: TcpAddress | None = None
    """Of a peer on another host, whose sockets cannot be reached."""


@dataclass(frozen=True)
class PullOrder:
    """Scheduler to workers: copy a request's blocks, and report the request when they are there."""

    request_id: str
    key: int
    """Of the peer."""
    own_ids: list[int]
    peer_ids: list[int]
    """Counted in the peer's pool; as many."""
    ticket: Ticket | None = None
    """For a peer on another host: what to ask about once the bytes are here."""


@dataclass
class MC2Metadata(KVConnectorMetadata):
    """Scheduler to workers, with each step."""

    map_peers: list[MapPeer] = field(default_factory=list)
    unmap_keys: list[int] = field(default_factory=list)
    pulls: list[PullOrder] = field(default_factory=list)
    tail_copies: list[tuple[int, int]] = field(default_factory=list)
    """``(local block, global block)``: partly filled last blocks to copy before the forward pass."""
    failed_requests: dict[str, list[int]] = field(default_factory=dict)
    """Requests to be reported as failed loads, which is how a connector ends a request, with the block that was to be loaded."""


@dataclass(frozen=True)
class MapResult:
    """Worker to scheduler: how :class:`MapPeer` went, or why nothing can be read from the peer any more. ``reason`` is None on
    success.
    """

    incarnation: str
    key: int
    rank: int
    reason: str | None = None
    detail: str = ""


@dataclass
class MC2WorkerMetadata(KVConnectorWorkerMetadata):
    """Workers to scheduler, when there is something to say."""

    results: list[MapResult] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "MC2WorkerMetadata":
        """Both workers' results; vLLM merges those of all ranks this way."""
        assert isinstance(other, MC2WorkerMetadata)
        return MC2WorkerMetadata([*self.results, *other.results])


@dataclass
class MC2Handshake(KVConnectorHandshakeMetadata):
    """Worker to scheduler, once at start: what this worker has."""

    rank: int
    plan: AddressPlan | None
    """None when nothing can be handed over; ``reason`` says why."""
    pool: PoolLayout | None
    """None unless the pool is shared."""
    socket_id: str | None
    """Where the worker listens; None when nothing can be handed over."""
    fingerprint: dict[str, str] = field(default_factory=dict)
    remote: RemoteGrant | DeviceGrant | None = None
    """Where other hosts can read the pool, if they can."""
    control_token: str = ""
    """Proves to the worker that its own scheduler speaks."""
    reason: str | None = None
    attach_off: str | None = None
    """Why there is no window here, although blocks can be copied into this worker's cache."""
