"""How many rows a step may have so that streams keep their pace."""

from __future__ import annotations

from collections import deque

from octavo.errors import InvalidParameterError

_KEEP = 0.95  # weight of the past at each observation: about the last twenty steps count
_WINDOW = 256  # observations not learnt from yet; those before would weigh less than a hundred-thousandth


class TokenBudget:
    """Learns a step's cost, seconds ≈ fixed + rows · per_row, and turns an inter-token target into rows.

    Least squares with exponentially fading weights, so that it follows longer contexts and busier machines. No clock:
    the caller measures. Before the first observation the budget is `min_rows`.
    """

    def __init__(self, target_seconds: float, min_rows: int, max_rows: int) -> None:
        if not target_seconds > 0:
            raise InvalidParameterError("target_seconds", target_seconds, "greater than 0")
        if not 1 <= min_rows <= max_rows:
            raise InvalidParameterError("min_rows", min_rows, f"1 to max_rows ({max_rows})")
        self.target_seconds = target_seconds
        self.min_rows = min_rows
        self.max_rows = max_rows
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._new: deque[tuple[int, float]] = deque(maxlen=_WINDOW)

    def observe(self, rows: int, seconds: float) -> None:
        """One step of so many rows took so long. Observations that cannot be true are ignored."""
        self._new.append((rows, seconds))  # learnt from when someone asks: most steps do not

    def cost(self) -> tuple[float, float]:
        """(fixed seconds, seconds per row), both ≥ 0; (0, 0) before the first observation."""
        while self._new:
            self._learn(*self._new.popleft())
        return self._solve()

    def rows(self, decoding: bool = True) -> int:
        """Rows for the next step. With nothing decoding no stream can stall, so the step may be as large as allowed."""
        if not decoding:
            return self.max_rows
        fixed, per_row = self.cost()
        if self._weight == 0:
            return self.min_rows
        spare = self.target_seconds - fixed
        if spare <= 0:
            return self.min_rows
        if per_row * self.max_rows <= spare:
            return self.max_rows
        return min(max(int(spare / per_row), self.min_rows), self.max_rows)

    def _learn(self, rows: int, seconds: float) -> None:
        if rows < 1 or not 0 < seconds < float("inf"):
            return
        # One stall (a page-in, another process) must not shrink the budget for twenty steps.
        if self._weight > 1:
            fixed, per_row = self._solve()
            seconds = min(seconds, 4 * (fixed + per_row * rows))
        self._weight = self._weight * _KEEP + 1
        self._x = self._x * _KEEP + rows
        self._y = self._y * _KEEP + seconds
        self._xx = self._xx * _KEEP + rows * rows
        self._xy = self._xy * _KEEP + rows * seconds

    def _solve(self) -> tuple[float, float]:
        if self._weight == 0:
            return 0.0, 0.0
        x, y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - x * x
        if variance < 0.05 * x * x:  # steps too alike to see a slope: charge everything to rows
            return 0.0, y / x
        per_row = (self._xy / self._weight - x * y) / variance
        per_row = min(max(per_row, 0.0), y / x)
        return y - per_row * x, per_row
