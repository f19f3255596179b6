"""Decode's loans: from a ticket to a claimed lease, and back.

A ticket is compared with the request before anything is written to the ledger, and a lease has one claim here, however many
requests come with its ticket. Scheduler thread, with :attr:`PeerTable.lock` held where a peer's leases are touched.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple

from vllm_mc2.connector import compat
from vllm_mc2.connector.borrowed import Loan
from vllm_mc2.connector.handoff import Handoff
from vllm_mc2.connector.peer import Peer, PeerState
from vllm_mc2.connector.peers import PeerTable
from vllm_mc2.errors import PeerUnreachableError
from vllm_mc2.leases import LeaseId, LeaseOffer, PeerLeases
from vllm_mc2.network.borrower import RemoteLeases
from vllm_mc2.protocol import Ticket

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Refusal(NamedTuple):
    """Why a ticket brings nothing."""

    reason: str
    detail: str


class Claimed(NamedTuple):
    """A loan, and whether prefill asks to copy its blocks."""

    loan: Loan
    is_copy_wanted: bool


class Loans:
    """All loans of one engine. ``end(loan)`` is called when a loan's last user has left; then it is for the callee to see to it
    that :meth:`release` is called once nothing reads the blocks.
    """

    def __init__(
        self,
        peers: PeerTable | None,
        block_size: int,
        windows: tuple[int | None, ...],
        end: Callable[[Loan], None],
    ) -> None:
        """``windows``: of each cache group."""
        self._windows = windows
        self._peers = peers
        self._block_size = block_size
        self._end = end
        self._loans: dict[tuple[str, LeaseId], Loan] = {}
        self._lenders: dict[Loan, Peer] = {}

    def __len__(self) -> int:
        return len(self._lenders)

    def lender(self, loan: Loan) -> Peer:
        """The prefill whose blocks they are."""
        return self._lenders[loan]

    def claim(self, handoff: Handoff, ticket: Ticket, peer: Peer) -> Claimed | Refusal | None:
        """The loan for a request's ticket; None while prefill is just deciding, or has not answered from afar: ask again then."""
        assert peer.leases is not None
        meet(handoff, peer)
        offer = peer.leases.look_up(ticket)
        if offer == "pending":
            return None
        if offer is None:
            if handoff.is_verdict_pending:
                # Takes the dead claim back, or its slot stays ours for ever.
                ask(handoff, peer.leases, ticket.lease_id)
            return Refusal("ticket_dead", "its lease is over, or the ticket was never issued")
        if not self._fits(handoff.request, ticket, offer, peer):
            return Refusal("prompt_mismatch", "the ticket was made for another prompt, adapter or cache salt")
        loan = self._loans.get((peer.incarnation, ticket.lease_id))
        if loan is not None and not handoff.is_verdict_pending:
            return Claimed(loan, offer.is_copy_wanted)
        verdict = ask(handoff, peer.leases, ticket.lease_id)
        if verdict == "dead" or (verdict == "pending" and peer.is_gone()):
            return Refusal("ticket_dead", "its lease has just ended")
        if verdict == "pending":
            return None
        return self._held(ticket.lease_id, offer, peer, peer.leases)

    def _fits(self, request: "Request", ticket: Ticket, offer: LeaseOffer, peer: Peer) -> bool:
        """Whether the lease covers the beginning of this very prompt."""
        num_tokens = offer.num_tokens
        if not 0 < num_tokens <= request.num_prompt_tokens:
            return False
        num_blocks = -(-num_tokens // self._block_size)
        if offer.num_blocks != len(self._windows) * num_blocks or num_blocks >= peer.num_blocks:
            return False
        return compat.request_digest(request, ticket.token_bytes, num_tokens) == offer.digest

    def _held(
        self, lease_id: LeaseId, offer: LeaseOffer, peer: Peer, leases: PeerLeases | RemoteLeases
    ) -> Claimed | Refusal:
        """The claim holds: the loan that it brings."""
        known = self._loans.get((peer.incarnation, lease_id))
        if known is not None:
            # Another request with this ticket got its verdict first; a loan has one claim.
            leases.release(lease_id)
            return Claimed(known, offer.is_copy_wanted)
        remote_ids = leases.block_ids(lease_id)
        # Where a window has passed there is no block, which the null block stands for.
        named = remote_ids if self._windows == (None,) else [block_id for block_id in remote_ids if block_id]
        usable = len(remote_ids) == offer.num_blocks and all(0 < block_id < peer.num_blocks for block_id in named)
        if not usable or len(set(named)) != len(named):
            leases.release(lease_id)
            return Refusal("bad_lease", "the peer's block table is not valid")
        loan = Loan(
            peer.incarnation, lease_id, offer.num_tokens, tuple(peer.first_id + block_id for block_id in remote_ids)
        )
        self._loans[peer.incarnation, lease_id] = loan
        self._lenders[loan] = peer
        peer.num_loans += 1
        return Claimed(loan, offer.is_copy_wanted)

    def covers(self, loan: Loan, num_tokens: int) -> bool:
        """Whether each cache group has every block that the token behind ``num_tokens`` attends to."""
        if self._windows == (None,):
            return True
        block_ids = loan.block_ids
        num_blocks = len(block_ids) // len(self._windows)
        for group, window in enumerate(self._windows):
            first = 0 if window is None else max(0, num_tokens - window + 1) // self._block_size
            last = -(-num_tokens // self._block_size)
            if not all(block_ids[group * num_blocks + first : group * num_blocks + last]):
                return False
        return True

    def leave(self, handoff: Handoff) -> None:
        """The request does not use its loan any more; no-op without one."""
        loan, handoff.loan = handoff.loan, None
        if loan is None:
            return
        loan.users.discard(handoff.request.request_id)
        if not loan.users and not loan.is_over:
            del self._loans[loan.incarnation, loan.lease_id]
            self._end(loan)

    def release(self, loan: Loan) -> None:
        """Nothing here uses the loan any more: tell prefill, by one word in the ledger."""
        assert self._peers is not None
        self._peers.give_back(self._lenders.pop(loan), loan.lease_id)

    def decline(self, handoff: Handoff) -> bool:
        """End the lease of a request that ended before it was claimed, instead of leaving it to the offer timeout.

        Returns:
            False when it is too early: the peer is just being connected to, or prefill has not given its verdict yet.
        """
        if self._peers is None or handoff.ticket is None:
            return True
        with self._peers.lock:
            try:
                peer = self._peers.get(handoff.ticket, handoff.address)
            except PeerUnreachableError:
                return True
            if peer.state is PeerState.FAILED or peer.is_gone():
                return True
            meet(handoff, peer)
            return peer.leases is not None and self._decline_known(handoff, handoff.ticket, peer, peer.leases)

    def _decline_known(self, handoff: Handoff, ticket: Ticket, peer: Peer, leases: PeerLeases | RemoteLeases) -> bool:
        lease_id = ticket.lease_id
        if not handoff.is_verdict_pending:
            if (peer.incarnation, lease_id) in self._loans:
                return True
            offer = leases.look_up(ticket)
            if offer is None or offer == "pending":
                return offer is None
        verdict = ask(handoff, leases, lease_id)
        if verdict == "held":
            leases.release(lease_id)
        return verdict != "pending"


def meet(handoff: Handoff, peer: Peer) -> None:
    """A claim that was made in an earlier session ended with that."""
    if handoff.session_key != peer.key:
        handoff.session_key = peer.key
        handoff.is_verdict_pending = False


def ask(handoff: Handoff, leases: PeerLeases | RemoteLeases, lease_id: LeaseId) -> Literal["held", "pending", "dead"]:
    """Claim the lease, or ask for the verdict on the claim that was made before."""
    verdict = leases.poll(lease_id) if handoff.is_verdict_pending else leases.claim(lease_id)
    handoff.is_verdict_pending = verdict == "pending"
    return verdict
