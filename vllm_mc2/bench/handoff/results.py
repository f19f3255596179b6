"""From samples to figures: rows, batches request by request, and the checks against the project's goals."""

from collections.abc import Iterable, Sequence

import msgspec

from vllm_mc2.bench.handoff.cases import BIG_BLOCK_FACTOR, OUR_WAYS, REQUEST_BYTES, Case, LeftOut
from vllm_mc2.bench.handoff.messages import Received, Sent, Touched
from vllm_mc2.bench.registration import Registration
from vllm_mc2.bench.stats import Spread, spread

MAX_SINGLE_US = 300.0
MIN_SPEEDUP = 300.0
MAX_BATCH_GROWTH = 1.1
MAX_BLOCK_GROWTH = 1.2
MAX_REGISTRATION_US = 3.0


class Samples:
    """Everything measured of one case by one way, in one stage."""

    def __init__(self, way: str, case: Case) -> None:
        self.way = way
        self.case = case
        self.total_us: list[float] = []
        self.request_us: list[list[float]] = []
        """For each repeat, each request from the start of its own hand-over until it was ready."""
        self.sender_us: list[float] = []
        """For each repeat, the sender's time for a request."""
        self.read_us: list[float] = []
        self.cold_us: list[float] = []
        """The first of the small requests before each turn, right after other ways have been at work."""
        self.by_means_us: dict[str, list[float]] = {}
        """``memcpy``: the same by each of several means. The fastest counts."""
        self.metadata_bytes: set[int] = set()
        self.control_bytes = 0
        self.receiver_kv_bytes = 0
        self.grown_bytes: int | None = None
        self.is_verified_in_full = False
        self.is_right = True

    def add(self, sent: Sent, received: Received, *, check_all: bool) -> None:
        """Take a turn in. One that checks everything is not timed: it comes first, and warms up."""
        self.is_right = self.is_right and received.verified
        self.receiver_kv_bytes = received.kv_bytes
        if check_all:
            self.is_verified_in_full = received.verified
            self.grown_bytes = received.grown_bytes
            return
        self.read_us.append(received.read_ns / 1e3 / self.case.batch)
        if received.took_ns:
            for means, nanoseconds in received.took_ns.items():
                self.by_means_us.setdefault(means, []).append(nanoseconds / 1e3)
            self.total_us = self.by_means_us[self.fastest_means]
            return
        started, ready = sent.started_ns, received.ready_ns
        self.cold_us.append((received.cold_ready_ns[0] - sent.cold_started_ns[0]) / 1e3)
        self.total_us.append((ready[-1] - started[0]) / 1e3)
        self.request_us.append([(end - begin) / 1e3 for begin, end in zip(started, ready, strict=True)])
        self.sender_us.append((sent.ended_ns - started[0]) / 1e3 / self.case.batch)
        self.metadata_bytes |= set(sent.metadata_bytes)
        self.control_bytes = sent.control_bytes

    @property
    def fastest_means(self) -> str:
        """By the median."""
        return min(self.by_means_us, key=lambda means: spread(self.by_means_us[means]).median)

    @property
    def verified(self) -> bool:
        """Every byte once, and the stamps of every repeat."""
        return self.is_verified_in_full and self.is_right

    @property
    def total(self) -> Spread:
        """The whole batch, microseconds."""
        return spread(self.total_us)


class Row(msgspec.Struct, frozen=True):
    """One line of ``results``. Times are those of the whole batch of ``batch`` requests, which together are ``kv_bytes``."""

    way: str
    kv_bytes: int
    batch: int
    median_us: float
    p10_us: float
    p90_us: float
    metadata_bytes: int
    """On the wire, for each request."""
    receiver_kv_bytes: int
    verified: bool


class Requests(msgspec.Struct, frozen=True):
    """The requests of a batch, one by one, each from the start of its own hand-over until it was ready."""

    way: str
    kv_bytes: int
    batch: int
    per_request_us: Spread
    """Batch time divided by the number of requests."""
    median_us: float
    """Of all requests of all repeats."""
    max_us: float
    """The slowest request of a repeat; median over the repeats."""
    worst_us: float
    """The slowest request of all."""
    sender_us: float
    """The sender's own time for each request, median."""
    first_and_last_byte_us: float
    """Reading both afterwards, for each request."""
    measured_with: list[int]
    """Batches that were interleaved with this one. Only such figures should be divided by each other."""


class BlockSizes(msgspec.Struct, frozen=True):
    """The same number of blocks, of two sizes, in the same repeats."""

    num_blocks: int
    block_bytes: list[int]
    kv_bytes: list[int]
    us: list[Spread]
    growth: float
    """Ratio of the medians."""
    verified: bool


class FirstTouch(msgspec.Struct, frozen=True):
    """A new mapping of a peer's pool; medians in microseconds."""

    huge_pages: str
    method: str
    page_bytes: int
    kv_bytes: int
    map_us: float
    cold_touch_us: float
    """Reading one byte of every 4 KiB without filling in page tables first."""
    prefault_us: float
    warm_touch_us: float
    """The same after filling them in."""
    unmap_us: float


class Check(msgspec.Struct, frozen=True):
    """A goal, and whether this run met it."""

    check: str
    limit: str
    measured: float
    ok: bool


class WayNotes(msgspec.Struct, frozen=True):
    """What there is to know about a way besides its times."""

    note: str
    control_bytes: dict[str, int]
    """Bytes besides the KV, for a whole batch, by case."""


class Report(msgspec.Struct, frozen=True):
    """What ``--json`` writes."""

    @property
    def rows(self) -> list[Row]:
        """All lines of all ways."""
        return [*self.results, *self.sleeping]

    machine: dict[str, str | int | float]
    results: list[Row]
    sleeping: list[Row]
    """``mc2`` once more, with a receiver that has to be woken up: how long that takes is up to the host's scheduler."""
    requests: list[Requests]
    block_size_case: BlockSizes | None
    cold_us: dict[str, dict[str, Spread]]
    """By way and case: the first of the small requests that go before every turn to warm up after the others."""
    first_touch: list[FirstTouch]
    registration: list[Registration]
    memcpy_by_means: dict[str, dict[str, Spread]]
    """The same copy by several means, by case, microseconds. The fastest is the way ``memcpy``."""
    receiver_growth_bytes: dict[str, int]
    """By how much the receiver's own memory grew while it held and read everything handed over by ``mc2``, by case."""
    ways: dict[str, WayNotes]
    left_out: list[LeftOut]
    checks: list[Check]
    repeats: dict[str, int]
    seconds: float


def row_of(samples: Samples) -> Row:
    """The line for ``results``."""
    total = samples.total
    return Row(
        samples.way,
        samples.case.kv_bytes,
        samples.case.batch,
        total.median,
        total.p10,
        total.p90,
        max(samples.metadata_bytes, default=0),
        samples.receiver_kv_bytes,
        samples.verified,
    )


def requests_of(samples: Samples, companions: Iterable[Case]) -> Requests:
    """The batch, request by request."""
    batch = samples.case.batch
    everything = [each for repeat in samples.request_us for each in repeat]
    slowest = [max(repeat) for repeat in samples.request_us]
    return Requests(
        way=samples.way,
        kv_bytes=samples.case.kv_bytes,
        batch=batch,
        per_request_us=spread([total / batch for total in samples.total_us]),
        median_us=spread(everything).median,
        max_us=spread(slowest).median,
        worst_us=max(everything),
        sender_us=spread(samples.sender_us).median,
        first_and_last_byte_us=spread(samples.read_us).median,
        measured_with=[case.batch for case in companions if case != samples.case],
    )


def block_sizes_of(small: Samples, large: Samples) -> BlockSizes:
    """The comparison of both."""
    both = (small, large)
    return BlockSizes(
        num_blocks=small.case.num_blocks,
        block_bytes=[each.case.kv_bytes // each.case.num_blocks for each in both],
        kv_bytes=[each.case.kv_bytes for each in both],
        us=[each.total for each in both],
        growth=large.total.median / small.total.median,
        verified=small.verified and large.verified,
    )


def first_touch_of(huge_pages: str, num_bytes: int, touched: Touched) -> FirstTouch:
    """Medians."""

    def median(samples_ns: Sequence[int]) -> float:
        return spread(samples_ns).median / 1e3

    return FirstTouch(
        huge_pages,
        touched.method,
        touched.page_bytes,
        num_bytes,
        median(touched.map_ns),
        median(touched.cold_touch_ns),
        median(touched.prefault_ns),
        median(touched.warm_touch_ns),
        median(touched.unmap_ns),
    )


def checks_of(
    rows: Sequence[Row],
    requests: Sequence[Requests],
    block_sizes: BlockSizes | None,
    registration: Sequence[Registration],
) -> list[Check]:
    """Every goal that this run can say something about."""
    checks: list[Check] = []
    ours = [row for row in rows if row.way == "mc2"]

    def at_most(check: str, limit: float, unit: str, measured: float) -> None:
        checks.append(Check(check, f"<= {limit:g}{unit}", measured, measured <= limit))

    for each in requests:
        if each.way == "mc2" and each.batch == 32 and not each.measured_with:
            what = f"slowest of 32 requests of 64 MiB, median over repeats (worst of all {each.worst_us:.0f} us)"
            at_most(what, MAX_SINGLE_US, " us", each.max_us)
    for row in ours:
        if row.batch == 32:
            checks += _speedup(row, [other for other in rows if other.way not in OUR_WAYS and other.batch == 32])
    beside = {
        each.batch: each for each in requests if each.way == "mc2" and each.measured_with and each.batch in {32, 128}
    }
    if len(beside) == 2:
        growth = beside[128].per_request_us.median / beside[32].per_request_us.median
        at_most("time per request, 128 requests against 32", MAX_BATCH_GROWTH, "x", growth)
    if block_sizes is not None:
        what = f"time with {block_sizes.num_blocks} blocks {BIG_BLOCK_FACTOR} times larger"
        at_most(what, MAX_BLOCK_GROWTH, "x", block_sizes.growth)
    if ours:
        sizes = {row.metadata_bytes for row in ours}
        at_most("sizes of metadata per request, over all amounts of KV", 1, " size", float(len(sizes)))
        at_most("KV bytes allocated by the receiver", 0, " bytes", float(max(row.receiver_kv_bytes for row in ours)))
    if rows:
        at_most("ways and cases with a wrong byte", 0, "", float(sum(not row.verified for row in rows)))
    for registered in registration:
        what = f"registering {registered.num_blocks} borrowed blocks, time per block"
        at_most(what, MAX_REGISTRATION_US, " us", registered.attach_us_per_block.median)
    return checks


def _speedup(ours: Row, others: Sequence[Row]) -> list[Check]:
    if not others:
        return []
    fastest = min(others, key=lambda row: row.median_us)
    speedup = fastest.median_us / ours.median_us
    what = f"32 requests of {REQUEST_BYTES >> 20} MiB, times faster than {fastest.way}, the fastest that copies"
    return [Check(what, f">= {MIN_SPEEDUP:g}x", speedup, speedup >= MIN_SPEEDUP)]
