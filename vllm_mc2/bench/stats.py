"""Medians and percentiles of real samples."""

import math
from collections.abc import Sequence

import msgspec


class Spread(msgspec.Struct, frozen=True):
    """What many samples of one quantity look like, in the unit of the samples."""

    median: float
    p10: float
    p90: float
    num_samples: int


def spread(samples: Sequence[float]) -> Spread:
    """Median, 10th and 90th percentile, with linear interpolation between neighbours.

    Raises:
        ValueError: there are no samples.
    """
    if not samples:
        raise ValueError("no samples")
    ordered = sorted(samples)
    median, p10, p90 = (_percentile(ordered, fraction) for fraction in (0.5, 0.1, 0.9))
    return Spread(median, p10, p90, len(ordered))


def _percentile(ordered: Sequence[float], fraction: float) -> float:
    position = fraction * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)
