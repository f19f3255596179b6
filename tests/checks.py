"""Run the project's checks side by side, and print what each of them took.

    make test                                    (python -m tests.checks)
    make test-all                                (python -m tests.checks --all: also what is marked slow)
    .venv/bin/python -m tests.checks types docs  (these alone)

A check is a command. Three lanes of them run at the same time, since real servers and tests that wait leave cores idle.
Everything runs to its end, also after a failure. Output is kept in `build/logs/checks`; what a failed check printed is shown at
once.
"""

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOGS = ROOT / "build" / "logs" / "checks"
NUM_WORKERS = 4
"""pytest processes of the tests without servers: more than cores, since many of them wait."""
NUM_SLOWEST = 15
ALIVE_SECONDS = 60.0
STOP_SECONDS = 60.0
LOG_TAIL_LINES = 150
COUNTED = re.compile(r"(\d+) (passed|failed|errors?|skipped)\b")


@dataclass(frozen=True)
class Check:
    """A command that succeeds or not."""

    name: str
    command: tuple[str, ...]

    @property
    def log(self) -> Path:
        return LOGS / f"{self.name}.log"

    @property
    def report(self) -> Path:
        """What pytest says about each test."""
        return LOGS / f"{self.name}.xml"


@dataclass(frozen=True)
class Outcome:
    """What came of a check."""

    check: Check
    status: int
    started: float
    seconds: float

    @property
    def summary(self) -> str:
        """The line in which pytest counts its tests; empty for other checks."""
        lines = self.check.log.read_text(errors="replace").splitlines()
        found = [line.strip("= ") for line in lines if re.search(r"\b(passed|failed|errors?)\b.* in [\d.]+s", line)]
        return found[-1] if found else ""


def make(name: str) -> Check:
    return Check(name, ("make", "--no-print-directory", name))


def lanes(everything: bool, scratch: Path) -> list[list[Check]]:
    """The checks of `make test`, or of `make test-all`; those of a lane run one after the other.

    Args:
        everything: Also what is marked slow.
        scratch: A folder with a short name for the tests' files, sockets among them, whose paths have at most 107 bytes.
    """
    selected = [] if everything else ["not slow"]

    def pytest(name: str, *arguments: str) -> Check:
        options = ("-q", "--color=no", f"--basetemp={scratch / name[0]}", f"--junitxml={LOGS / name}.xml")
        return Check(name, (sys.executable, "-m", "pytest", *options, *arguments))

    def marked(*words: str) -> list[str]:
        return ["-m", " and ".join([*words, *selected])]

    return [
        [pytest("servers", *marked("e2e"), "tests/e2e", "tests/bench")],
        [pytest("tests", *marked("not e2e"), "-n", str(NUM_WORKERS), "--no-loadscope-reorder", "tests")],
        [make(name) for name in ("fmt", "lint", "types", "docs", "native")],
    ]


class Run:
    """The lanes of one run. Threads: one a lane, and the one that made it."""

    def __init__(self, plan: Sequence[Sequence[Check]]) -> None:
        self.outcomes: list[Outcome] = []
        self._plan = plan
        self._lock = threading.Lock()
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._is_stopped = False
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def wait(self) -> None:
        """Until every lane is done; says now and then what still runs."""
        threads = [threading.Thread(target=self._lane, args=[lane], daemon=True) for lane in self._plan]
        for thread in threads:
            thread.start()
        said = time.monotonic()
        while any(thread.is_alive() for thread in threads):
            next(thread for thread in threads if thread.is_alive()).join(1.0)
            if time.monotonic() - said > ALIVE_SECONDS:
                said = time.monotonic()
                with self._lock:
                    say(f"{'...':8}{', '.join(self._running)} ({self.seconds:.0f} s)")

    def _lane(self, lane: Sequence[Check]) -> None:
        for check in lane:
            started = self.seconds
            with self._lock:
                if self._is_stopped:
                    return
                with check.log.open("wb") as log:
                    self._running[check.name] = process = subprocess.Popen(
                        check.command, cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )  # fmt: skip
            outcome = Outcome(check, process.wait(), started, self.seconds - started)
            with self._lock:
                del self._running[check.name]
                self.outcomes.append(outcome)
                show(outcome)

    def stop(self) -> None:
        """Interrupt what runs, as Ctrl-C would, and wait for it; kill what does not end."""
        with self._lock:
            self._is_stopped = True
            processes = list(self._running.values())
        deadline = time.monotonic() + STOP_SECONDS
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def environment() -> dict[str, str]:
    """This process's own, with the commands of the virtual environment first."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def say(text: str) -> None:
    print(text, flush=True)


def show(outcome: Outcome) -> None:
    """One line; of a failed check also what it has printed."""
    state = "ok" if outcome.status == 0 else "FAILED"
    say(f"{state:8}{outcome.check.name:10}{outcome.seconds:6.0f} s  {outcome.summary}".rstrip())
    if outcome.status != 0:
        lines = outcome.check.log.read_text(errors="replace").splitlines()
        say("\n".join(f"    {line}" for line in lines[-LOG_TAIL_LINES:]))
        say(f"    (whole log: {outcome.check.log})")


def slowest(outcomes: Sequence[Outcome]) -> list[tuple[float, str]]:
    """The tests that took longest, fixtures included."""
    found = []
    for outcome in outcomes:
        if outcome.check.report.exists():
            for case in ET.parse(outcome.check.report).iter("testcase"):
                name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
                found.append((float(case.get("time", 0)), name))
    return sorted(found, reverse=True)[:NUM_SLOWEST]


def print_report(outcomes: Sequence[Outcome], seconds: float) -> None:
    """The slowest tests, the table of the checks, and how many tests there were."""
    tests = slowest(outcomes)
    if tests:
        say(f"\nslowest {len(tests)} tests, fixtures included")
        say("\n".join(f"{took:8.1f} s  {name}" for took, name in tests))
    say("\ncheck       from s    took s  tests")
    for outcome in sorted(outcomes, key=lambda each: each.started):
        state = "" if outcome.status == 0 else "FAILED  "
        say(f"{outcome.check.name:10}{outcome.started:8.0f}{outcome.seconds:10.0f}  {state}{outcome.summary}".rstrip())
    counts: Counter[str] = Counter()
    for outcome in outcomes:
        for number, word in COUNTED.findall(outcome.summary):
            counts["failed" if word.startswith(("failed", "error")) else word] += int(number)
    failed = [outcome.check.name for outcome in outcomes if outcome.status != 0]
    say(f"\n{'FAILED: ' + ', '.join(failed) if failed else 'all passed'} in {seconds:.0f} s")
    if counts:
        say(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the checks side by side.")
    parser.add_argument("--all", action="store_true", help="also the tests that are marked slow")
    parser.add_argument("names", nargs="*", help="these checks alone")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mc2-", ignore_cleanup_errors=True) as scratch:
        return check(parser, arguments, lanes(arguments.all, Path(scratch)))


def check(parser: argparse.ArgumentParser, arguments: argparse.Namespace, plan: list[list[Check]]) -> int:
    """Run the checks that are wanted, and report; return the exit status."""
    known = [check.name for lane in plan for check in lane]
    unknown = [name for name in arguments.names if name not in known]
    if unknown:
        parser.error(f"no check {unknown[0]!r}; there are {', '.join(known)}")
    if arguments.names:
        plan = [[check for check in lane if check.name in arguments.names] for lane in plan]
    LOGS.mkdir(parents=True, exist_ok=True)
    for lane in plan:
        for check in lane:
            check.report.unlink(missing_ok=True)
    run = Run(plan)
    try:
        run.wait()
    except KeyboardInterrupt:
        run.stop()
        say("interrupted")
        return 130
    print_report(run.outcomes, run.seconds)
    return 1 if any(outcome.status for outcome in run.outcomes) else 0


if __name__ == "__main__":
    # As a shell that runs this in the background would have it otherwise.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
