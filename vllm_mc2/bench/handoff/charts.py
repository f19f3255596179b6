"""``handoff.svg`` and ``handoff.png``: time over KV bytes and over the number of requests, both axes logarithmic."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

from vllm_mc2.bench.handoff.cases import WAYS, human_bytes
from vllm_mc2.bench.handoff.results import Report, Row

# Okabe and Ito's colours, and a marker each: readable without telling colours apart.
_STYLES = {
    "mc2": ("#0072B2", "o", "vllm-mc2: in place"),
    "mc2_sleep": ("#56B4E9", "X", "vllm-mc2, decode asleep"),
    "memcpy": ("#000000", "s", "memcpy: lower bound of any copy"),
    "two_copy": ("#E69F00", "^", "two copies through shared memory"),
    "tcp": ("#D55E00", "v", "TCP loopback"),
    "nixl": ("#009E73", "D", "NIXL read"),
    "mooncake": ("#CC79A7", "P", "Mooncake read over TCP"),
}
_TICKS_US = {1: "1 us", 10: "10 us", 100: "100 us", 1e3: "1 ms", 1e4: "10 ms", 1e5: "100 ms", 1e6: "1 s", 1e7: "10 s"}


def draw(report: Report, directory: Path) -> list[Path]:
    """Draw both files; their paths."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    panels: list[tuple[str, str, list[Row]]] = [
        ("One request", "KV bytes", [row for row in report.rows if row.batch == 1]),
        ("Requests of 64 MiB, one after the other", "requests", [row for row in report.rows if _is_in_batch(row)]),
    ]
    panels = [panel for panel in panels if panel[2]]
    figure, axes = plt.subplots(
        1,
        max(1, len(panels)),
        figsize=(6.2 * max(1, len(panels)), 5.6),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axis, (title, label, rows) in zip(axes[0], panels, strict=False):
        _panel(axis, title, label, rows)
    axes[0][0].set_ylabel("until decode can use it")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=9)
    machine = report.machine
    figure.suptitle(f"KV hand-over between two processes ({machine['cpu']}, {machine['num_cores']} cores)", fontsize=12)
    paths = [directory / "handoff.svg", directory / "handoff.png"]
    for path in paths:
        figure.savefig(path, dpi=150)
    plt.close(figure)
    return paths


def _is_in_batch(row: Row) -> bool:
    """A batch, or the one request that is as large as each of a batch's."""
    return row.batch > 1 or row.kv_bytes == 64 << 20


def _panel(axis: Any, title: str, label: str, rows: Sequence[Row]) -> None:
    by_batch = label == "requests"
    for way in WAYS:
        points = sorted((row for row in rows if row.way == way), key=lambda row: row.kv_bytes)
        if not points:
            continue
        colour, marker, name = _STYLES[way]
        x = [row.batch if by_batch else row.kv_bytes for row in points]
        width = 2.4 if way == "mc2" else 1.4
        axis.plot(x, [row.median_us for row in points], color=colour, marker=marker, linewidth=width, label=name)
        lows, highs = [row.p10_us for row in points], [row.p90_us for row in points]
        axis.fill_between(x, lows, highs, color=colour, alpha=0.18, linewidth=0)
    ticks = sorted({row.batch if by_batch else row.kv_bytes for row in rows})
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(ticks, [str(tick) if by_batch else human_bytes(tick) for tick in ticks])
    axis.set_yticks(list(_TICKS_US), list(_TICKS_US.values()))
    top, bottom = max(row.p90_us for row in rows), min(row.p10_us for row in rows)
    axis.set_ylim(bottom / 3, top * 3)
    axis.minorticks_off()
    axis.grid(visible=True, which="major", color="#cccccc", linewidth=0.6)
    axis.set_title(title)
    axis.set_xlabel(label)
