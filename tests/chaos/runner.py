"""Rounds in a row, and what is said about them."""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.chaos.drive import Drive
from tests.chaos.fleet import Fleet, Member
from tests.chaos.footprint import footprint
from tests.chaos.plan import Job, MemberSpec, Plan, Send, make_plan
from tests.chaos.points import ALL_POINTS
from tests.chaos.settle import Costs, Settle
from tests.chaos.tally import Kind, Tally

REST_LOOKS = 25

_PLAIN = MemberSpec(64, "recompute", 512, 10.0, None, True, "auto")
CALIBRATION = Plan(
    round=-1,
    members={"P0": _PLAIN, "D0": _PLAIN, "B0": _PLAIN},
    jobs=(Job("P0", 0, 1, 40, 0, (Send("D0", 0, "same", 3),)),),
    pokes=(),
    faults=(),
    offer_seconds=5.0,
    churns=False,
    fresh=(),
    quiet=False,
)
"""One plain hand-off."""


class Runner:
    """Owns the fleet over all rounds; a context manager that leaves no process behind."""

    def __init__(
        self, seed: int, *, package: str | None = None, log: Callable[[str], None] = print, verbose: bool = False
    ) -> None:
        self.tally = Tally(seed)
        self._log = log
        self._verbose = verbose
        self._workdir = Path(tempfile.mkdtemp(prefix="mc2-chaos-"))
        self._costs: Costs | None = None
        self.seconds = 0.0
        self._fleet = Fleet(self._workdir, package)

    def __enter__(self) -> "Runner":
        return self

    def __exit__(self, *exception: object) -> None:
        self._fleet.close()
        if not self.tally.problems and exception[0] is None:
            shutil.rmtree(self._workdir, ignore_errors=True)
        else:
            self._log(f"logs are kept in {self._workdir}")

    def run(self, rounds: Iterable[int], max_failures: int) -> None:
        """Run the rounds; stops after ``max_failures`` that failed."""
        started = time.monotonic()
        num_failed = 0
        if not self._calibrate():
            self._log("not even a plain hand-off is in order:")
            self._log_problems(self.tally.problems)
            return
        for number in rounds:
            if not self._run_round(make_plan(self.tally.seed, number)):
                num_failed += 1
                if num_failed >= max_failures:
                    self._log(f"stopped after {num_failed} failed rounds")
                    break
        self.seconds = time.monotonic() - started

    def _calibrate(self) -> bool:
        """Measure what engines and sessions cost; False when not even one plain hand-off is in order."""
        # One by one: an engine that starts knocks at all sockets, its own too, which costs a descriptor for a moment.
        idle = {}
        for name, spec in CALIBRATION.members.items():
            member = self._fleet.start(name, spec)
            while member.baseline is None and member.alive:
                self._fleet.pump(1.0)
            idle[name[0]] = self._rest(member)
        drive = Drive(self._fleet, CALIBRATION, self.tally, self._log)
        settle = Settle(drive, None)
        if not (drive.run() and settle.run()) or self.tally.problems:
            return False
        self._costs = settle.costs_now(idle)
        self._log(f"descriptors and threads: {self._costs.idle} of idle engines, {self._costs.session} per session")
        self._fleet.kill_all()
        return True

    def _rest(self, member: Member) -> tuple[int, int]:
        """Its descriptors and threads, once they have not changed for a while."""
        same: list[tuple[int, int]] = []
        while member.alive and len(same) < REST_LOOKS:
            self._fleet.pump(0.02)
            found = footprint(member.pid)
            if found is not None:
                now = found.fds, found.threads
                same = [*same, now] if same[-1:] == [now] else [now]
        return same[-1] if same else (0, 0)

    def _run_round(self, plan: Plan) -> bool:
        tally, before = self.tally, len(self.tally.problems)
        lines: list[str] = []
        drive = Drive(self._fleet, plan, tally, self._log if self._verbose else lines.append)
        if self._verbose:
            self._log(
                f"round {plan.round}: {len(plan.jobs)} prompts, {', '.join(plan.members)}, {len(plan.faults)} faults"
            )
        started = time.monotonic()
        if drive.run():
            settle = Settle(drive, self._costs)
            settle.run()
            self._take_stats(settle)
        tally.rounds += 1
        found = tally.problems[before:]
        if not found:
            if self._verbose:
                self._log(f"    fine after {time.monotonic() - started:.2f} s")
            return True
        self._log(f"round {plan.round} FAILED after {time.monotonic() - started:.1f} s; repeat it with "
                  f"--seed {tally.seed} --only {plan.round}")  # fmt: skip
        for line in lines:
            self._log(line)
        self._log_problems(found)
        for member in self._fleet.members.values():
            self._log(f"  {member.name} {'alive' if member.alive else 'dead'}, pid {member.pid}, log {member.log}")
        self._fleet.kill_all()  # what has leaked must not be found again by the next round
        return False

    def _log_problems(self, problems: list[tuple[int, Kind, str]]) -> None:
        for _, kind, text in problems:
            self._log(f"  {kind}: {text}")

    def _take_stats(self, settle: Settle) -> None:
        for report in settle.reports.values():
            for key, value in report["stats"].items():
                if key.startswith("leases"):
                    self.tally.lease_ends[key] += int(value)

    def summary(self) -> list[str]:
        """Figures of the run, before its last line."""
        tally = self.tally
        rate = tally.rounds / self.seconds if self.seconds else 0.0
        started = f"{self._fleet.num_started} engines started"
        lines = [f"{tally.rounds} rounds in {self.seconds:.0f} s ({rate:.2f} a second), {started}"]
        counters = {
            "faults": tally.faults, "requests": tally.ways, "leases": tally.lease_ends, "prefix cache resets": tally.resets,
        }  # fmt: skip
        for title, counter in counters.items():
            lines.append(f"{title}: " + (", ".join(f"{name}: {n}" for name, n in counter.most_common()) or "none"))
        lines.append(f"points: {len(tally.points)} struck; never: "
                     + (", ".join(_short(p) for p in sorted(set(ALL_POINTS) - set(tally.points))) or "none"))  # fmt: skip
        return lines


def _short(point: str) -> str:
    return point.rpartition(":")[2]
