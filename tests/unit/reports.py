"""Reports to test with: complete ones, of which a test changes what it is about."""

from typing import Any

import msgspec

from vllm_mc2.inspection import EngineReport, HolderRow, LeaseRow, PeerRow, WorkerReport

LEASE = LeaseRow("0000002a-00000001", "held", 1.25, 1800, 113, 2, 1, 0, [HolderRow(4200, "decode-1", 1)])
PEER = PeerRow("prefill-1", "a" * 32, 4100, "ready", "", "attach", "", 1024, 64, 1, False)


def engine_report(**changes: Any) -> EngineReport:
    """An idle prefill."""
    report = EngineReport("prefill", "prefill-1", "a" * 32, 4100, 187.0, "", 16, 64, 63)
    return msgspec.structs.replace(report, **changes)


def worker_report(**changes: Any) -> WorkerReport:
    """Its worker, in its own process."""
    report = WorkerReport("prefill-1", 0, 4100, 4000, 6 << 20, 64, 96 << 10, "100% in 2 MiB pages (collapse)", [])
    return msgspec.structs.replace(report, **changes)
