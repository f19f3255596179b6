"""The table and the bounds of ``vllm-mc2 inspect``: pure data, no sockets."""

import msgspec
import pytest

from tests.unit.reports import LEASE, PEER, engine_report, worker_report
from vllm_mc2 import cli, protocol
from vllm_mc2.cli.tables import WIDTH, Findings, Unanswered, duration, render
from vllm_mc2.errors import ProtocolError
from vllm_mc2.inspection import (
    MAX_HOLDER_ROWS,
    MAX_LEASE_ROWS,
    DecodeRow,
    EngineReport,
    HolderRow,
    MappedRow,
    WindowRow,
    WorkerReport,
)

PREFILL = engine_report(
    lent_blocks=113,
    num_leases=2,
    leases=[LEASE, msgspec.structs.replace(LEASE, ticket="0000002b-00000001", state="offered", holders=[])],
    num_decodes=1,
    decodes=[DecodeRow(4200, "decode-1")],
)
DECODE = engine_report(
    role="decode",
    engine_id="decode-1",
    incarnation="b" * 32,
    pid=4200,
    uptime_seconds=7512.0,
    window=WindowRow(1024, 8192, 8128),
    num_peers=2,
    peers=[PEER, msgspec.structs.replace(PEER, incarnation="c" * 32, state="failed", reason="window_full", base=-1)],
    borrowed_blocks=112,
    loans=1,
    handoffs=1,
)
WORKERS = [
    worker_report(),
    worker_report(
        engine_id="decode-1", pid=4201, parent_pid=4200, pages="private", mapped=[MappedRow(1024, 64, 6 << 20)]
    ),
]
GOLDEN = """\
prefill prefill-1  pid 4100, up 3m07s
  pool      64 blocks of 16 tokens: 113 lent, 63 free
  worker 0  pid 4100, pool 6.0 MiB, 96.0 KiB a block, 100% in 2 MiB pages (collapse)
  decodes   4200 (decode-1)
  leases    2
    LEASE              STATE     AGE  TOKENS  BLOCKS  REFS  HELD BY
    0000002a-00000001  held     1.2s    1800     113     2  4200
    0000002b-00000001  offered  1.2s    1800     113     2  -

decode decode-1  pid 4200, up 2h05m
  pool      64 blocks of 16 tokens: 63 free
  worker 0  pid 4201, pool 6.0 MiB, 96.0 KiB a block, private; maps 1 pool, 6.0 MiB
  window    8192 blocks from 1024: 8128 free
  borrowed  112 blocks under 1 loan, 1 request with a ticket
  peers     2
    PEER              WHERE  STATE                WAY     BASE  BLOCKS  LOANS  ENGINE
    aaaaaaaaaaaaaaaa   4100  ready                attach  1024      64      1  prefill-1
    cccccccccccccccc   4100  failed: window_full  attach     -      64      1  prefill-1

stale, removed when an engine starts: 0123456789abcdef.sock

no report from fedcba9876543210.sock: no answer in time"""


def test_other_hosts_are_shown_by_their_address() -> None:
    listening = engine_report(listens_at="10.0.0.1:4000")
    assert "  network   listens for other hosts at 10.0.0.1:4000\n" in render(findings(listening), 20)
    far = msgspec.structs.replace(PEER, pid=0, address="[fd00::1]:4000", way="pull", way_reason="other_host")
    text = render(findings(engine_report(role="decode", peers=[far], num_peers=1)), 20)
    assert "aaaaaaaaaaaaaaaa  [fd00::1]:4000  ready  pull (other_host)" in text


def findings(*engines: EngineReport, workers: list[WorkerReport] | None = None) -> Findings:
    return Findings(list(engines), workers or [], [], [])


def test_the_table() -> None:
    unanswered = [Unanswered("fedcba9876543210.sock", "no answer in time")]
    assert render(Findings([PREFILL, DECODE], WORKERS, ["0123456789abcdef.sock"], unanswered), 20) == GOLDEN


def test_the_oldest_leases_are_shown_first_and_the_rest_is_counted() -> None:
    leases = [
        msgspec.structs.replace(LEASE, ticket=f"{index:08x}-00000001", age_seconds=float(index)) for index in range(9)
    ]
    lines = render(findings(engine_report(num_leases=1500, leases=leases)), 3).splitlines()
    assert [line.split()[0] for line in lines[-4:-1]] == [f"0000000{index}-00000001" for index in (8, 7, 6)]
    assert lines[-1] == "    and 1497 younger ones; --rows N shows more"
    assert "LEASE" not in render(findings(engine_report(num_leases=9, leases=leases)), 0)


def test_several_claims_of_one_decode_and_one_from_another_pid_namespace() -> None:
    holders = [HolderRow(4200, "d", 2), HolderRow(0, "e", 1), HolderRow(4300, "f", 0)]
    text = render(findings(engine_report(leases=[msgspec.structs.replace(LEASE, holders=holders)])), 20)
    assert text.splitlines()[-1].endswith("  4200*2 ?")


@pytest.mark.parametrize("evil", ["\x1b[2J\x1b]0;pwned\x07", "a\nb\rc", "\u202egnp.exe", "x" * 256])
def test_names_of_others_reach_no_terminal_and_fit_the_width(evil: str) -> None:
    engines = [
        engine_report(engine_id=evil, off_reason=evil, decodes=[DecodeRow(1, evil)] * 9),
        engine_report(role="decode", peers=[msgspec.structs.replace(PEER, engine_id=evil, reason=evil)]),
    ]
    text = render(Findings(engines, [worker_report(engine_id=evil, pages=evil)], [evil], [Unanswered(evil, evil)]), 20)
    assert all(character.isprintable() for character in text.replace("\n", ""))
    assert all(len(line) <= WIDTH for line in text.splitlines())
    assert len(text.splitlines()) < 25


def test_a_worker_without_its_engine_is_shown() -> None:
    text = render(findings(engine_report(), workers=[worker_report(pid=1, parent_pid=2)]), 20)
    assert "workers whose engine gave no report\n  prefill-1  worker 0  pid 1, " in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0s"), (59.9, "59.9s"), (59.97, "1m00s"), (3599.6, "1h00m"), (90_000.0, "1d01h"), (1e30, "?")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
    assert duration(float("nan")) == duration(float("inf")) == "?"


@pytest.mark.parametrize(
    "report",
    [
        engine_report(leases=[LEASE] * (MAX_LEASE_ROWS + 1)),
        engine_report(leases=[msgspec.structs.replace(LEASE, holders=LEASE.holders * (MAX_HOLDER_ROWS + 1))]),
        engine_report(leases=[msgspec.structs.replace(LEASE, ticket="../../etc/passwd")]),
        engine_report(role="admin"),
        engine_report(pid=-1),
        engine_report(engine_id="x" * 257),
        worker_report(mapped=[MappedRow(0, 0, -1)]),
    ],
)
def test_what_is_out_of_bounds_is_no_report(report: EngineReport | WorkerReport) -> None:
    with pytest.raises(ProtocolError):
        protocol.decode(protocol.encode(report))


@pytest.mark.parametrize("arguments", [[], ["look"], ["inspect", "--watch", "0"], ["inspect", "--json", "--watch"]])
def test_wrong_usage_is_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "usage: vllm-mc2" in capsys.readouterr().err


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["inspect", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for word in ("--json | jq", "--watch", "socket_dir", "offered", "peer_gone", "exit codes: 0"):
        assert word in text
