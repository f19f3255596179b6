"""After a round: everything must come back to where it was, by itself, and within a bounded time.

Nothing is reset between rounds; engines that survive go on, so that what leaks adds up.
"""

import time
from collections import Counter
from typing import NamedTuple

from tests.chaos.drive import Drive
from tests.chaos.fleet import Fleet, Member
from tests.chaos.footprint import INDEX, LEDGER, POOL, Footprint, footprint, open_files
from tests.support.processes import Message
from vllm_mc2.channel import sweep_stale_sockets

SETTLE_SECONDS = 60.0
IDLE_SECONDS = 30.0
ANSWER_SECONDS = 60.0
_CLEAN = {"used_blocks": 0, "book": 0, "requests": [], "known": []}


class Costs(NamedTuple):
    """Descriptors and threads of an engine, measured once with fresh ones: of an idle one, by the first letter of its name,
    and of one open session more on prefill's side (``P``) and on decode's (``D``).
    """

    idle: dict[str, tuple[int, int]]
    session: dict[str, tuple[int, int]]


class Settle:
    """Ticks the survivors until nothing is left over, or the time is up."""

    def __init__(self, drive: Drive, costs: Costs | None) -> None:
        self._drive = drive
        self._fleet: Fleet = drive.fleet
        self._costs = costs
        self._ticks = 0
        self.reports: dict[str, Message] = {}
        self.prints: dict[str, Footprint] = {}

    def run(self) -> bool:
        """False when something leaks or does not answer; it is in the tally then."""
        if self._drive.plan.quiet and not self._settle_idle():
            return False
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            unanswered = self._tick()
            if unanswered:
                self._drive.tally.add("hangs", f"{unanswered} do not answer any more")
                self._drive._hang()
                return False
            problems = self._problems() or self._leftovers()
            if not problems:
                return True
            if time.monotonic() >= deadline:
                for problem in problems:
                    self._drive.tally.add("leaks", problem)
                return False
            time.sleep(0.02)

    def _settle_idle(self) -> bool:
        """Nobody sends a request: even so, idle decodes must give dead prefills' memory back."""
        deadline = time.monotonic() + IDLE_SECONDS
        while True:
            self.prints = {m.name: print_ for m in self._fleet.alive if (print_ := footprint(m.pid)) is not None}
            problems = []
            for member in self._fleet.alive:
                if member.name in self.prints and self._dead_pools(member):
                    problems.append(f"{member.name}: pools of dead prefills stay mapped while it is idle")
            if not problems:
                return True
            if time.monotonic() >= deadline:
                for problem in problems:
                    self._drive.tally.add("leaks", problem)
                return False
            self._fleet.pump(0.02)

    def _dead_pools(self, member: Member) -> set[int]:
        own = {m.inode for o in self._fleet.alive if o.baseline for m in o.baseline.maps if m.kind == POOL}
        return self.prints[member.name].inodes(POOL) - own

    def _tick(self) -> list[str]:
        """A tiny request for each survivor, so that its hooks run; then its report. Names of those that do not answer."""
        deadline = time.monotonic() + ANSWER_SECONDS
        self._ticks += 1
        for member in self._fleet.alive:
            name = f"{self._drive.plan.round}.tick{self._ticks}.{member.name}"
            self._drive.add(member, name, [self._ticks % 900], None, 1, "tick")
        while self._drive.is_busy and time.monotonic() < deadline:
            self._drive.turn(deadline)
        unanswered = []
        self.reports, self.prints = {}, {}
        for member in self._fleet.alive:
            report = self._fleet.ask(member, deadline, "report")
            if report is None:
                unanswered.append(member.name)
                continue
            self.reports[member.name] = report
            found = footprint(member.pid)
            if found is not None:
                self.prints[member.name] = found
        return unanswered

    def _problems(self) -> list[str]:
        problems = []
        for member in self._fleet.alive:
            report = self.reports[member.name]
            for key, clean in _CLEAN.items():
                if report[key] != clean:
                    problems.append(f"{member.name}: {key} is {report[key]}")
            for key, value in report["snapshot"].items():
                if value not in (0, [], {}, False):
                    problems.append(f"{member.name}: {key} is {value}")
            problems += self._map_problems(member)
            if not problems and self._costs is not None:
                problems += self._count_problems(member, self._costs)
        return problems

    def _map_problems(self, member: Member) -> list[str]:
        """Mappings of dead engines' memory, or more of them than there should be."""
        mine, others = self.prints[member.name], [self.prints[o.name] for o in self._fleet.alive]
        assert member.baseline is not None
        problems = []
        lent = set().union(*(print_.inodes(LEDGER, writable=False) for print_ in others))
        used = set().union(*(print_.inodes(LEDGER, writable=True) for print_ in others))
        if gone := mine.inodes(LEDGER, writable=True) - lent:
            problems.append(f"{member.name}: {len(gone)} ledgers towards dead prefills are mapped")
        if gone := mine.inodes(LEDGER, writable=False) - used:
            problems.append(f"{member.name}: {len(gone)} ledgers of dead decodes are kept")
        num_peers = len(mine.inodes(LEDGER, writable=True))
        for kind in (POOL, INDEX):
            own = {m.inode for o in self._fleet.alive if o.baseline for m in o.baseline.maps if m.kind == kind}
            if gone := mine.inodes(kind) - own:
                problems.append(f"{member.name}: {kind} of {len(gone)} dead prefills is mapped")
            baseline = Counter({m: n for m, n in member.baseline.maps.items() if m.kind == kind})
            foreign = Counter({m: n for m, n in mine.maps.items() if m.kind == kind}) - baseline
            # A pool is mapped once per layer in the window, which the kernel shows as one range outside of it.
            ranges = 3 if kind == POOL else 1
            if len(foreign) != num_peers or sum(foreign.values()) > ranges * num_peers:
                problems.append(f"{member.name}: {sum(foreign.values())} ranges of {kind}, with {num_peers} sessions")
        return problems

    def _count_problems(self, member: Member, costs: Costs) -> list[str]:
        """Descriptors and threads: the engine's own number at start, and a fixed one per open session."""
        mine = self.prints[member.name]
        sessions, peers = len(mine.inodes(LEDGER, writable=False)), len(mine.inodes(LEDGER, writable=True))
        (fds, threads), lender, borrower = costs.idle[member.name[0]], costs.session["P"], costs.session["D"]
        fds += sessions * lender[0] + peers * borrower[0]
        # An upper bound: a thread that starts with the first session may serve all of them, and stay.
        threads += max(1, sessions) * lender[1] + max(1, peers) * borrower[1]
        threads += 1  # the one that copies, from the first pull on
        problems = []
        if mine.fds != fds:
            problems.append(
                f"{member.name}: {mine.fds} descriptors, expected {fds} ({sessions} + {peers} sessions): {open_files(member.pid)}"
            )
        if mine.threads > threads:
            problems.append(f"{member.name}: {mine.threads} threads, expected at most {threads}")
        return problems

    def costs_now(self, idle: dict[str, tuple[int, int]]) -> Costs:
        """With fresh engines after one hand-off from P0 to D0 that has settled."""
        session = {}
        for member in self._fleet.alive:
            kind, now = member.name[0], self.prints[member.name]
            if now.inodes(LEDGER):
                session[kind] = now.fds - idle[kind][0], now.threads - idle[kind][1]
        if set(session) != {"P", "D"}:
            raise RuntimeError(f"sessions after a hand-off: {session}")
        return Costs(idle, session)

    def _leftovers(self) -> list[str]:
        """Processes and socket files. Only now: the forked children of dead engines have kept their sockets until here."""
        problems = []
        may_leave = any(member.has_sleeper for member in self._fleet.members.values())
        if self._fleet.end_orphans() and not may_leave:
            problems.append("an engine left a process behind")
        directory = self._fleet.directory
        sweep_stale_sockets(directory, patience_seconds=0.5)
        found = {path.name for path in directory.iterdir()}
        expected = {name for member in self._fleet.alive for name in member.sockets}
        if found - expected:
            problems.append(
                f"{len(found - expected)} files of dead engines in the socket directory: {sorted(found - expected)}"
            )
        if expected - found:
            problems.append(f"sockets of live engines are gone: {sorted(expected - found)}")
        return problems
