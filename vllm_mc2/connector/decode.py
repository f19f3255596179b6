"""Decode's scheduler half: from a ticket to blocks in the prefix cache, and back.

A request that comes with a ticket is a :class:`Handoff`::

    WAITING --peer ready, lease claimed, prompt verified--> ATTACHED --request ends--> (gone)
       \\------------------- any reason -----------------> REJECTED

While it waits, vLLM is told to ask again (``(None, False)``). Once attached, the full blocks are prefix-cache hits, and the
partly filled last block is reported as external tokens that are copied just before the forward pass, so that decode computes
exactly one prompt token. Rejected means that the prompt is computed here or the request is failed, as
``kv_load_failure_policy`` says. Scheduler thread only.
"""

import logging
import time
from typing import TYPE_CHECKING, Any, Literal

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks

from vllm_mc2.connector import compat
from vllm_mc2.connector.borrowed import BorrowedBlocks, Loan
from vllm_mc2.connector.handoff import Handoff, HandoffState
from vllm_mc2.connector.metadata import MC2Metadata, MC2WorkerMetadata
from vllm_mc2.connector.metrics import MC2Stats
from vllm_mc2.connector.peers import Peer, PeerState, PeerTable
from vllm_mc2.errors import PeerUnreachableError, TicketError
from vllm_mc2.leases import LeaseId, LeaseOffer, PeerLeases
from vllm_mc2.protocol import Ticket, parse_ticket

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.mc2.decode")

MAX_LOOKUPS = 8
"""How often blocks are put back that left the prefix cache between attach and lookup, before the request is computed here."""


class DecodeHalf:
    """Hand-offs, loans and peers of one engine."""

    def __init__(
        self,
        peers: PeerTable | None,
        block_pool: BlockPool,
        block_size: int,
        bytes_per_block: int,
        *,
        off_reason: str | None,
        fails_on_error: bool,
        stats: MC2Stats,
    ) -> None:
        """``peers`` is None when attach is off, for ``off_reason``. ``bytes_per_block``: over all layers and ranks."""
        self._peers = peers
        self._block_size = block_size
        self._bytes_per_block = bytes_per_block
        self._off_reason = off_reason
        self._fails_on_error = fails_on_error
        self._stats = stats
        self._handoffs: dict[str, Handoff] = {}
        self._loans: dict[tuple[str, LeaseId], Loan] = {}
        self._lenders: dict[Loan, Peer] = {}
        self._borrowed = BorrowedBlocks(block_pool, block_size, self._release)
        self._tail_copies: list[tuple[int, int]] = []
        self._failing: list[str] = []
        self._declined: list[Handoff] = []
        """Of requests that have ended, while their lease could not be given back yet."""
        self._seen_reasons: set[str] = set()

    # --- hooks, in the order of a request's life ---

    def on_new_request(self, request: "Request") -> None:
        """A request has arrived; attach at once when its peer is mapped already."""
        params = compat.transfer_params(request)
        if not params.get("do_remote_prefill"):
            return
        handoff = Handoff(request, None)
        self._handoffs[request.request_id] = handoff
        try:
            handoff.ticket = parse_ticket(params)
        except TicketError as error:
            self._reject(handoff, "bad_ticket", str(error))
            return
        if self._peers is None or self._off_reason is not None:
            self._reject(handoff, "attach_off", self._off_reason or "no peers")
        elif request.skip_reading_prefix_cache:
            self._reject(handoff, "skips_prefix_cache", "prompt logprobs need every prompt token computed")
        else:
            self._advance(handoff)

    def num_matched_tokens(self, request: "Request", num_local: int) -> tuple[int | None, bool]:
        """``get_num_new_matched_tokens``: ``num_local`` tokens are prefix-cache hits, borrowed blocks among them."""
        handoff = self._handoffs.get(request.request_id)
        if handoff is None:
            return 0, False
        if handoff.state is HandoffState.WAITING:
            # Even if it is attached then: this step's lookup was before it, so let the scheduler look again.
            if self._advance(handoff) is not HandoffState.REJECTED:
                return None, False
        if handoff.state is HandoffState.REJECTED:
            return self._rejected_tokens(handoff)
        if num_local < handoff.num_full * self._block_size:
            return self._restore(handoff)
        assert handoff.loan is not None
        usable = min(handoff.loan.num_tokens, request.num_tokens - 1)
        return max(0, usable - num_local), False

    def update_state_after_alloc(self, request: "Request", blocks: KVCacheBlocks, num_external: int) -> None:
        """Blocks are allocated; a tail needs its source and its place, a request to be failed is reported."""
        handoff = self._handoffs.get(request.request_id)
        if handoff is None:
            return
        if handoff.state is HandoffState.REJECTED:
            if num_external and not handoff.is_failed:
                handoff.is_failed = True
                self._failing.append(request.request_id)
            return
        if num_external:
            assert handoff.loan is not None
            handoff.num_tail = num_external
            destination = blocks.blocks[0][handoff.num_full].block_id
            self._tail_copies.append((destination, handoff.loan.block_ids[handoff.num_full]))
        self._count(handoff)

    def build_meta(self, meta: MC2Metadata) -> None:
        """Orders for the workers, with each step."""
        if self._peers is None:
            return
        self._peers.poll()
        self._advance_all()
        meta.map_peers, meta.unmap_bases = self._peers.take_orders()
        meta.tail_copies, self._tail_copies = self._tail_copies, []
        meta.failed_requests, self._failing = self._failing, []

    def on_worker_meta(self, worker_meta: MC2WorkerMetadata) -> None:
        """Workers have mapped peers: attach whoever waited for that, before the next lookup."""
        if self._peers is not None:
            self._peers.on_map_results(worker_meta.results)
            self._advance_all()

    def request_finished(self, request: "Request") -> dict[str, object] | None:
        """The request has ended, in whatever way; its blocks are freed right after this."""
        handoff = self._handoffs.pop(request.request_id, None)
        if handoff is None:
            return None
        if handoff.state is HandoffState.WAITING and not self._decline(handoff):
            self._declined.append(handoff)
        if handoff.loan is not None:
            self._leave(handoff.loan, request.request_id)
        return handoff.report(self._bytes_per_block, fails=self._fails(handoff))

    def close(self) -> None:
        """End all sessions; prefills then count every claim of ours as released."""
        if self._peers is not None:
            self._peers.close()

    # --- one hand-off ---

    def _advance_all(self) -> None:
        assert self._peers is not None
        for handoff in list(self._handoffs.values()):
            if handoff.state is HandoffState.WAITING:
                self._advance(handoff)
        self._declined = [handoff for handoff in self._declined if not self._decline(handoff)]
        self._peers.forget_failed()

    def _advance(self, handoff: Handoff) -> HandoffState:
        """Take a waiting hand-off as far as it goes without waiting; returns where it is then."""
        assert self._peers is not None and handoff.ticket is not None
        with self._peers.lock:
            self._advance_locked(handoff, handoff.ticket, self._peers)
        return handoff.state

    def _advance_locked(self, handoff: Handoff, ticket: Ticket, peers: PeerTable) -> None:
        started = time.perf_counter()
        try:
            peer = peers.get(ticket.incarnation)
        except PeerUnreachableError as error:
            self._reject(handoff, "peer_unreachable", str(error))
            return
        if peer.state is PeerState.FAILED:
            self._reject(handoff, peer.reason, f"prefill {peer.engine_id or peer.incarnation}")
        elif peer.is_gone():
            # Its memory is still mapped here and would even be right, but nobody keeps the promise any more.
            self._reject(handoff, "peer_gone", f"prefill {peer.engine_id} ended before its ticket was claimed")
        elif peer.state is PeerState.READY:
            self._attach(handoff, ticket, peer)
            handoff.handoff_seconds = time.perf_counter() - started

    def _attach(self, handoff: Handoff, ticket: Ticket, peer: Peer) -> None:
        assert peer.leases is not None
        offer = peer.leases.look_up(ticket)
        if offer is None:
            if handoff.is_verdict_pending:
                self._ask(
                    handoff, peer.leases, ticket.lease_id
                )  # takes the dead claim back, or its slot stays ours for ever
            self._reject(handoff, "ticket_dead", "its lease is over, or the ticket was never issued")
            return
        if not self._fits(handoff.request, ticket, offer, peer):
            self._reject(handoff, "prompt_mismatch", "the ticket was made for another prompt, adapter or cache salt")
            return
        loan = self._loans.get((peer.incarnation, ticket.lease_id))
        if loan is None or handoff.is_verdict_pending:
            loan = self._claim(handoff, ticket, offer, peer)
            if loan is None:
                return
        loan.users.add(handoff.request.request_id)
        handoff.loan = loan
        num_full = min(loan.num_tokens, handoff.request.num_tokens - 1) // self._block_size
        if not self._borrowed.attach(loan, handoff.request.block_hashes[:num_full]):
            handoff.loan = None
            self._leave(loan, handoff.request.request_id)
            self._reject(handoff, "block_conflict", "a block of the lease stands for another prefix already")
            return
        handoff.num_full = num_full
        handoff.state = HandoffState.ATTACHED

    def _fits(self, request: "Request", ticket: Ticket, offer: LeaseOffer, peer: Peer) -> bool:
        """Whether the lease covers the beginning of this very prompt."""
        num_tokens = offer.num_tokens
        if not 0 < num_tokens <= request.num_prompt_tokens:
            return False
        if offer.num_blocks != -(-num_tokens // self._block_size) or offer.num_blocks >= peer.num_blocks:
            return False
        return compat.request_digest(request, ticket.token_bytes, num_tokens) == offer.digest

    def _claim(self, handoff: Handoff, ticket: Ticket, offer: LeaseOffer, peer: Peer) -> Loan | None:
        """Claim the lease; None when it is pending or the hand-off was rejected."""
        assert peer.leases is not None
        lease_id = ticket.lease_id
        verdict = self._ask(handoff, peer.leases, lease_id)
        if verdict == "pending" and peer.is_gone():
            verdict = "dead"
        if verdict == "dead":
            self._reject(handoff, "ticket_dead", "its lease has just ended")
        if verdict != "held":
            return None
        known = self._loans.get((peer.incarnation, lease_id))
        if known is not None:
            # Another request with this ticket got its verdict first; a loan has one claim.
            peer.leases.release(lease_id)
            return known
        remote_ids = peer.leases.block_ids(lease_id)
        usable = len(remote_ids) == offer.num_blocks and all(0 < block_id < peer.num_blocks for block_id in remote_ids)
        if not usable or len(set(remote_ids)) != len(remote_ids):
            peer.leases.release(lease_id)
            self._reject(handoff, "bad_lease", "the peer's block table is not valid")
            return None
        block_ids = tuple(peer.base + block_id for block_id in remote_ids)
        loan = Loan(peer.incarnation, lease_id, offer.num_tokens, block_ids)
        self._loans[peer.incarnation, lease_id] = loan
        self._lenders[loan] = peer
        peer.num_loans += 1
        return loan

    def _restore(self, handoff: Handoff) -> tuple[int | None, bool]:
        """Some block left the prefix cache since attach (a local one was evicted, or the cache was reset): put it back."""
        assert handoff.loan is not None
        handoff.num_lookups += 1
        hashes = handoff.request.block_hashes[: handoff.num_full]
        if handoff.num_lookups > MAX_LOOKUPS or not self._borrowed.attach(handoff.loan, hashes):
            loan, handoff.loan = handoff.loan, None
            self._leave(loan, handoff.request.request_id)
            self._reject(handoff, "lookup_failed", "attached blocks are not found in the prefix cache")
            return self._rejected_tokens(handoff)
        return None, False

    def _rejected_tokens(self, handoff: Handoff) -> tuple[int, bool]:
        """Policy ``fail``: pretend to load one token, whose failure is then reported, as vLLM has no other way to
        fail a request. Policy ``recompute``: nothing comes from outside.
        """
        if self._fails(handoff):
            return 1, True
        self._count(handoff)
        return 0, False

    def _fails(self, handoff: Handoff) -> bool:
        """Whether a rejected hand-off ends its request. One that asks for every prompt token to be computed does not fail:
        computing them is what it asked for.
        """
        return self._fails_on_error and handoff.reason != "skips_prefix_cache"

    def _reject(self, handoff: Handoff, reason: str, detail: str) -> None:
        handoff.state = HandoffState.REJECTED
        handoff.reason = reason
        fails = self._fails(handoff)
        outcome = "failed" if fails else "computed here"
        if reason not in self._seen_reasons:
            self._seen_reasons.add(reason)
            logger.warning(
                "request %s is %s: %s (%s); further ones are only counted in vllm:mc2_handoffs",
                handoff.request.request_id, outcome, reason, detail,
            )  # fmt: skip
        else:
            logger.debug("request %s is %s: %s (%s)", handoff.request.request_id, outcome, reason, detail)
        if fails:
            self._count(handoff)

    def _count(self, handoff: Handoff) -> None:
        """Once per request, although preemption allocates again."""
        if handoff.is_counted:
            return
        handoff.is_counted = True
        if handoff.state is HandoffState.ATTACHED:
            self._stats.add("handoffs", 1, "attach", "")
            self._stats.add("blocks_attached", handoff.num_full)
            self._stats.add("kv_bytes_not_copied", handoff.num_full * self._bytes_per_block)
            self._stats.add("handoff_seconds", handoff.handoff_seconds)
        else:
            self._stats.add("handoffs", 1, "failed" if self._fails(handoff) else "recompute", handoff.reason)

    # --- loans ---

    def _leave(self, loan: Loan, request_id: str) -> None:
        """A user of the loan has ended."""
        loan.users.discard(request_id)
        if not loan.users and not loan.is_over:
            del self._loans[loan.incarnation, loan.lease_id]
            self._borrowed.end(loan)

    def _release(self, loan: Loan) -> None:
        """Nothing here uses the loan any more: tell prefill, by one word in the ledger."""
        assert self._peers is not None
        self._peers.give_back(self._lenders.pop(loan), loan.lease_id)

    @staticmethod
    def _ask(handoff: Handoff, leases: PeerLeases, lease_id: LeaseId) -> Literal["held", "pending", "dead"]:
        """Claim the lease, or ask for the verdict on the claim that was made before."""
        verdict = leases.poll(lease_id) if handoff.is_verdict_pending else leases.claim(lease_id)
        handoff.is_verdict_pending = verdict == "pending"
        return verdict

    def _decline(self, handoff: Handoff) -> bool:
        """End the lease of a request that ended before it was attached, instead of leaving it to the offer timeout.

        Returns:
            False when it is too early: the peer is just being connected to, or prefill has not given its verdict yet.
        """
        if self._peers is None or handoff.ticket is None:
            return True
        with self._peers.lock:
            try:
                peer = self._peers.get(handoff.ticket.incarnation)
            except PeerUnreachableError:
                return True
            if peer.state is PeerState.FAILED or peer.is_gone():
                return True
            return peer.leases is not None and self._decline_known(handoff, handoff.ticket, peer, peer.leases)

    def _decline_known(self, handoff: Handoff, ticket: Ticket, peer: Peer, leases: PeerLeases) -> bool:
        lease_id = ticket.lease_id
        if not handoff.is_verdict_pending:
            if (peer.incarnation, lease_id) in self._loans or leases.look_up(ticket) is None:
                return True
        verdict = self._ask(handoff, leases, lease_id)
        if verdict == "held":
            leases.release(lease_id)
        return verdict != "pending"

    def has_pending_work(self) -> bool:
        """Whether the engine must go on stepping although it has no request: at most until the handshake times out."""
        return bool(self._declined) or (self._peers is not None and self._peers.is_settling)

    @property
    def peers(self) -> PeerTable | None:
        """For onlookers; None when attach is off."""
        return self._peers

    def snapshot(self) -> dict[str, Any]:
        """Numbers for tests and ``inspect``: everything is 0 when nothing is borrowed."""
        return {
            "handoffs": len(self._handoffs),
            "loans": len(self._lenders),
            "borrowed_blocks": len(self._borrowed),
        }
