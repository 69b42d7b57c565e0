"""Medians, ranges and ratios. A ratio is taken within a round, where both ran one after the other, and only then the
median over the rounds: a machine that is slow for a minute slows both."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """median, least and most of a value over the rounds."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{shown(self.median)} ({shown(self.low)} – {shown(self.high)})"


def figure(values: Sequence[float]) -> Figure:
    return Figure(statistics.median(values), min(values), max(values))


def shown(value: float) -> str:
    """Three digits at least."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


@dataclass(frozen=True)
class Key:
    workload: str
    contender: str


Rates = Mapping[Key, Sequence[float]]  # tokens a second, one a round


def ratio(rates: Rates, workload: str, ours: str, theirs: str) -> Figure:
    """How many times as fast ours is."""
    pairs = zip(rates[Key(workload, ours)], rates[Key(workload, theirs)], strict=True)
    return figure([mine / other for mine, other in pairs])


def best(rates: Rates, workload: str, among: Sequence[str]) -> str:
    """The contender with the highest median rate."""
    measured = [name for name in among if Key(workload, name) in rates]
    return max(measured, key=lambda name: statistics.median(rates[Key(workload, name)]))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown; a bar within a cell would end it."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines) + "\n"
