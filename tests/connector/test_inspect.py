"""``vllm-mc2 inspect`` on running rig engines: what it shows, and that nothing changes because of it."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.connector.rig import MakeEngine, RigEngine, assert_clean, prefill, step_until_running
from tests.support.fake_model import expected_tokens, prompt_of
from tests.support.waiting import wait_until
from vllm_mc2 import cli
from vllm_mc2.cli.inspect import ask, look
from vllm_mc2.cli.tables import Findings
from vllm_mc2.inspection import MAX_LEASE_ROWS, EngineReport
from vllm_mc2.protocol import PROTOCOL_VERSION

Pair = tuple[RigEngine, RigEngine]
ME = os.getpid()


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever answers here is in this process, however busy the machine is."""
    monkeypatch.setattr("vllm_mc2.cli.inspect.ANSWER_SECONDS", 60.0)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "s"


def engine_report(findings: Findings, role: str) -> EngineReport:
    [report] = [engine for engine in findings.engines if engine.role == role]
    return report


def test_before_during_and_after(pair: Pair, directory: Path) -> None:
    producer, consumer = pair
    prompt = prompt_of(100)
    before = look(directory)
    assert (before.stale, before.unanswered) == ([], [])
    idle = engine_report(before, "prefill")
    assert (idle.pid, idle.block_size, idle.num_blocks, idle.free_blocks) == (ME, 16, 64, 63)
    assert (idle.leases, idle.num_leases, idle.lent_blocks, idle.decodes, idle.off_reason) == ([], 0, 0, [], "")
    assert idle.engine_id == producer.connector._engine_id()
    assert engine_report(before, "decode").peers == []

    ticket = prefill(producer, "r", prompt)
    offered = engine_report(look(directory), "prefill")
    [row] = offered.leases
    assert row.ticket == ticket["remote_request_id"]
    assert (row.state, row.num_tokens, row.num_blocks, row.references, row.holders) == ("offered", 100, 7, 1, [])
    assert (offered.lent_blocks, offered.free_blocks) == (7, 56)

    consumer.add("r", prompt, ticket, max_tokens=20)
    step_until_running(consumer, "r")
    during = look(directory)
    prefills, decodes = engine_report(during, "prefill"), engine_report(during, "decode")
    [row] = prefills.leases
    assert (row.state, row.references, row.claims, row.releases) == ("held", 2, 1, 0)
    [holder] = row.holders
    assert (holder.pid, holder.engine_id, holder.claims) == (ME, decodes.engine_id, 1)
    assert [(each.pid, each.engine_id) for each in prefills.decodes] == [(ME, decodes.engine_id)]
    [peer] = decodes.peers
    assert (peer.incarnation, peer.engine_id, peer.pid) == (prefills.incarnation, prefills.engine_id, ME)
    assert (peer.state, peer.num_blocks, peer.loans, peer.is_gone) == ("ready", 64, 1, False)
    assert (decodes.borrowed_blocks, decodes.loans, decodes.handoffs, decodes.lent_blocks) == (6, 1, 1, 0)
    assert decodes.window is not None and peer.base >= decodes.window.base
    assert 0 < decodes.window.num_blocks - decodes.window.free_blocks

    consumer.run()
    over = engine_report(look(directory), "prefill")
    assert [(row.state, row.references) for row in over.leases] == [("released", 1)]  # prefill sleeps, and keeps it
    assert over.lent_blocks == 7
    producer.step()
    after = look(directory)
    assert engine_report(after, "prefill").leases == []
    assert engine_report(after, "prefill").lent_blocks == 0
    assert engine_report(after, "decode").borrowed_blocks == engine_report(after, "decode").loans == 0
    assert_clean(*pair)


def test_workers(pair: Pair, directory: Path) -> None:
    producer, consumer = pair
    prompt = prompt_of(40)
    consumer.add("r", prompt, prefill(producer, "r", prompt))
    consumer.run()
    findings = look(directory)
    assert len(findings.workers) == 2
    by_id = {worker.engine_id: worker for worker in findings.workers}
    lender = by_id[engine_report(findings, "prefill").engine_id]
    borrower = by_id[engine_report(findings, "decode").engine_id]
    assert (lender.rank, lender.pid, lender.parent_pid) == (0, ME, os.getppid())
    assert lender.num_blocks == 64 and lender.pool_bytes >= 64 * lender.bytes_per_block > 0
    assert lender.pages == "0% in 2 MiB pages (none)" and borrower.pages == "private"
    [mapped] = borrower.mapped
    assert mapped.base == engine_report(findings, "decode").peers[0].base
    assert (mapped.num_blocks, mapped.num_bytes) == (64, 64 * lender.bytes_per_block)
    assert lender.mapped == []


def test_two_decodes_on_one_ticket_are_three_references(make_engine: MakeEngine, directory: Path) -> None:
    producer, first, second = make_engine("kv_producer"), make_engine("kv_consumer"), make_engine("kv_consumer")
    prompt = prompt_of(50)
    ticket = prefill(producer, "r", prompt)
    for engine in (first, second):
        engine.add("r", prompt, ticket, max_tokens=20)
        step_until_running(engine, "r")
    [row] = engine_report(look(directory), "prefill").leases
    assert (row.state, row.references, row.claims) == ("held", 3, 2)
    assert {holder.engine_id for holder in row.holders} == {
        first.connector._engine_id(),
        second.connector._engine_id(),
    }
    first.run()
    [row] = engine_report(look(directory), "prefill").leases
    assert (row.state, row.references, row.claims, row.releases) == ("held", 2, 2, 1)
    assert sorted(holder.claims for holder in row.holders) == [0, 1]
    second.run()
    assert_clean(producer, first, second)


def test_a_decode_that_ends_is_no_holder_any_more(make_engine: MakeEngine, directory: Path) -> None:
    producer, consumer = make_engine("kv_producer"), make_engine("kv_consumer")
    prompt = prompt_of(50)
    consumer.add("r", prompt, prefill(producer, "r", prompt), max_tokens=20)
    step_until_running(consumer, "r")
    consumer.connector._decode.close()  # type: ignore[union-attr]
    wait_until(lambda: not engine_report(look(directory), "prefill").decodes)
    report = engine_report(look(directory), "prefill")
    assert [(row.state, row.references, row.holders) for row in report.leases] == [("peer_gone", 1, [])]


def test_a_prefill_that_ends_is_shown_as_gone(pair: Pair, directory: Path) -> None:
    producer, consumer = pair
    prompt = prompt_of(50)
    consumer.add("r", prompt, prefill(producer, "r", prompt), max_tokens=20)
    step_until_running(consumer, "r")
    producer.close()
    findings = look(directory)
    [report] = findings.engines
    assert [(peer.state, peer.is_gone, peer.loans) for peer in report.peers] == [("ready", True, 1)]
    consumer.run()
    assert consumer.finished["r"][0] == expected_tokens(prompt, 20)


def test_looking_a_hundred_times_changes_nothing(pair: Pair, directory: Path) -> None:
    producer, consumer = pair
    prompt = prompt_of(100)
    consumer.add("r", prompt, prefill(producer, "r", prompt), max_tokens=150)
    step_until_running(consumer, "r")
    num_steps, num_ledgers = producer.num_steps, len(producer.connector._prefill._ledgers)  # type: ignore[union-attr]
    for _ in range(100):
        findings = look(directory)
        [row] = engine_report(findings, "prefill").leases
        assert (row.state, row.references, row.claims, row.releases) == ("held", 2, 1, 0)
        consumer.step()
    assert producer.num_steps == num_steps
    assert len(producer.connector._prefill._ledgers) == num_ledgers  # type: ignore[union-attr]
    consumer.run()
    assert consumer.finished["r"][0] == expected_tokens(prompt, 150)
    assert consumer.num_computed_prompt_tokens["r"] == 1
    assert_clean(*pair)


def test_looking_while_the_scheduler_publishes_and_sweeps(make_engine: MakeEngine, directory: Path) -> None:
    producer = make_engine("kv_producer", extra={"offer_timeout_seconds": 0.02})
    stop = threading.Event()
    seen: list[int] = []
    problems: list[object] = []

    def look_on() -> None:
        while not stop.is_set():
            try:
                report = engine_report(look(directory), "prefill")
            except ValueError as error:  # nobody answered
                problems.append(error)
                return
            seen.append(len(report.leases))
            problems.extend(
                row for row in report.leases if row.references != 1 or row.state not in {"offered", "expired"}
            )

    thread = threading.Thread(target=look_on)
    thread.start()
    index = 0
    while index < 300 or len(seen) <= 10:
        prefill(producer, f"r{index}", prompt_of(20, seed=index % 5))
        index += 1
    stop.set()
    thread.join(timeout=60)
    assert problems == []
    assert len(seen) > 10 and max(seen) > 0


def test_more_leases_than_a_report_has_rows(make_engine: MakeEngine, directory: Path) -> None:
    producer = make_engine("kv_producer", extra={"num_lease_slots": 2000})
    book = producer.connector._prefill.book  # type: ignore[union-attr]
    tickets = [book.publish(b"t" * 16, b"d" * 32, 16, [1], 1000.0, []) for _ in range(1500)]
    report = engine_report(look(directory), "prefill")
    assert (report.num_leases, len(report.leases)) == (1500, MAX_LEASE_ROWS)
    assert report.leases[0].ticket == f"{tickets[0].slot}-{tickets[0].generation}"  # type: ignore[union-attr]


def test_attach_that_is_off_is_said(make_engine: MakeEngine, directory: Path) -> None:
    make_engine("kv_consumer", enable_prefix_caching=False)
    report = engine_report(look(directory), "decode")
    assert "prefix caching is off" in report.attach_off and report.off_reason == ""
    assert report.window is not None and report.window.num_blocks == 0
    make_engine("kv_producer", enable_prefix_caching=False, extra={"mode": "attach"})
    make_engine("kv_consumer", enable_prefix_caching=False, extra={"mode": "attach"})
    reports = [each for each in look(directory).engines if each.role == "decode" and each.off_reason]
    assert len(reports) == 1 and "prefix caching is off" in reports[0].off_reason and reports[0].window is None


def test_both_roles_in_one_engine_are_one_report(make_engine: MakeEngine, directory: Path) -> None:
    first, second = make_engine("kv_both"), make_engine("kv_both")
    prompt = prompt_of(40)
    second.add("r", prompt, prefill(first, "r", prompt), max_tokens=20)
    step_until_running(second, "r")
    findings = look(directory)
    reports = {report.engine_id: report for report in findings.engines}
    assert [report.role for report in findings.engines] == ["both", "both"]
    assert reports[first.connector._engine_id()].num_leases == 1
    assert reports[second.connector._engine_id()].loans == 1
    second.run()


def test_onlookers_sockets_answer_nothing_else(pair: Pair, directory: Path) -> None:
    """A ticket that names decode's socket finds nobody to talk to."""
    producer, consumer = pair
    prompt = prompt_of(40)
    ticket = prefill(producer, "r", prompt)
    ticket["mc2_ticket"]["incarnation"] = engine_report(look(directory), "decode").incarnation
    consumer.add("r", prompt, ticket)
    consumer.run()
    assert consumer.finished["r"][0] == expected_tokens(prompt, 4)
    assert consumer.finished["r"][2]["mc2"]["reason"] == "peer_refused"  # type: ignore[index]


def test_another_protocol_version_is_refused(pair: Pair, directory: Path) -> None:
    with mock.patch("vllm_mc2.cli.inspect.PROTOCOL_VERSION", 99):
        findings = look(directory)
    assert findings.engines == [] and findings.workers == []
    assert len(findings.unanswered) == 4
    assert {each.reason for each in findings.unanswered} == {f"refused: protocol is {PROTOCOL_VERSION} there, 99 here"}


def test_the_command_in_its_own_process(pair: Pair, directory: Path) -> None:
    producer, consumer = pair
    prompt = prompt_of(100)
    consumer.add("r", prompt, prefill(producer, "r", prompt), max_tokens=20)
    step_until_running(consumer, "r")
    command = [str(Path(sys.executable).parent / "vllm-mc2"), "inspect", "--socket-dir", str(directory)]
    as_json = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=60, check=True)
    found: dict[str, Any] = json.loads(as_json.stdout)
    assert {engine["role"] for engine in found["engines"]} == {"prefill", "decode"}
    assert len(found["workers"]) == 2
    table = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "  held " in table and f"pid {ME}, up " in table
    assert all(len(line) <= 120 for line in table.splitlines())
    consumer.run()


def test_a_report_costs_the_engine_little(pair: Pair, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prints what it takes: less than a short prompt, and most of that in an engine that computes nothing."""
    producer, _ = pair
    started = time.thread_time()
    tickets = [prefill(producer, f"r{index}", prompt_of(20, seed=index)) for index in range(8)]
    per_prompt = (time.thread_time() - started) / len(tickets)
    path = producer.connector._prefill._server.path  # type: ignore[union-attr]
    report = ask(path, 60.0)
    assert isinstance(report, EngineReport)
    started = time.thread_time()
    for _ in range(50):
        producer.connector._inspector.report()  # type: ignore[union-attr]
    per_report = (time.thread_time() - started) / 50
    with capsys.disabled():
        print(f"\na report of 8 leases: {per_report * 1e6:.0f} us; a prompt: {per_prompt * 1e6:.0f} us")
    assert per_report < per_prompt, (per_report, per_prompt)
    assert cli.main(["inspect", "--socket-dir", str(directory)]) == 0
    assert capsys.readouterr().out.count("offered") == 8
