"""Makes the reports of ``vllm-mc2 inspect`` from leases, for whoever has a session server: the connector and the tensor API."""

import time

import msgspec

from vllm_mc2 import protocol
from vllm_mc2.inspection import MAX_HOLDER_ROWS, EngineReport, HolderRow, LeaseRow
from vllm_mc2.leases import LeaseView
from vllm_mc2.protocol import MAX_FRAME_BYTES, PROTOCOL_VERSION, CountsHello, InspectHello, Refusal
from vllm_mc2.session import Answer

ROWS_AT_A_TIME = 100
"""About 0.1 ms of Python."""

Decodes = dict[int, tuple[int, str]]
"""Ledger id -> ``(pid, engine id)``"""


def lease_rows(views: list[LeaseView], decodes: Decodes) -> list[LeaseRow]:
    """What leases look like to an onlooker."""
    rows: list[LeaseRow] = []
    for view in views:
        if len(rows) % ROWS_AT_A_TIME == ROWS_AT_A_TIME - 1:
            time.sleep(1e-4)  # the scheduler's thread may want the interpreter
        rows.append(_lease_row(view, decodes))
    return rows


def _lease_row(view: LeaseView, decodes: Decodes) -> LeaseRow:
    holders = []
    for ledger_id, claims, releases in view.holders[:MAX_HOLDER_ROWS]:
        pid, engine_id = decodes.get(ledger_id, (0, ""))
        holders.append(HolderRow(pid, engine_id, max(0, claims - releases)))
    return LeaseRow(
        ticket=f"{view.slot:08x}-{view.generation:08x}",
        state=view.state,
        age_seconds=max(0.0, view.age_seconds),
        num_tokens=view.num_tokens,
        num_blocks=view.num_blocks,
        references=1 + view.claims - view.releases,
        claims=view.claims,
        releases=view.releases,
        holders=holders,
    )


def fit(report: EngineReport) -> EngineReport:
    """The report with as many rows as a frame takes; its totals stay what they are."""
    while len(protocol.encode(report)) > MAX_FRAME_BYTES:
        rows: dict[str, list[object]] = {name: getattr(report, name) for name in ("leases", "peers", "decodes")}
        longest = max(rows, key=lambda name: len(msgspec.msgpack.encode(rows[name])))
        shorter = rows[longest][: len(rows[longest]) // 2]
        report = msgspec.structs.replace(report, **{longest: shorter})
    return report


def refusal(hello: InspectHello | CountsHello) -> Answer | None:
    """The answer to an onlooker of another protocol version, or None."""
    if hello.protocol == PROTOCOL_VERSION:
        return None
    return Answer(Refusal("protocol", str(hello.protocol), str(PROTOCOL_VERSION)), keep_open=False)
