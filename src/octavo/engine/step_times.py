"""How long steps take, over the last thousand or so."""

from __future__ import annotations

from collections import deque

_WINDOW = 1024

Summary = dict[str, float]


class StepTimes:
    """Whole steps, and the executor's part of each; what is left is the engine's own Python."""

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=_WINDOW)
        self._executor: deque[float] = deque(maxlen=_WINDOW)

    def observe(self, step_seconds: float, executor_seconds: float) -> None:
        self._steps.append(step_seconds)
        self._executor.append(executor_seconds)

    def summary(self) -> dict[str, Summary]:
        overhead = [step - executor for step, executor in zip(self._steps, self._executor)]
        return {
            "step_seconds": _summary(list(self._steps)),
            "executor_seconds": _summary(list(self._executor)),
            "overhead_seconds": _summary(overhead),
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
