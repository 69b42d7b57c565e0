"""Summaries of measured values."""

from __future__ import annotations

import math
from collections.abc import Sequence

PERCENTILES = (10, 25, 75, 90, 99)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Between the two nearest ranks, linearly, as NumPy does by default. `ordered`: increasing, at least one value."""
    place = (len(ordered) - 1) * percent / 100
    low, high = math.floor(place), math.ceil(place)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(values: Sequence[float]) -> dict[str, float] | None:
    """mean, median, p10 p25 p75 p90 p99, min, max; None when there is nothing to summarise."""
    if not values:
        return None
    ordered = sorted(values)
    return {
        "mean": math.fsum(ordered) / len(ordered),
        "median": percentile(ordered, 50),
        **{f"p{p}": percentile(ordered, p) for p in PERCENTILES},
        "min": ordered[0],
        "max": ordered[-1],
    }
