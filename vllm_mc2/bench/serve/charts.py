"""Charts of a run, as SVG and PNG. matplotlib is imported when they are drawn."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from vllm_mc2.bench.serve.results import COLD, FLOOR, HIT, LABELS, TAIL, Results, TtftRow
from vllm_mc2.bench.stats import Spread

# Okabe and Ito's colours, which the colour-blind can tell apart; each system also has a marker of its own.
STYLES = {
    FLOOR: ("#000000", "s", "--"),
    HIT: ("#999999", "x", ":"),
    "none": ("#E69F00", "v", "-"),
    "mc2": ("#D55E00", "o", "-"),
    "nixl": ("#0072B2", "^", "-"),
    "mooncake": ("#009E73", "D", "-"),
    "example": ("#CC79A7", "P", "-"),
    COLD: ("#56B4E9", "*", ":"),
}
FORMATS = ("svg", "png")


def draw(results: Results, folder: Path) -> list[Path]:
    """Write all charts to ``folder``; the paths written.

    Raises:
        ImportError: matplotlib is not installed.
    """
    matplotlib = import_module("matplotlib")
    matplotlib.use("Agg")  # no display
    # The same file for the same results.
    matplotlib.rcParams["svg.hashsalt"] = "vllm-mc2"
    plot: Any = import_module("matplotlib.pyplot")
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for model in dict.fromkeys(row.model for row in results.ttft):
        without = {TAIL, COLD}
        paths += _by_length(plot, results, folder, model, "decode-ttft", "decode's time to first token", _ttft, without)
        paths += _by_length(plot, results, folder, model, "itl", "time between tokens", _itl, {TAIL})
    for model in dict.fromkeys(row.model for row in results.throughput):
        paths += _by_concurrency(plot, results, folder, model)
    return paths


def _ttft(row: TtftRow) -> Spread | None:
    return row.decode_ttft


def _itl(row: TtftRow) -> Spread | None:
    return row.itl


def _by_length(
    plot: Any,
    results: Results,
    folder: Path,
    model: str,
    name: str,
    what: str,
    value: Callable[[TtftRow], Spread | None],
    without: set[str],
) -> list[Path]:
    figure, axes = plot.subplots(figsize=(7.5, 4.5))
    lengths: set[int] = set()
    for system in LABELS:
        if system in without:
            continue
        points: dict[int, Spread] = {}
        for row in results.ttft:
            found = value(row)
            # Peers of a later group have their only rows there; of the others the first group counts.
            if row.model == model and row.system == system and found is not None:
                points.setdefault(row.prompt_tokens, found)
        if not points:
            continue
        lengths |= set(points)
        xs = sorted(points)
        middle = [points[x].median * 1e3 for x in xs]
        below = [(points[x].median - points[x].p10) * 1e3 for x in xs]
        above = [(points[x].p90 - points[x].median) * 1e3 for x in xs]
        colour, marker, line = STYLES[system]
        axes.errorbar(
            xs,
            middle,
            yerr=[below, above],
            label=LABELS[system],
            color=colour,
            marker=marker,
            linestyle=line,
            capsize=3,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sorted(lengths), [str(length) for length in sorted(lengths)])
    axes.set_xlabel("prompt tokens")
    axes.set_ylabel(f"{what}, ms")
    axes.set_title(f"{model}: {what} (median, p10 to p90; less is better)", fontsize=10)
    return _finish(plot, figure, axes, folder / f"{name}-{model}")


def _by_concurrency(plot: Any, results: Results, folder: Path, model: str) -> list[Path]:
    figure, axes = plot.subplots(figsize=(7.5, 4.5))
    ticks: set[int] = set()
    for system in LABELS:
        points: dict[int, float] = {}
        for row in results.throughput:
            if (row.model, row.system) == (model, system):
                points.setdefault(row.concurrency, row.output_tokens_per_second)
        if points:
            ticks |= set(points)
            colour, marker, line = STYLES[system]
            xs = sorted(points)
            axes.plot(xs, [points[x] for x in xs], label=LABELS[system], color=colour, marker=marker, linestyle=line)
    axes.set_xticks(sorted(ticks))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("requests at once")
    axes.set_ylabel("output tokens per second")
    axes.set_title(f"{model}: throughput through both legs (more is better)", fontsize=10)
    return _finish(plot, figure, axes, folder / f"throughput-{model}")


def _finish(plot: Any, figure: Any, axes: Any, stem: Path) -> list[Path]:
    axes.grid(visible=True, which="major", alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
    figure.tight_layout()
    paths = []
    for kind in FORMATS:
        path = stem.with_name(f"{stem.name}.{kind}")
        figure.savefig(path, dpi=150, metadata={"Date": None} if kind == "svg" else None)
        paths.append(path)
    plot.close(figure)
    return paths
