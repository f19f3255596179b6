"""Percentiles, what is said about the machine, and what is planned for how much memory."""

import io
import statistics

import pytest

from vllm_mc2.bench.handoff.cases import BIG_BLOCK_FACTOR, GIB, LARGEST_COMPARED, RESERVE_BYTES, WAYS, Case, make_plan
from vllm_mc2.bench.machine import describe_machine
from vllm_mc2.bench.progress import Progress
from vllm_mc2.bench.stats import spread

PLENTY = 1 << 50


def test_percentiles_are_interpolated() -> None:
    got = spread([4.0, 1.0, 3.0, 2.0])
    assert (got.median, got.num_samples) == (2.5, 4)
    assert got.p10 == pytest.approx(1.3)
    assert got.p90 == pytest.approx(3.7)


def test_percentiles_are_those_of_the_standard_library() -> None:
    samples = [float(value * value % 101) for value in range(57)]
    deciles = statistics.quantiles(samples, n=10, method="inclusive")
    got = spread(samples)
    assert (got.p10, got.median, got.p90) == pytest.approx((deciles[0], deciles[4], deciles[8]))


def test_one_sample_is_its_own_spread() -> None:
    got = spread([7])
    assert (got.median, got.p10, got.p90, got.num_samples) == (7, 7, 7, 1)


def test_no_samples_are_an_error() -> None:
    with pytest.raises(ValueError, match="no samples"):
        spread([])


def test_the_machine_is_described() -> None:
    machine = describe_machine()
    assert {"cpu", "num_cores", "memory_bytes", "kernel", "python", "date", "load_1_minute"} <= machine.keys()
    assert int(machine["memory_bytes"]) > 1 << 20


def test_progress_is_silent_unless_on_a_terminal() -> None:
    stream = io.StringIO()
    with Progress(10, stream) as progress:
        progress.step("anything", 10)
    assert stream.getvalue() == ""


def test_everything_is_planned_where_there_is_memory() -> None:
    plan = make_plan(WAYS, quick=False, max_bytes=PLENTY, available_bytes=PLENTY)
    cases = {case for stage in plan.stages for group in stage.groups for case in group}
    assert {case.batch for case in cases} == {1, 8, 32, 128}
    assert {case.request_bytes for case in cases if case.batch > 1} == {64 << 20}
    assert max(case.kv_bytes for case in cases) == 8 * GIB
    assert plan.left_out == []
    small, large = plan.block_sizes
    assert small.num_blocks == large.num_blocks == 256
    assert large.kv_bytes == BIG_BLOCK_FACTOR * small.kv_bytes


@pytest.mark.parametrize("available_gib", [3, 6, 10, 12, 22, 30])
def test_nothing_is_planned_that_does_not_fit_and_what_is_left_out_is_said(available_gib: int) -> None:
    full = make_plan(WAYS, quick=False, max_bytes=PLENTY, available_bytes=PLENTY)
    plan = make_plan(WAYS, quick=False, max_bytes=PLENTY, available_bytes=available_gib * GIB)
    assert all(stage.needed_bytes <= available_gib * GIB - RESERVE_BYTES for stage in plan.stages)
    assert sum(case.kv_bytes for case in plan.block_sizes) <= available_gib * GIB - RESERVE_BYTES

    def measured(stages: list) -> set[tuple[str, Case]]:
        return {(way, case) for stage in stages for group in stage.groups for case in group for way in stage.ways}

    assert bool(plan.left_out) == (measured(plan.stages) != measured(full.stages))


def test_a_large_batch_is_measured_beside_a_smaller_one() -> None:
    plan = make_plan(("mc2",), quick=False, max_bytes=PLENTY, available_bytes=PLENTY)
    assert [case.batch for case in plan.stages[-1].groups[0]] == [32, 128]
    assert plan.stages[0].kv_bytes == LARGEST_COMPARED
