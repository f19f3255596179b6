"""The report that ``vllm-mc2 bench serve`` prints: a few tables and the checks. Pure text, no I/O."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_mc2.bench.serve.results import LABELS, Results, TtftRow
from vllm_mc2.bench.stats import Spread

ORDER = tuple(LABELS)
"""Systems from top to bottom."""


def render(results: Results) -> str:
    """Everything, one section for each question."""
    sections = [_head(results)]
    for model, group in sorted({(row.model, row.group) for row in results.ttft}):
        sections += _ttft(results, model, group)
    sections += [_throughput(results), _memory(results), _idle(results), _handoffs(results), _end(results)]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _head(results: Results) -> list[str]:
    machine = results.machine
    lines = [
        f"vllm-mc2 bench serve  {machine.get('date', '')}",
        (f"  {machine.get('cpu', '?')}, {machine.get('num_cores', '?')} cores, "
        f"{float(machine.get('memory_bytes', 0)) / 2**30:.1f} GiB, Linux {machine.get('kernel', '?')}, "
        f"load {float(machine.get('load_1_minute', 0)):.2f} at the start"),
        "  " + ", ".join(
            f"{name} {machine[name]}" for name in ("vllm_mc2", "vllm", "torch", "nixl", "mooncake") if name in machine
        ),
        f"  float32, greedy, {results.settings.repeats} repeats; median, and 10th to 90th percentile in parentheses",
    ]  # fmt: skip
    lines += [f"  {note}" for note in results.notes]
    lines += [f"  {system.name}: {system.how}" for system in results.systems]
    return lines


def _ttft(results: Results, model: str, group: int) -> list[list[str]]:
    rows = [row for row in results.ttft if (row.model, row.group) == (model, group)]
    sections = []
    for length in sorted({row.prompt_tokens for row in rows}):
        chosen = sorted((row for row in rows if row.prompt_tokens == length), key=lambda row: ORDER.index(row.system))
        title = f"{model}, prompts of {length} tokens" + (f" (group {group + 1})" if group else "")
        head = ("", "decode TTFT ms", "both legs ms", "prefill leg ms", "ITL ms", "tokens equal")
        sections.append([title, *_table(head, [_ttft_cells(row) for row in chosen])])
    return sections


def _ttft_cells(row: TtftRow) -> tuple[str, ...]:
    equal = "" if row.tokens_equal is None else "yes" if row.tokens_equal else "NO"
    times = (_ms(row.decode_ttft), _ms(row.ttft), _ms(row.prefill), _ms(row.itl))
    return (LABELS[row.system], *times, equal)


def _ms(found: Spread | None) -> str:
    if found is None:
        return ""
    if found.num_samples == 1:
        return _number(found.median * 1e3)
    return f"{_number(found.median * 1e3)} ({_number(found.p10 * 1e3)}-{_number(found.p90 * 1e3)})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _throughput(results: Results) -> list[str]:
    if not results.throughput:
        return []
    head = (
        "several requests at once",
        "at once",
        "prompt",
        "output tokens/s",
        "requests/s",
        "mean TTFT ms",
        "of decode ms",
    )
    rows = [
        (
            f"{_named(row.model, row.group)}: {LABELS[row.system]}",
            str(row.concurrency),
            str(row.prompt_tokens),
            f"{row.output_tokens_per_second:.1f}",
            f"{row.requests_per_second:.2f}",
            f"{row.mean_ttft * 1e3:,.0f}",
            f"{row.mean_decode_ttft * 1e3:,.0f}",
        )
        for row in sorted(results.throughput, key=lambda row: (row.model, row.group, row.concurrency))
    ]
    return _table(head, rows)


def _memory(results: Results) -> list[str]:
    if not results.memory:
        return []
    head = ("memory of both servers, MiB", "before", "holding", "more", "KV of prompts", "busy on prefill", "on decode")
    rows = [
        (
            f"{_named(row.model, row.group)}: {LABELS[row.system]}",
            _mib(row.before_bytes),
            _mib(row.holding_bytes),
            _mib(row.holding_bytes - row.before_bytes),
            _mib(row.kv_bytes),
            _mib(row.prefill_kv_bytes),
            _mib(row.decode_kv_bytes),
        )
        for row in results.memory
    ]
    held = results.memory[0]
    note = (
        f"  holding: decode works on {held.num_requests} prompts of {held.prompt_tokens} tokens (first row). vLLM writes its "
        "whole KV cache at start,\n  so 'more' does not show its blocks; 'busy' does, by the engines' own counts."
    )
    return [*_table(head, rows), note]


def _idle(results: Results) -> list[str]:
    if not results.idle_cpu:
        return []
    rows = [
        (f"{_named(row.model, row.group)}: {LABELS[row.system]}", f"{row.cores:.4f}", f"{row.seconds:.0f}")
        for row in results.idle_cpu
    ]
    return _table(("CPU of both servers while idle", "cores", "over s"), rows)


def _handoffs(results: Results) -> list[str]:
    if not results.handoffs:
        return []
    rows = [
        (
            _named(row.model, row.group),
            str(row.attached),
            str(row.not_attached),
            f"{row.kv_bytes_not_copied:,}",
            f"{row.seconds_per_handoff * 1e6:.0f}",
        )
        for row in results.handoffs
    ]
    return _table(("vllm-mc2, by its own counters", "attached", "not", "KV bytes not copied", "us each"), rows)


def _end(results: Results) -> list[str]:
    lines = [f"left out: {left.model}: {LABELS[left.system]}: {left.reason}" for left in results.left_out]
    if results.checks:
        head = ("checks", "", "measured", "at most")
        rows = [
            (
                f"{check.model}: {check.name}",
                "ok" if check.ok else "NOT met",
                f"{check.measured:.3f} {check.unit}",
                f"{check.limit:.3f}",
            )
            for check in results.checks
        ]
        lines += _table(head, rows, left={0, 1})
    lines.append(f"took {results.seconds / 60:.1f} minutes")
    return lines


def _named(model: str, group: int) -> str:
    return f"{model} (group {group + 1})" if group else model


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f}"


def _table(
    head: Sequence[str], rows: Sequence[Sequence[str]], left: frozenset[int] | set[int] = frozenset({0})
) -> list[str]:
    """Aligned columns under their titles, those in ``left`` to the left."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    ]
