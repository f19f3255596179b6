"""One request that came with a ticket, and where it stands."""

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_mc2.connector.borrowed import Loan
from vllm_mc2.protocol import Ticket

if TYPE_CHECKING:
    from vllm.v1.request import Request


class HandoffState(enum.Enum):
    """See :mod:`vllm_mc2.connector.decode`."""

    WAITING = "waiting"
    ATTACHED = "attached"
    REJECTED = "rejected"


@dataclass(eq=False)
class Handoff:
    """One request that came with a ticket."""

    request: "Request"
    ticket: Ticket | None
    state: HandoffState = HandoffState.WAITING
    reason: str = ""
    loan: Loan | None = None
    is_verdict_pending: bool = False
    num_full: int = 0
    """Full blocks that are attached."""
    num_tail: int = 0
    handoff_seconds: float = 0.0
    num_lookups: int = 0
    is_failed: bool = False
    is_counted: bool = False

    def report(self, bytes_per_block: int, *, fails: bool) -> dict[str, object]:
        """What happened, for ``report_in_response``."""
        attached = self.state is HandoffState.ATTACHED
        return {
            "way": "attach" if attached else "failed" if fails else "recompute",
            "reason": self.reason or None,
            "blocks_attached": self.num_full if attached else 0,
            "tail_tokens": self.num_tail,
            "kv_bytes_not_copied": self.num_full * bytes_per_block if attached else 0,
            "handoff_us": round(self.handoff_seconds * 1e6, 1),
        }
