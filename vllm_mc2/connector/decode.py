"""Decode's scheduler half: from a ticket to blocks in the prefix cache, and back.

A request that comes with a ticket is a :class:`Handoff`::

    WAITING --peer ready, lease claimed, prompt verified--> ATTACHED --request ends--> (gone)
       |  \\--the same, but in place is impossible or unwise--> CLAIMED --allocated--> PULLING --copied--> PULLED
       \\------------------- any reason -----------------> REJECTED

While it waits, vLLM is told to ask again (``(None, False)``). Once attached, the full blocks are prefix-cache hits, and the
partly filled last block is reported as external tokens that are copied just before the forward pass, so that decode computes
exactly one prompt token. A pulled request waits in vLLM's own state for remote KV while the workers copy, and its lease
is released as soon as they have. Rejected means that the prompt is computed here or the request is failed, as
``kv_load_failure_policy`` says. Scheduler thread only.
"""

import logging
import time
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks

from vllm_mc2.connector import compat
from vllm_mc2.connector.borrowed import BorrowedBlocks, Loan
from vllm_mc2.connector.handoff import Handoff, HandoffState
from vllm_mc2.connector.loans import Loans, Refusal
from vllm_mc2.connector.metadata import MC2Metadata, MC2WorkerMetadata, PullOrder
from vllm_mc2.connector.metrics import MC2Stats
from vllm_mc2.connector.peer import Peer, PeerState
from vllm_mc2.connector.peers import PeerTable
from vllm_mc2.errors import PeerUnreachableError, TicketError
from vllm_mc2.protocol import Ticket
from vllm_mc2.ticket import parse_address, parse_ticket

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
        windows: tuple[int | None, ...],
        bytes_per_block: int,
        *,
        off_reason: str | None,
        allows_pull: bool,
        fails_on_error: bool,
        stats: MC2Stats,
    ) -> None:
        """``peers`` is None when nothing can be handed over, for ``off_reason``. ``bytes_per_block``: over all layers and ranks.
        ``windows``: of each cache group.
        """
        self._peers = peers
        self._block_size = block_size
        self._bytes_per_block = bytes_per_block
        self._off_reason = off_reason
        self._allows_pull = allows_pull
        self._fails_on_error = fails_on_error
        self._stats = stats
        self._handoffs: dict[str, Handoff] = {}
        self._loans = Loans(peers, block_size, windows, self._end_loan)
        self._borrowed = BorrowedBlocks(block_pool, block_size, self._loans.release)
        self._tail_copies: list[tuple[int, int]] = []
        self._failing: dict[str, list[int]] = {}
        self._pulls: list[PullOrder] = []
        self._ended_pulling: dict[str, Handoff] = {}
        """Requests that have ended while their blocks were being copied: the lease lasts until that is over."""
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
            handoff.address = parse_address(params)
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
        if handoff.state is HandoffState.PULLED:
            return 0, False  # preempted since: what is not cached any more is computed here
        if handoff.state is not HandoffState.ATTACHED:
            return self._tokens_to_pull(handoff, num_local)
        if num_local < handoff.num_full * self._block_size:
            return self._restore(handoff)
        return max(0, handoff.num_usable - num_local), False

    def update_state_after_alloc(self, request: "Request", blocks: KVCacheBlocks, num_external: int) -> None:
        """Blocks are allocated; a tail needs its source and its place, a request to be failed is reported."""
        handoff = self._handoffs.get(request.request_id)
        if handoff is None:
            return
        if handoff.state is HandoffState.REJECTED:
            if num_external and not handoff.is_failed:
                handoff.is_failed = True
                self._failing[request.request_id] = [blocks.blocks[0][-1].block_id]
                self._count(handoff)
            return
        if handoff.state is HandoffState.CLAIMED:
            if num_external:
                self._pull(handoff, blocks, num_external)
            else:
                self._loans.leave(handoff)
                self._reject(handoff, "another_connector", "the tokens come from another connector of a MultiConnector")
                self._count(handoff)
            return
        if handoff.state is not HandoffState.ATTACHED:
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
        meta.map_peers, meta.unmap_keys = self._peers.take_orders()
        meta.pulls, self._pulls = self._pulls, []
        meta.tail_copies, self._tail_copies = self._tail_copies, []
        meta.failed_requests, self._failing = self._failing, {}

    def on_worker_meta(self, worker_meta: MC2WorkerMetadata) -> None:
        """Workers have mapped peers: attach whoever waited for that, before the next lookup."""
        if self._peers is not None:
            self._peers.on_map_results(worker_meta.results)
            self._advance_all()

    def on_loaded(self, request_id: str, is_failed: bool, invalid_ids: AbstractSet[int]) -> None:
        """Every worker has copied the request's blocks, or one could not: the lease is not needed any more.

        ``invalid_ids``: blocks that could not be written, from a vLLM that does not name requests.
        """
        has_ended = request_id in self._ended_pulling
        handoff = self._ended_pulling.pop(request_id, None) or self._handoffs.get(request_id)
        if handoff is None or handoff.state is not HandoffState.PULLING:
            return  # a request that was to fail is reported here too
        handoff.pull_seconds = time.perf_counter() - handoff.pull_started
        if is_failed or not invalid_ids.isdisjoint(handoff.own_ids):
            handoff.own_ids = []
            self._reject(handoff, "pull_failed", "its blocks could not be copied", is_told=True)
            if self._fails(handoff):
                self._count(handoff)
            elif has_ended:
                self._count_unfinished(handoff)
        else:
            handoff.state = HandoffState.PULLED
            self._count(handoff)
        self._loans.leave(handoff)

    def request_finished(self, request: "Request") -> dict[str, object] | None:
        """The request has ended, in whatever way; its blocks are freed right after this."""
        handoff = self._handoffs.pop(request.request_id, None)
        if handoff is None:
            return None
        if handoff.state is HandoffState.WAITING and not self._loans.decline(handoff):
            self._declined.append(handoff)
        if handoff.state is HandoffState.PULLING:
            self._ended_pulling[request.request_id] = handoff
        else:
            self._count_unfinished(handoff)
            self._loans.leave(handoff)
        return handoff.report(self._bytes_per_block, fails=self._fails(handoff))

    def close(self) -> None:
        """End all sessions; prefills then count every claim of ours as released."""
        if self._peers is not None:
            self._peers.close()

    def _end_loan(self, loan: Loan) -> None:
        self._borrowed.end(loan)

    # --- one hand-off ---

    def _advance_all(self) -> None:
        assert self._peers is not None
        for handoff in list(self._handoffs.values()):
            if handoff.state is HandoffState.WAITING:
                self._advance(handoff)
        self._declined = [handoff for handoff in self._declined if not self._loans.decline(handoff)]
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
            peer = peers.get(ticket, handoff.address)
        except PeerUnreachableError as error:
            self._reject(handoff, "peer_unreachable", str(error))
            return
        if peer.state is PeerState.FAILED:
            self._reject(handoff, peer.reason, f"prefill {peer.engine_id or peer.incarnation}", is_told=True)
        elif peer.is_gone():
            # Its memory is still mapped here and would even be right, but nobody keeps the promise any more.
            self._reject(handoff, "peer_gone", f"prefill {peer.engine_id} ended before its ticket was claimed")
        elif peer.state is PeerState.READY:
            self._take(handoff, ticket, peer)
            handoff.handoff_seconds = time.perf_counter() - started

    def _take(self, handoff: Handoff, ticket: Ticket, peer: Peer) -> None:
        """Claim the lease, and use its blocks in one way or the other."""
        outcome = self._loans.claim(handoff, ticket, peer)
        if outcome is None:
            return
        if isinstance(outcome, Refusal):
            self._reject(handoff, outcome.reason, outcome.detail)
            return
        loan, is_copy_wanted = outcome
        loan.users.add(handoff.request.request_id)
        handoff.loan = loan
        if not self._loans.covers(loan, handoff.num_usable):
            self._loans.leave(handoff)
            self._reject(
                handoff, "window_passed", "prefill has given up blocks that the next token's window begins with"
            )
            return
        if peer.way == "pull" or (is_copy_wanted and self._allows_pull):
            handoff.state = HandoffState.CLAIMED
            handoff.reason = peer.way_reason or "prefill_asks"
            return
        num_full = handoff.num_usable // self._block_size
        if not self._borrowed.attach(loan, handoff.request.block_hashes[:num_full]):
            self._loans.leave(handoff)
            self._reject(handoff, "block_conflict", "a block of the lease stands for another prefix already")
            return
        handoff.num_full = num_full
        handoff.state = HandoffState.ATTACHED

    def _restore(self, handoff: Handoff) -> tuple[int | None, bool]:
        """Some block left the prefix cache since attach (a local one was evicted, or the cache was reset): put it back."""
        assert handoff.loan is not None
        handoff.num_lookups += 1
        hashes = handoff.request.block_hashes[: handoff.num_full]
        if handoff.num_lookups > MAX_LOOKUPS or not self._borrowed.attach(handoff.loan, hashes):
            self._loans.leave(handoff)
            self._reject(handoff, "lookup_failed", "attached blocks are not found in the prefix cache")
            return self._rejected_tokens(handoff)
        return None, False

    def _tokens_to_pull(self, handoff: Handoff, num_local: int) -> tuple[int, bool]:
        """What decode does not have yet."""
        missing = handoff.num_usable - num_local
        if missing > 0:
            return missing, True
        handoff.state = HandoffState.PULLED
        self._count(handoff)
        self._loans.leave(handoff)
        return 0, False

    def _pull(self, handoff: Handoff, blocks: KVCacheBlocks, num_external: int) -> None:
        """The request has its blocks, which nobody computes: let the workers fill them."""
        loan = handoff.loan
        assert loan is not None
        end = handoff.num_usable
        first, last = (end - num_external) // self._block_size, -(-end // self._block_size)
        peer = self._loans.lender(loan)
        own_ids, peer_ids = [], []
        num_blocks = -(-loan.num_tokens // self._block_size)
        for group, table in enumerate(blocks.blocks):
            lent = loan.block_ids[group * num_blocks : (group + 1) * num_blocks]
            for block, lent_id in zip(table[first:last], lent[first:last], strict=True):
                # No block on either side: its tokens are out of the window already.
                if block.block_id and lent_id:
                    own_ids.append(block.block_id)
                    peer_ids.append(lent_id - peer.first_id)
        ticket = None if peer.address is None else handoff.ticket
        self._pulls.append(PullOrder(handoff.request.request_id, peer.key, own_ids, peer_ids, ticket))
        handoff.state = HandoffState.PULLING
        handoff.own_ids = own_ids
        handoff.pull_started = time.perf_counter()

    def _rejected_tokens(self, handoff: Handoff) -> tuple[int, bool]:
        """Policy ``fail``: pretend to load one token, whose failure is then reported, as vLLM has no other way to
        fail a request. Policy ``recompute``: nothing comes from outside.
        """
        if self._fails(handoff):
            return 1, True
        self._count(handoff)
        return 0, False

    def _fails(self, handoff: Handoff) -> bool:
        """Whether a rejected hand-off ends its request. Not one that asks for every prompt token to be computed, and gets that;
        nor one that somebody else serves.
        """
        return self._fails_on_error and handoff.reason not in {"skips_prefix_cache", "another_connector"}

    def _reject(self, handoff: Handoff, reason: str, detail: str, *, is_told: bool = False) -> None:
        """``is_told``: a warning with the cause has been given already."""
        handoff.state = HandoffState.REJECTED
        handoff.reason = reason
        fails = self._fails(handoff)
        outcome = "failed" if fails else "computed here"
        if reason not in self._seen_reasons:
            self._seen_reasons.add(reason)
            logger.log(
                logging.INFO if is_told else logging.WARNING,
                "request %s is %s: %s (%s); further ones are only counted in vllm:mc2_handoffs",
                handoff.request.request_id, outcome, reason, detail,
            )  # fmt: skip
        else:
            logger.debug("request %s is %s: %s (%s)", handoff.request.request_id, outcome, reason, detail)

    def _count(self, handoff: Handoff) -> None:
        """Once per request, although preemption allocates again."""
        if handoff.is_counted:
            return
        handoff.is_counted = True
        if handoff.state is HandoffState.PULLED:
            self._stats.add("handoffs", 1, "pull", handoff.reason)
            self._stats.add("kv_bytes_copied", len(handoff.own_ids) * self._bytes_per_block)
            self._stats.observe("handoff_seconds", handoff.handoff_seconds)
            if handoff.pull_started:  # else it had all of them itself
                self._stats.observe("pull_seconds", handoff.pull_seconds)
        elif handoff.state is HandoffState.ATTACHED:
            self._stats.add("handoffs", 1, "attach", "")
            self._stats.add("blocks_attached", handoff.num_full)
            self._stats.add("kv_bytes_not_copied", handoff.num_full * self._bytes_per_block)
            self._stats.observe("handoff_seconds", handoff.handoff_seconds)
        else:
            self._stats.add("handoffs", 1, "failed" if self._fails(handoff) else "recompute", handoff.reason)

    def _count_unfinished(self, handoff: Handoff) -> None:
        """Its request has ended, and it comes to nothing any more; no-op if it has come to something before."""
        if not handoff.is_counted:
            handoff.is_counted = True
            self._stats.add("handoffs", 1, "unfinished", handoff.state.value)

    def has_pending_work(self) -> bool:
        """Whether the engine must go on stepping although it has no request: at most until the handshake times out."""
        return bool(self._declined or self._ended_pulling) or (self._peers is not None and self._peers.is_settling)

    @property
    def peers(self) -> PeerTable | None:
        """For onlookers; None when attach is off."""
        return self._peers

    def snapshot(self) -> dict[str, Any]:
        """Numbers for tests and ``inspect``: everything is 0 when nothing is borrowed."""
        return {
            "handoffs": len(self._handoffs),
            "loans": len(self._loans),
            "borrowed_blocks": len(self._borrowed),
        }
