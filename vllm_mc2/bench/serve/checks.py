"""The promises that a run checks. Ratios are of medians that were measured side by side, in one group; those to a pair without
hand-off are medians of the rounds' own ratios.
"""

from __future__ import annotations

from collections.abc import Iterator

from vllm_mc2.bench.serve.results import FLOOR, TAIL, Check, IdleRow, Results, TtftRow
from vllm_mc2.bench.serve.settings import PEERS
from vllm_mc2.bench.stats import Spread

MAX_OVER_FLOOR = 1.2
MAX_OVER_NONE = 1.1
IDLE_NOISE_CORES = 0.005
"""What two pairs that do the same may differ by: half a percent of one core."""


def checks(results: Results, fat: str) -> list[Check]:
    """All promises that these results can say something about; ``fat`` is the model with much KV."""
    found: list[Check] = []
    for model, group in sorted({(row.model, row.group) for row in results.ttft}):
        found += _ttft(results, model, group, is_fat=model == fat)
    found += _idle(results.idle_cpu)
    for row in results.ttft:
        if row.system in {"mc2", TAIL} and row.tokens_equal is not None:
            name = f"{row.system}: answers that differ from the single server's, {row.prompt_tokens} tokens"
            measured = 0.0 if row.tokens_equal else 1.0
            found.append(Check(name=name, model=row.model, limit=0.0, measured=measured, unit=""))
    return found


def _ttft(results: Results, model: str, group: int, *, is_fat: bool) -> Iterator[Check]:
    lengths = sorted({row.prompt_tokens for row in results.ttft if (row.model, row.group) == (model, group)})
    if not lengths:
        return
    longest = lengths[-1]
    ours = results.row(model, group, "mc2", longest)
    if ours is None or ours.decode_ttft is None:
        return
    where = f"{longest} tokens"
    if is_fat:
        floor = results.row(model, group, FLOOR, longest)
        if floor is not None and floor.ttft is not None:
            yield _ratio(f"decode TTFT over the floor, {where}", model, ours.decode_ttft, floor.ttft, MAX_OVER_FLOOR)
        for peer in PEERS:
            theirs = results.row(model, group, peer, longest)
            if theirs is not None and theirs.decode_ttft is not None:
                yield _ratio(f"decode TTFT over {peer}'s, {where}", model, ours.decode_ttft, theirs.decode_ttft, 1.0)
    for length in lengths:
        ours, none = results.row(model, group, "mc2", length), results.row(model, group, "none", length)
        if ours is not None and none is not None:
            yield from _undisturbed(model, ours, none)


def _undisturbed(model: str, ours: TtftRow, none: TtftRow) -> Iterator[Check]:
    where = f"{ours.prompt_tokens} tokens"
    both = (
        ("prefill leg", ours.prefill, none.prefill, ours.prefill_over_none),
        ("ITL", ours.itl, none.itl, ours.itl_over_none),
    )
    for what, mine, theirs, ratio in both:
        name = f"{what} over that without hand-off, {where}"
        if ratio is not None:
            yield Check(name=name, model=model, limit=MAX_OVER_NONE, measured=ratio.median, unit="x")
        elif mine is not None and theirs is not None:
            yield _ratio(name, model, mine, theirs, MAX_OVER_NONE)


def _ratio(name: str, model: str, mine: Spread, theirs: Spread, limit: float) -> Check:
    return Check(name=name, model=model, limit=limit, measured=mine.median / theirs.median, unit="x")


def _idle(rows: list[IdleRow]) -> Iterator[Check]:
    for row in rows:
        others = [other for other in rows if (other.model, other.group) == (row.model, row.group)]
        none = next((other for other in others if other.system == "none"), None)
        if row.system == "mc2" and none is not None:
            yield Check(
                name=f"idle CPU of both servers, without hand-off {none.cores:.4f} (+ {IDLE_NOISE_CORES} for noise)",
                model=row.model,
                limit=none.cores + IDLE_NOISE_CORES,
                measured=row.cores,
                unit="cores",
            )
