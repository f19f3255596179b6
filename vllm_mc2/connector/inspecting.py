"""Answers ``vllm-mc2 inspect`` and the front end's gauges: reports on the engine and its workers, made from what the halves
show.

Everything here runs on a session thread. It only reads, takes no lock that the scheduler waits for longer than for one lease,
and hands out no descriptor: an engine behaves the same whether it is looked at or not. What the scheduler thread owns is read
as single attributes and copied lists, so a number may be a moment old.
"""

import os
import time
from collections import Counter
from pathlib import Path
from typing import Literal

import msgspec
from vllm.v1.core.block_pool import BlockPool

from vllm_mc2.connector.backend import Backend
from vllm_mc2.connector.decode import DecodeHalf
from vllm_mc2.connector.peer import Peer, PeerState
from vllm_mc2.connector.prefill import PrefillHalf
from vllm_mc2.inspection import (
    MAX_DECODE_ROWS,
    MAX_LEASE_ROWS,
    MAX_PEER_ROWS,
    DecodeRow,
    EngineCounts,
    EngineReport,
    MappedRow,
    PeerRow,
    WindowRow,
    WorkerReport,
)
from vllm_mc2.layout import PoolLayout
from vllm_mc2.protocol import CountsHello, InspectHello, Message, Refusal, new_incarnation
from vllm_mc2.reporting import fit, lease_rows, refusal
from vllm_mc2.session import Answer, SessionServer

MAX_SLOTS = 65536
"""As many leases as there can be."""


class EngineInspector:
    """Reports on one engine: through prefill's listener, or through one of its own where there is no prefill half."""

    def __init__(
        self,
        engine_id: str,
        directory: Path,
        block_pool: BlockPool,
        block_size: int,
        off_reason: str | None,
        attach_off: str | None,
        prefill: PrefillHalf | None,
        decode: DecodeHalf | None,
    ) -> None:
        """Listens from here on.

        Raises:
            ConfigError: the socket cannot be bound.
        """
        self._engine_id = engine_id[:256]
        self._block_pool = block_pool
        self._block_size = block_size
        self._off_reason = (off_reason or "")[:1024]
        self._attach_off = (attach_off or "")[:1024]
        self._prefill = prefill
        self._decode = decode
        self._role: Literal["prefill", "decode", "both"] = "prefill" if decode is None else "decode"
        self._started = time.monotonic()
        self._server: SessionServer | None = None
        if prefill is not None:
            self._role = self._role if decode is None else "both"
            self._incarnation = prefill.incarnation
            prefill.on_inspect = self.answer
        else:
            self._incarnation = new_incarnation()
            self._server = SessionServer(directory, self._incarnation, self._on_hello, lambda key: None)

    @property
    def socket_id(self) -> str:
        """Where questions are answered."""
        return self._incarnation

    @property
    def num_rejected(self) -> int:
        """Connections that its own listener turned away so far; prefill counts for itself. Any thread."""
        return self._server.num_rejected if self._server is not None else 0

    def _on_hello(self, key: int, hello: Message) -> Answer:
        if isinstance(hello, InspectHello | CountsHello):
            return self.answer(hello)
        return Answer(Refusal("message", type(hello).__name__, "InspectHello"), keep_open=False)

    def answer(self, hello: InspectHello | CountsHello) -> Answer:
        """The report or the numbers, or a refusal of another protocol version. Session thread."""
        refused = refusal(hello)
        if refused is not None:
            return refused
        return Answer(fit(self.report()) if isinstance(hello, InspectHello) else self.counts(), keep_open=False)

    def counts(self) -> EngineCounts:
        """What the engine holds now. Session thread."""
        counts: dict[str, int] = {}
        if self._prefill is not None:
            counts |= _count_leases(self._prefill)
        if self._decode is not None:
            counts |= _count_peers(self._decode)
        return EngineCounts(incarnation=self._incarnation, num_blocks=len(self._block_pool.blocks) - 1, **counts)

    def report(self) -> EngineReport:
        """What the engine looks like now. Session thread."""
        report = EngineReport(
            role=self._role,
            engine_id=self._engine_id,
            incarnation=self._incarnation,
            pid=os.getpid(),
            uptime_seconds=time.monotonic() - self._started,
            off_reason=self._off_reason,
            attach_off=self._attach_off,
            block_size=self._block_size,
            num_blocks=len(self._block_pool.blocks),
            free_blocks=self._block_pool.get_num_free_blocks(),
        )
        if self._prefill is not None:
            report = _with_leases(report, self._prefill)
        if self._decode is not None:
            report = _with_peers(report, self._decode)
        return report

    def close(self) -> None:
        """Stop listening; idempotent."""
        if self._server is not None:
            self._server.close()


def _with_leases(report: EngineReport, prefill: PrefillHalf) -> EngineReport:
    num_leases, views = prefill.book.view(MAX_LEASE_ROWS)
    decodes = prefill.decodes()
    return msgspec.structs.replace(
        report,
        listens_at=str(prefill.address) if prefill.address is not None else "",
        lent_blocks=prefill.num_lent_blocks,
        num_leases=num_leases,
        leases=lease_rows(views, decodes),
        num_decodes=len(decodes),
        decodes=[DecodeRow(pid, engine_id) for pid, engine_id in list(decodes.values())[:MAX_DECODE_ROWS]],
    )


def _count_leases(prefill: PrefillHalf) -> dict[str, int]:
    _, views = prefill.book.view(MAX_SLOTS)
    ended = [(view.slot, view.generation) for view in views if view.state not in {"offered", "held"}]
    return {
        "offered_leases": sum(view.state == "offered" for view in views),
        "held_leases": sum(view.state == "held" for view in views),
        "lent_blocks": prefill.num_lent_without(ended) if len(ended) < len(views) else 0,
        "decodes": len(prefill.decodes()),
    }


def _count_peers(decode: DecodeHalf) -> dict[str, int]:
    counts = Counter({name: decode.snapshot()[name] for name in ("loans", "borrowed_blocks", "handoffs")})
    for peer in decode.peers or ():
        session = peer.session
        is_gone = peer.state is PeerState.READY and session is not None and session.looks_gone()
        counts["gone_peers" if is_gone else f"{peer.state.value}_peers"] += 1
        if is_gone:
            counts["dead_peer_bytes"] += peer.pool_bytes
    return dict(counts)


def _with_peers(report: EngineReport, decode: DecodeHalf) -> EngineReport:
    numbers = decode.snapshot()
    report = msgspec.structs.replace(
        report,
        borrowed_blocks=numbers["borrowed_blocks"],
        loans=numbers["loans"],
        handoffs=numbers["handoffs"],
    )
    if decode.peers is None:
        return report
    peers = list(decode.peers)
    base, num_blocks, num_free = decode.peers.window
    return msgspec.structs.replace(
        report,
        window=WindowRow(base, num_blocks, num_free),
        num_peers=len(peers),
        peers=[_peer_row(peer) for peer in peers[:MAX_PEER_ROWS]],
    )


def _peer_row(peer: Peer) -> PeerRow:
    state, session = peer.state, peer.session
    return PeerRow(
        engine_id=peer.engine_id,
        incarnation=peer.incarnation,
        pid=session.peer_pid if session is not None else 0,
        state=state.value,
        reason=peer.reason[:1024],
        way=peer.way,
        way_reason=peer.way_reason,
        base=peer.base,
        num_blocks=peer.num_blocks,
        loans=max(0, peer.num_loans),
        # The session of a failed peer is closed, which says nothing about the peer.
        is_gone=state is not PeerState.FAILED and session is not None and session.looks_gone(),
        address=str(peer.address) if peer.address is not None else "",
    )


def answer_for_worker(
    hello: InspectHello,
    engine_id: str,
    rank: int,
    backend: Backend,
    elsewhere: list[tuple[int, PoolLayout]],
) -> Answer:
    """A worker's report, or a refusal of another protocol version. Session thread.

    ``elsewhere``: pools that are mapped only to be copied from.
    """
    assert backend.plan is not None
    layout = backend.plan.pool_layout()
    pools = [*(backend.memory.mapped_peers() if backend.memory is not None else ()), *elsewhere]
    mapped = [MappedRow(base, pool.num_blocks, pool.num_blocks * pool.bytes_per_block) for base, pool in pools]
    report = WorkerReport(
        engine_id=engine_id[:256],
        rank=rank,
        pid=os.getpid(),
        parent_pid=os.getppid(),
        pool_bytes=layout.pool_bytes,
        num_blocks=layout.num_blocks,
        bytes_per_block=layout.bytes_per_block,
        pages=backend.summary(),
        mapped=mapped[:MAX_PEER_ROWS],
    )
    return refusal(hello) or Answer(report, keep_open=False)
