"""What the connector's halves tell each other through vLLM, all inside one engine."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from vllm_mc2.layout import AddressPlan, PoolLayout


@dataclass(frozen=True)
class MapPeer:
    """Scheduler to workers: map the pool of your counterpart at block id ``base``."""

    incarnation: str
    base: int
    socket_ids: tuple[str, ...]
    """Socket of the peer's worker, by rank."""


@dataclass
class MC2Metadata(KVConnectorMetadata):
    """Scheduler to workers, with each step."""

    map_peers: list[MapPeer] = field(default_factory=list)
    unmap_bases: list[int] = field(default_factory=list)
    tail_copies: list[tuple[int, int]] = field(default_factory=list)
    """``(local block, global block)``: partly filled last blocks to copy before the forward pass."""
    failed_requests: list[str] = field(default_factory=list)
    """Requests to be reported as failed loads, which is how a connector ends a request."""


@dataclass(frozen=True)
class MapResult:
    """Worker to scheduler: how :class:`MapPeer` went. ``reason`` is None on success."""

    incarnation: str
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
    """None when attach is off; ``reason`` says why."""
    pool: PoolLayout | None
    """None unless the pool is shared."""
    socket_id: str | None
    """Where the worker listens; None when attach is off."""
    control_token: str = ""
    """Proves to the worker that its own scheduler speaks."""
    reason: str | None = None
