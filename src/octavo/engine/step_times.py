"""How long steps take, over the last thousand or so."""

from __future__ import annotations

from collections import deque

_WINDOW = 1024

Summary = dict[str, float]


class StepTimes:
    """`seconds`: of whole steps, and of the executor's part of each; what is left is the engine's own Python."""

    def __init__(self) -> None:
        self.seconds: deque[tuple[float, float]] = deque(maxlen=_WINDOW)

    def summary(self) -> dict[str, Summary]:
        return {
            "step_seconds": _summary([step for step, _ in self.seconds]),
            "executor_seconds": _summary([executor for _, executor in self.seconds]),
            "overhead_seconds": _summary([step - executor for step, executor in self.seconds]),
        }


def _summary(seconds: list[float]) -> Summary:
    if not seconds:
        return {"mean": 0.0, "p50": 0.0, "p99": 0.0, "last": 0.0}
    ordered = sorted(seconds)
    return {
        "mean": sum(ordered) / len(ordered),
        "p50": ordered[len(ordered) // 2],
        "p99": ordered[len(ordered) * 99 // 100],
        "last": seconds[-1],
    }
