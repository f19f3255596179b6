"""What the command prints: times, ratios, and how the goals were met. Pure text."""

from collections.abc import Sequence

from vllm_mc2.bench.handoff.cases import OUR_WAYS, WAYS, human_bytes
from vllm_mc2.bench.handoff.results import Report, Row
from vllm_mc2.bench.stats import Spread

CELL = 20
_TITLES = {
    "mc2": "mc2 (in place)",
    "mc2_sleep": "mc2, decode asleep",
    "memcpy": "memcpy (bound)",
    "two_copy": "two copies",
    "tcp": "TCP",
}


def render(report: Report) -> str:
    """The whole report."""
    sections = [
        _machine(report),
        _times("KV handed over as one request", [row for row in report.rows if row.batch == 1]),
        _times("Batches of requests of 64 MiB, one after the other", [row for row in report.rows if row.batch > 1]),
        _requests(report),
        _block_sizes(report),
        _first_touch(report),
        _registration(report),
        _notes(report),
        _left_out(report),
        _checks(report),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def duration(microseconds: float) -> str:
    """Three digits and the unit that fits."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= size:
            return f"{microseconds / size:.3g} {unit}"
    return f"{microseconds:.3g} us"


def _machine(report: Report) -> list[str]:
    machine = report.machine
    memory = human_bytes(float(machine["memory_bytes"]))
    line = f"{machine['cpu']}, {machine['num_cores']} cores, {memory}, Linux {machine['kernel']}"
    versions = ", ".join(f"{name} {machine[name]}" for name in ("torch", "vllm", "nixl", "mooncake") if name in machine)
    return [line, f"{versions}; load {machine['load_1_minute']:.1f} before; {report.seconds:.0f} s"]


def _times(title: str, rows: Sequence[Row]) -> list[str]:
    """Two lines for each case: the median and how many times ours it is, then the 10th to the 90th percentile."""
    if not rows:
        return []
    ways = [way for way in WAYS if any(row.way == way for row in rows)]
    lines = [f"{title}: median, times ours; below, 10th to 90th percentile"]
    lines.append(f"{'':14}" + "".join(f"{_TITLES.get(way, way):<{CELL}}" for way in ways).rstrip())
    for batch, kv_bytes in dict.fromkeys((row.batch, row.kv_bytes) for row in rows):
        found = {row.way: row for row in rows if (row.batch, row.kv_bytes) == (batch, kv_bytes)}
        label = f"{batch} = {human_bytes(kv_bytes)}" if batch > 1 else human_bytes(kv_bytes)
        ours = found.get("mc2")
        first = second = ""
        for way in ways:
            row = found.get(way)
            first += f"{_median(row, ours):<{CELL}}"
            second += f"{'' if row is None else f'{duration(row.p10_us)} - {duration(row.p90_us)}':<{CELL}}"
        lines += [f"{label:<14}{first}".rstrip(), f"{'':<14}{second}".rstrip()]
    if not all(row.verified for row in rows):
        wrong = ", ".join(f"{row.way} {row.batch} x {human_bytes(row.kv_bytes)}" for row in rows if not row.verified)
        lines.append(f"WRONG BYTES: {wrong}")
    return lines


def _median(row: Row | None, ours: Row | None) -> str:
    if row is None:
        return "-"
    if ours is None or row is ours:
        return duration(row.median_us)
    return f"{duration(row.median_us)}  {row.median_us / ours.median_us:,.0f}x"


def _requests(report: Report) -> list[str]:
    ours = [each for each in report.requests if each.way in OUR_WAYS]
    if not ours:
        return []
    lines = ["Requests of a batch, each from its own publication until its block table is there, us"]
    lines.append(
        f"{'batch':>7}{'batch/n':>10}{'median':>9}{'slowest':>9}{'worst':>9}{'sender':>9}  then first+last byte"
    )
    for each in ours:
        beside = f"  beside {', '.join(map(str, each.measured_with))}" if each.measured_with else ""
        lines.append(
            f"{each.way:<10}{each.batch:>7}{each.per_request_us.median:>10.1f}{each.median_us:>9.1f}{each.max_us:>9.1f}"
            f"{each.worst_us:>9.1f}{each.sender_us:>9.1f}{each.first_and_last_byte_us:>10.1f}{beside}"
        )
    return lines


def _block_sizes(report: Report) -> list[str]:
    case = report.block_size_case
    if case is None:
        return []
    lines = [f"{case.num_blocks} blocks of two sizes, mc2"]
    for block_bytes, kv_bytes, us in zip(case.block_bytes, case.kv_bytes, case.us, strict=True):
        lines.append(f"  {human_bytes(block_bytes):>8} a block, {human_bytes(kv_bytes):>8} of KV: {_range(us)}")
    return [*lines, f"  {case.growth:.2f}x{'' if case.verified else ', WRONG BYTES'}"]


def _range(us: Spread) -> str:
    return f"{duration(us.median)} ({duration(us.p10)} - {duration(us.p90)})"


def _first_touch(report: Report) -> list[str]:
    if not report.first_touch:
        return []
    lines = [
        "A new mapping of a peer's pool, once per peer and never per request",
        f"{'pages':>24}{'map':>10}{'cold read':>12}{'fill tables':>13}{'read then':>12}{'unmap':>10}",
    ]
    for each in report.first_touch:
        pages = f"{human_bytes(each.kv_bytes)}, {human_bytes(each.page_bytes)} ({each.method})"
        times = (each.map_us, each.cold_touch_us, each.prefault_us, each.warm_touch_us, each.unmap_us)
        widths = (10, 12, 13, 12, 10)
        cells = "".join(f"{duration(us):>{width}}" for us, width in zip(times, widths, strict=True))
        lines.append(f"{pages:>24}{cells}")
    return lines


def _registration(report: Report) -> list[str]:
    if not report.registration:
        return []
    lines = ["Registering borrowed blocks in vLLM's scheduler, us per block"]
    for each in report.registration:
        lines.append(
            f"{each.num_blocks:>7} blocks: {each.attach_us_per_block.median:.2f} to enter,"
            f" {each.end_us_per_block.median:.2f} to take out again"
        )
    return lines


def _notes(report: Report) -> list[str]:
    lines = [f"  {way}: {notes.note}" for way, notes in report.ways.items() if notes.note]
    for label, by_means in list(report.memcpy_by_means.items())[-1:]:
        lines += [f"  {means}, {label}: {_range(us)}" for means, us in by_means.items()]
    cold = report.cold_us.get("mc2")
    if cold:
        low, high = (pick(each.median for each in cold.values()) for pick in (min, max))
        lines.append(
            f"  mc2, a request right after other ways have emptied the caches: {duration(low)} - {duration(high)}"
        )
    if report.receiver_growth_bytes:
        grown = max(report.receiver_growth_bytes.values())
        lines.append(
            f"  mc2: the receiver's own memory grew by {human_bytes(max(0, grown))} at most, all held and read"
        )
    return ["Notes", *lines] if lines else []


def _left_out(report: Report) -> list[str]:
    return ["Left out", *(f"  {each.what}: {each.reason}" for each in report.left_out)] if report.left_out else []


def _checks(report: Report) -> list[str]:
    lines = ["Goals"] if report.checks else []
    for check in report.checks:
        verdict = "ok     " if check.ok else "NOT met"
        lines.append(f"  {verdict}  {check.check}: {check.measured:,.4g} ({check.limit})")
    return lines
