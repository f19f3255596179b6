"""What ``vllm-mc2 inspect`` shows of a prefill that uses the tensor API."""

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_mc2.inspection import MAX_LEASE_ROWS, DecodeRow, EngineReport
from vllm_mc2.protocol import InspectHello
from vllm_mc2.reporting import fit, lease_rows, refusal
from vllm_mc2.session import Answer

if TYPE_CHECKING:
    from vllm_mc2.tensors.sender import Sender


def reporter(sender: "Sender") -> Callable[[InspectHello], Answer]:
    """Answers onlookers, on the session thread. It has no block pool of its own to count: those numbers are 0."""
    started = time.monotonic()
    name = f"tensors-{os.getpid()}"

    def answer(hello: InspectHello) -> Answer:
        num_leases, views = sender.book.view(MAX_LEASE_ROWS)
        decodes = sender.decodes()
        report = EngineReport(
            role="prefill",
            engine_id=name,
            incarnation=sender.incarnation,
            pid=os.getpid(),
            uptime_seconds=time.monotonic() - started,
            off_reason="",
            block_size=0,
            num_blocks=0,
            free_blocks=0,
            num_leases=num_leases,
            leases=lease_rows(views, decodes),
            num_decodes=len(decodes),
            decodes=[DecodeRow(pid, engine_id) for pid, engine_id in decodes.values()],
        )
        return refusal(hello) or Answer(fit(report), keep_open=False)

    return answer
