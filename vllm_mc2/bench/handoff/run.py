"""``vllm-mc2 bench handoff``: measure what is planned, report it."""

import contextlib
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import msgspec

from vllm_mc2.bench import registration
from vllm_mc2.bench.handoff import tables
from vllm_mc2.bench.handoff.cases import (
    GIB,
    MIB,
    OUR_WAYS,
    PEER_WAYS,
    SLEEPING_WAY,
    Case,
    LeftOut,
    Plan,
    Stage,
    make_plan,
)
from vllm_mc2.bench.handoff.fleet import Fleet, WorkerError
from vllm_mc2.bench.handoff.messages import Touch
from vllm_mc2.bench.handoff.results import (
    BlockSizes,
    FirstTouch,
    Report,
    Requests,
    Row,
    Samples,
    WayNotes,
    block_sizes_of,
    checks_of,
    first_touch_of,
    requests_of,
    row_of,
)
from vllm_mc2.bench.machine import describe_machine
from vllm_mc2.bench.progress import Progress
from vllm_mc2.bench.stats import Spread, spread

DONE, FAILED, WRONG_USAGE = 0, 1, 2
TOUCH_BYTES = GIB
QUICK_TOUCH_BYTES = 256 * MIB
TOUCH_REPEATS = 5
_REGISTRATION = "registration in vLLM's scheduler"
_MODULES = {"nixl": "nixl", "mooncake": "mooncake"}


@dataclasses.dataclass(frozen=True)
class Options:
    """The command line."""

    ways: tuple[str, ...]
    quick: bool
    max_bytes: int
    repeats: int | None
    json_path: Path | None
    output_dir: Path
    charts: bool


def run(options: Options) -> int:
    """Measure and report; the exit code."""
    for path in (options.output_dir, options.json_path.parent if options.json_path else options.output_dir):
        if not (path.is_dir() and os.access(path, os.W_OK)):
            print(f"vllm-mc2 bench handoff: {path} is not a directory that can be written to", file=sys.stderr)
            return WRONG_USAGE
    ways = [way for way in options.ways if way not in _MODULES or find_spec(_MODULES[way]) is not None]
    plan = make_plan(ways, quick=options.quick, max_bytes=options.max_bytes, available_bytes=available_memory_bytes())
    plan.left_out.extend(LeftOut(way, "not installed") for way in options.ways if way not in ways)
    try:
        with _ended_by_sigterm():
            report = Measurement(options, plan).run()
    except WorkerError as error:
        print(f"vllm-mc2 bench handoff: {error}", file=sys.stderr)
        return FAILED
    print(tables.render(report))
    if options.json_path is not None:
        options.json_path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    if options.charts:
        _draw(report, options.output_dir)
    return DONE


def _draw(report: Report, directory: Path) -> None:
    try:
        from vllm_mc2.bench.handoff.charts import draw
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "matplotlib":
            raise
        print('\nno charts: matplotlib is missing (pip install "vllm-mc2[bench]")')
        return
    print(f"\ncharts: {' '.join(str(path) for path in draw(report, directory))}")


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM unwinds like Ctrl-C does, so that nothing is left."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def available_memory_bytes() -> int:
    """What the kernel thinks can be allocated without swapping."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class Measurement:
    """One run."""

    def __init__(self, options: Options, plan: Plan) -> None:
        self._options = options
        self._plan = plan
        self._left_out = list(plan.left_out)
        self._apart: registration.Apart | None = None
        self._notes: dict[str, str] = {}
        self._rows: list[Row] = []
        self._requests: list[Requests] = []
        self._samples: list[Samples] = []
        self._touch_bytes = min(QUICK_TOUCH_BYTES if options.quick else TOUCH_BYTES, options.max_bytes)

    def run(self) -> Report:
        """Everything in the plan.

        Raises:
            WorkerError: a worker process ended or failed.
        """
        begin, machine = time.monotonic(), describe_machine()  # now: later the load is our own
        with contextlib.ExitStack() as stack:
            progress = stack.enter_context(Progress(self._num_turns()))
            fleet = stack.enter_context(Fleet())
            if self._is_registration_possible():
                # It imports vLLM while memory is made ready here, and sleeps from then on.
                self._apart = stack.enter_context(registration.Apart(quick=self._options.quick))
            for stage in self._plan.stages:
                self._measure_stage(fleet, stage, progress)
            block_sizes = self._measure_block_sizes(fleet, progress)
            first_touch = self._measure_first_touch(fleet, progress)
            registered = self._measure_registration()
        return Report(
            machine=machine,
            results=[row for row in self._rows if row.way != SLEEPING_WAY],
            sleeping=[row for row in self._rows if row.way == SLEEPING_WAY],
            requests=self._requests,
            block_size_case=block_sizes,
            cold_us=self._cold(),
            first_touch=first_touch,
            registration=registered,
            memcpy_by_means=self._memcpy_by_means(),
            receiver_growth_bytes={
                each.case.label: each.grown_bytes for each in self._samples if each.grown_bytes is not None
            },
            ways=self._way_notes(),
            left_out=self._left_out,
            checks=checks_of(self._rows, self._requests, block_sizes, registered),
            repeats={each.case.label: len(each.total_us) for each in self._samples},
            seconds=time.monotonic() - begin,
        )

    def _repeats(self, case: Case, *, alone: bool) -> int:
        """Large copies take long; where only ours is measured, repeats cost next to nothing."""
        if self._options.repeats is not None:
            return self._options.repeats
        if alone:
            return 30 if self._options.quick else 100
        sizes = ((64 * MIB, 60, 10), (512 * MIB, 30, 5), (GIB, 20, 5))
        for limit, full, quick in sizes:
            if case.kv_bytes <= limit:
                return quick if self._options.quick else full
        return 3 if self._options.quick else 15

    def _num_turns(self) -> int:
        turns = 0
        for stage in self._plan.stages:
            for group in stage.groups:
                alone = _is_alone(stage)
                turns += len(stage.ways) * len(group) * (1 + self._repeats(group[-1], alone=alone))
        if self._plan.block_sizes:
            turns += 2 * (1 + self._repeats(self._plan.block_sizes[0], alone=True))
        return turns

    def _measure_stage(self, fleet: Fleet, stage: Stage, progress: Progress) -> None:
        cache = Case(stage.kv_bytes)
        opened = fleet.open(stage.ways, [cache], stage.kv_bytes)
        self._await_registration()
        self._notes |= opened.notes
        self._left_out += [LeftOut(way, reason) for way, reason in opened.absent.items()]
        ways = [way for way in stage.ways if way not in opened.absent]
        for group in stage.groups:
            repeats = self._repeats(group[-1], alone=_is_alone(stage))
            samples = self._interleave(fleet, [(way, case, 0) for case in group for way in ways], repeats, progress)
            for each in samples:
                # A batch that accompanies a larger one has its line already.
                if not any((row.way, row.kv_bytes, row.batch) == _key(each) for row in self._rows):
                    self._rows.append(row_of(each))
                    self._samples.append(each)
                if each.case.batch > 1 and each.request_us:
                    self._requests.append(requests_of(each, group))
        fleet.close()

    def _interleave(
        self, fleet: Fleet, work: Sequence[tuple[str, Case, int]], repeats: int, progress: Progress
    ) -> list[Samples]:
        """Every way and case once per repeat, each time beginning with another one. The first round checks every byte."""
        samples = [Samples(way, case) for way, case, _ in work]
        for repeat in range(-1, repeats):
            first = max(0, repeat) % len(work)
            for index in (*range(first, len(work)), *range(first)):
                way, case, cache = work[index]
                check_all = repeat < 0
                sent, received = fleet.turn(way, case, cache, check_all=check_all)
                samples[index].add(sent, received, check_all=check_all)
                progress.step(f"{case.label} by {way}")
        return samples

    def _measure_block_sizes(self, fleet: Fleet, progress: Progress) -> BlockSizes | None:
        cases = self._plan.block_sizes
        if not cases:
            return None
        fleet.open(["mc2"], cases, 0)
        self._await_registration()
        work = [("mc2", case, cache) for cache, case in enumerate(cases)]
        small, large = self._interleave(fleet, work, self._repeats(cases[0], alone=True), progress)
        fleet.close()
        return block_sizes_of(small, large)

    def _measure_first_touch(self, fleet: Fleet, progress: Progress) -> list[FirstTouch]:
        measured = []
        kinds: tuple[Literal["auto", "off"], ...] = ("auto", "off")
        for huge_pages in kinds:
            progress.step(f"first touch, huge pages {huge_pages}", 0)
            touched = fleet.touch(Touch(huge_pages, self._touch_bytes, 3 if self._options.quick else TOUCH_REPEATS))
            measured.append(first_touch_of(huge_pages, self._touch_bytes, touched))
        return measured

    def _is_registration_possible(self) -> bool:
        if "mc2" not in self._options.ways:
            return False
        if not registration.is_possible():
            self._left_out.append(LeftOut(_REGISTRATION, "vLLM is not installed"))
            return False
        return True

    def _await_registration(self) -> None:
        """Nothing is timed while vLLM is being imported."""
        if self._apart is not None:
            try:
                self._apart.await_ready()
            except registration.RegistrationError as error:
                self._left_out.append(LeftOut(_REGISTRATION, str(error)))
                self._apart = None

    def _measure_registration(self) -> list[registration.Registration]:
        self._await_registration()
        if self._apart is None:
            return []
        try:
            return self._apart.measure()
        except registration.RegistrationError as error:
            self._left_out.append(LeftOut(_REGISTRATION, str(error)))
            return []

    def _memcpy_by_means(self) -> dict[str, dict[str, Spread]]:
        return {
            each.case.label: {means: spread(samples) for means, samples in sorted(each.by_means_us.items())}
            for each in self._samples
            if each.by_means_us
        }

    def _cold(self) -> dict[str, dict[str, Spread]]:
        cold: dict[str, dict[str, Spread]] = {}
        for each in self._samples:
            if each.cold_us:
                cold.setdefault(each.way, {})[each.case.label] = spread(each.cold_us)
        return cold

    def _way_notes(self) -> dict[str, WayNotes]:
        notes = {}
        for way in dict.fromkeys(each.way for each in self._samples):
            control = {each.case.label: each.control_bytes for each in self._samples if each.way == way}
            note = self._notes.get(way, "own processes, stopped between turns" if way in PEER_WAYS else "")
            notes[way] = WayNotes(note, control)
        return notes


def _is_alone(stage: Stage) -> bool:
    return all(way in OUR_WAYS for way in stage.ways)


def _key(samples: Samples) -> tuple[str, int, int]:
    return samples.way, samples.case.kv_bytes, samples.case.batch
