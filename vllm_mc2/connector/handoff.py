"""One request that came with a ticket, and where it stands."""

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_mc2.connector.borrowed import Loan
from vllm_mc2.protocol import Ticket
from vllm_mc2.ticket import TcpAddress

if TYPE_CHECKING:
    from vllm.v1.request import Request


class HandoffState(enum.Enum):
    """See :mod:`vllm_mc2.connector.decode`."""

    WAITING = "waiting"
    ATTACHED = "attached"
    CLAIMED = "claimed"
    PULLING = "pulling"
    PULLED = "pulled"
    REJECTED = "rejected"


@dataclass(eq=False)
class Handoff:
    """One request that came with a ticket."""

    request: "Request"
    ticket: Ticket | None
    state: HandoffState = HandoffState.WAITING
    address: TcpAddress | None = None
    """Where its prefill listens, if the request says so."""
    reason: str = ""
    loan: Loan | None = None
    is_verdict_pending: bool = False
    session_key: int = -1
    """Of the peer that a verdict is awaited from. One on another host may be met anew meanwhile, and knows of no claim then."""
    num_full: int = 0
    """Full blocks that are attached."""
    num_tail: int = 0
    own_ids: list[int] = field(default_factory=list)
    """Blocks that were copied to, the partly filled last one included."""
    pull_started: float = 0.0
    pull_seconds: float = 0.0
    handoff_seconds: float = 0.0
    num_lookups: int = 0
    is_failed: bool = False
    is_counted: bool = False

    @property
    def num_usable(self) -> int:
        """Tokens whose KV the loan brings: all but the prompt's last, which decode must compute to go on from there."""
        assert self.loan is not None
        num_before_last: int = self.request.num_tokens - 1
        return min(self.loan.num_tokens, num_before_last)

    def way(self, *, fails: bool) -> str:
        """What became of it; ``fails``: whether a rejection ends the request."""
        if self.state is HandoffState.REJECTED:
            return "failed" if fails else "recompute"
        if self.state is HandoffState.ATTACHED:
            return "attach"
        return "pull" if self.state is HandoffState.PULLED else "unfinished"

    def report(self, bytes_per_block: int, *, fails: bool) -> dict[str, object]:
        """What happened, for ``report_in_response``."""
        attached = self.state is HandoffState.ATTACHED
        return {
            "way": self.way(fails=fails),
            "reason": self.reason or None,
            "blocks_attached": self.num_full if attached else 0,
            "tail_tokens": self.num_tail,
            "kv_bytes_not_copied": self.num_full * bytes_per_block if attached else 0,
            "kv_bytes_copied": len(self.own_ids) * bytes_per_block,
            "pull_us": round(self.pull_seconds * 1e6, 1),
            "handoff_us": round(self.handoff_seconds * 1e6, 1),
        }
