"""Target: what ``vllm-mc2 inspect`` makes of what engines say of themselves."""

from collections.abc import Sequence

import msgspec

from tests.fuzz.mutate import MSGPACK
from tests.fuzz.samples import encoded
from tests.fuzz.target import Target, refused
from vllm_mc2 import protocol
from vllm_mc2.cli.tables import WIDTH, Findings, Unanswered, render
from vllm_mc2.errors import ProtocolError
from vllm_mc2.inspection import EngineReport, WorkerReport


def run_report(data: bytes) -> str:
    """What ``vllm-mc2 inspect`` prints of a report: lines that fit, without anything that a terminal obeys."""
    try:
        report = protocol.decode(data)
    except ProtocolError as error:
        return refused(error)
    if not isinstance(report, (EngineReport, WorkerReport)):
        return "something else"
    engines = [report] if isinstance(report, EngineReport) else []
    workers = [report] if isinstance(report, WorkerReport) else []
    silent = [Unanswered("a" * 16 + ".sock", "no answer")]
    findings = Findings(engines, workers, ["b.sock"], silent)
    text = render(findings, 20)
    lines = text.split("\n")
    assert text.isprintable() or all(line.isprintable() for line in lines)
    assert all(len(line) <= WIDTH for line in lines) and len(lines) < 64 + protocol.MAX_FRAME_BYTES // 8
    msgspec.json.encode(findings)
    return f"{type(report).__name__} {len(lines)}"


def report_seeds() -> Sequence[bytes]:
    """Reports of all roles."""
    return [encoded(kind, seed) for kind in (EngineReport, WorkerReport) for seed in range(12)]


TARGETS = [Target("report", "EngineReport and WorkerReport, cli.tables.render", run_report, report_seeds, MSGPACK)]
