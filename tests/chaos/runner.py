"""Rounds in a row, and what is said about them."""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.chaos.drive import Drive
from tests.chaos.fleet import Fleet
from tests.chaos.plan import Job, MemberSpec, Plan, Send, make_plan
from tests.chaos.points import ALL_POINTS
from tests.chaos.settle import Costs, Settle, measure_costs
from tests.chaos.tally import Tally

_PLAIN = MemberSpec(64, "recompute", 512, 10.0, None, True)
CALIBRATION = Plan(
    round=-1,
    members={"P0": _PLAIN, "D0": _PLAIN, "B0": _PLAIN},
    jobs=(Job("P0", 0, 1, 40, 0, (Send("D0", 0, "same", 3),)),),
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
        self._calibrate()
        started = time.monotonic()
        num_failed = 0
        for number in rounds:
            if not self._run_round(make_plan(self.tally.seed, number)):
                num_failed += 1
                if num_failed >= max_failures:
                    self._log(f"stopped after {num_failed} failed rounds")
                    break
        self.seconds = time.monotonic() - started

    def _calibrate(self) -> None:
        drive = Drive(self._fleet, CALIBRATION, Tally(0), lambda text: None)
        # One by one: an engine that starts knocks at the sockets of all others, which costs them a descriptor for a moment.
        for name, spec in CALIBRATION.members.items():
            member = self._fleet.start(name, spec)
            while member.baseline is None and member.alive:
                self._fleet.pump(1.0)
        if not drive.run() or drive.tally.ways != {"attach": 1}:
            raise RuntimeError(f"a plain hand-off fails: {dict(drive.tally.ways)} {drive.tally.problems}")
        self._costs = measure_costs(drive)
        self._fleet.kill_all()

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
        for _, kind, text in found:
            self._log(f"  {kind}: {text}")
        for member in self._fleet.members.values():
            self._log(f"  {member.name} {'alive' if member.alive else 'dead'}, pid {member.pid}, log {member.log}")
        self._fleet.kill_all()  # what has leaked must not be found again by the next round
        return False

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
