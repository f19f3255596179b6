"""Leases as Python objects: :class:`LeaseBook` on prefill, :class:`PeerLeases` on decode.

The protocol itself (index table, ledgers, memory order) is native, see ``csrc/lease``. Here lie the objects that hang on
a lease: prefill's pinned blocks, and the rule that a ticket is checked before the ledger is touched.
"""

import hmac
from array import array
from collections.abc import Sequence
from typing import Generic, Literal, NamedTuple, TypeVar

from vllm_mc2._native import IdSpan, LeaseReader, LeaseTable
from vllm_mc2.protocol import Ticket

P = TypeVar("P")
LeaseId = tuple[int, int]
"""``(slot, generation)``"""

MAX_TABLE_BYTES = 64 << 20
_SLOT_HEADER_BYTES = 128
_ANY_BLOCK = 1 << 32


def affordable_slots(num_slots: int, max_blocks: int) -> int:
    """``num_slots``, or as many as fit an index table of 64 MiB with ``max_blocks`` block ids a lease."""
    return max(1, min(num_slots, MAX_TABLE_BYTES // (_SLOT_HEADER_BYTES + 4 * max_blocks)))


class EndedLease(NamedTuple, Generic[P]):
    """A lease that ended, with what was published under it."""

    lease_id: LeaseId
    reason: str
    """``released``, ``expired`` or ``peer_gone``"""
    payload: P


class LeaseView(NamedTuple):
    """A lease as an onlooker sees it."""

    slot: int
    generation: int
    state: Literal["offered", "held", "released", "expired", "peer_gone"]
    """The last three are over and wait for a sweep."""
    num_tokens: int
    num_blocks: int
    claims: int
    releases: int
    age_seconds: float
    holders: list[tuple[int, int, int]]
    """``(ledger id, claims, releases)`` of living decodes that have claimed it."""


class LeaseBook(Generic[P]):
    """Prefill's leases. ``payload`` is whatever must be undone when the lease ends. Scheduler thread, but for
    ``add_ledger``, ``drop_ledger`` and ``view``, which any thread may call.
    """

    def __init__(self, incarnation: str, num_slots: int, max_blocks: int) -> None:
        """``max_blocks``: the longest block table of a request."""
        self._incarnation = incarnation
        self._table = LeaseTable(affordable_slots(num_slots, max_blocks), max_blocks)
        self._payloads: dict[LeaseId, P] = {}

    def __len__(self) -> int:
        return len(self._payloads)

    @property
    def index_fd(self) -> int:
        """Descriptor of the index table; borrowed."""
        return self._table.fd

    def publish(
        self,
        token: bytes,
        digest: bytes,
        num_tokens: int,
        block_ids: Sequence[int],
        timeout_seconds: float,
        payload: P,
        *,
        is_copy_wanted: bool = False,
    ) -> Ticket | None:
        """Publish a lease over ``block_ids``; None when no slot is free. The blocks must already be pinned.

        ``is_copy_wanted``: decode is to copy the blocks and to release them at once, instead of using them in place.
        """
        lease_id = self.offer(
            token, digest, num_tokens, list(block_ids), timeout_seconds, payload, is_copy_wanted=is_copy_wanted
        )
        return None if lease_id is None else Ticket.issue(self._incarnation, *lease_id, token)

    def offer(
        self,
        token: bytes,
        digest: bytes,
        num_tokens: int,
        block_ids: "list[int] | array[int] | memoryview | IdSpan",
        timeout_seconds: float,
        payload: P,
        num_pool_blocks: int = _ANY_BLOCK,
        *,
        is_copy_wanted: bool = False,
    ) -> LeaseId | None:
        """As :meth:`publish`, for those who make their own tickets. int32 buffers spare a Python object per block.

        Raises:
            ValueError: more blocks than a lease takes, or one that is not below ``num_pool_blocks``.
        """
        lease_id = self._table.publish(
            token, digest, num_tokens, block_ids, timeout_seconds, num_pool_blocks, is_copy_wanted
        )
        if lease_id is not None:
            self._payloads[lease_id] = payload
        return lease_id

    def sweep(self) -> list[EndedLease[P]]:
        """Leases that have ended since the last sweep. Their blocks may be reused from now on."""
        if not self._payloads:
            return []
        return [
            EndedLease((slot, generation), reason, self._payloads.pop((slot, generation)))
            for slot, generation, reason in self._table.sweep()
        ]

    def payload(self, lease_id: LeaseId) -> P | None:
        """What must be undone when this lease ends; None once a sweep has had it. Any thread."""
        return self._payloads.get(lease_id)

    def abandon(self) -> list[P]:
        """The payloads of all leases, for those who know that nobody can claim or read any more; forgets them."""
        payloads = list(self._payloads.values())
        self._payloads.clear()
        return payloads

    def add_ledger(self) -> tuple[int, int]:
        """``(ledger id, descriptor)`` for a new decode; the descriptor is borrowed."""
        return self._table.add_ledger()

    def drop_ledger(self, ledger_id: int) -> None:
        """The decode of this ledger is gone; what only it held ends at the next sweep."""
        self._table.drop_ledger(ledger_id)

    def view(self, max_rows: int) -> tuple[int, list[LeaseView]]:
        """``(number of leases, the oldest of them)``; changes nothing and holds nobody up.

        Raises:
            ValueError: the book is closed.
        """
        num_leases, rows = self._table.view(max_rows)
        return num_leases, [LeaseView(*row) for row in rows]

    def close(self) -> None:
        """Unmap the table. Decodes keep what they have mapped."""
        self._table.close()


class LeaseOffer(NamedTuple):
    """A lease as read before it is claimed."""

    digest: bytes
    num_tokens: int
    num_blocks: int
    is_copy_wanted: bool
    """Prefill lends a lot already: the blocks are to be copied, and the lease to be released at once."""


class PeerLeases:
    """Decode's view of one prefill's leases. Scheduler thread only."""

    def __init__(self, index_fd: int, ledger_fd: int) -> None:
        """Maps both segments; the descriptors stay the caller's.

        Raises:
            ValueError: a segment is not what it claims to be.
        """
        self._reader = LeaseReader(index_fd, ledger_fd)

    def look_up(self, ticket: Ticket) -> LeaseOffer | None:
        """The lease that ``ticket`` names, or None when it is over or the token is wrong.

        Writes nothing: only a ticket that was really issued may ever touch the ledger, or a guess could end a lease.
        """
        found = self._reader.peek(*ticket.lease_id)
        if found is None:
            return None
        token, digest, num_tokens, num_blocks, is_copy_wanted = found
        if not hmac.compare_digest(token, ticket.token_bytes):
            return None
        return LeaseOffer(digest, num_tokens, num_blocks, is_copy_wanted)

    def claim(self, lease_id: LeaseId) -> Literal["held", "pending", "dead"]:
        """Claim a lease; ``pending`` means that prefill is just deciding, ask :meth:`poll`."""
        return _verdict(self._reader.claim(*lease_id))

    def take(self, lease_id: LeaseId, token: bytes) -> tuple[Literal["held", "pending", "dead"], int] | None:
        """Look up and claim in one call, for those who have nothing to check in between: the verdict and the number of tokens.

        None when the lease is over or the token is wrong; nothing was written then.
        """
        return self._reader.take(*lease_id, token)

    def poll(self, lease_id: LeaseId) -> Literal["held", "pending", "dead"]:
        """The verdict on a pending claim."""
        return _verdict(self._reader.poll(*lease_id))

    def block_ids(self, lease_id: LeaseId) -> list[int]:
        """The remote block table of a held lease."""
        return self._reader.blocks(*lease_id)

    def block_table(self, lease_id: LeaseId, base: int, num_blocks: int) -> memoryview:
        """The block table of a held lease as int32 items, each id plus ``base``.

        Raises:
            ValueError: it names a block that a pool of ``num_blocks`` does not have.
        """
        return self._reader.block_table(*lease_id, base, num_blocks)

    def release(self, lease_id: LeaseId) -> None:
        """Give a held lease back; prefill may reuse the blocks from now on."""
        self._reader.release(*lease_id)

    def close(self) -> None:
        """Unmap both segments."""
        self._reader.close()


def _verdict(answer: str) -> Literal["held", "pending", "dead"]:
    if answer == "held":
        return "held"
    return "pending" if answer == "pending" else "dead"
