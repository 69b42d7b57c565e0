"""Limits of time on a machine whose speed is not always the same: its neighbours may take more than half of it."""

from __future__ import annotations

import time

_QUIET = 0.026  # seconds of `_work` on the machine that the limits were set on, when nobody else used it


def takes_at_most(seconds: float, limit: float) -> bool:
    """Whether so many seconds, just measured, are within the limit at the pace that this machine has now."""
    return seconds <= limit or seconds <= limit * min(_work() for _ in range(3)) / _QUIET


def _work() -> float:
    begin, value = time.thread_time(), 0
    for i in range(300_000):
        value = (value * 31 + i) % 1_000_003
    return time.thread_time() - begin
