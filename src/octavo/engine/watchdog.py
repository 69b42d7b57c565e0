"""When an engine has been silent for too long. Pure: time is told to it."""

from __future__ import annotations

from octavo.engine.ipc import EngineInfo
from octavo.engine.stats import EngineStats

_SLOWEST_MACS = 5e9  # multiply-adds a second: a tenth of what a slow machine does, so that no step is cut off wrongly
_PING_EVERY = 1.0  # seconds, when nothing runs
_LONGEST_TICK = 0.25  # seconds between two looks
_STARTING = 20.0  # seconds more until the first sign of life: libraries come from a cold disk


class Watchdog:
    """An engine owes a frame while it loads (signs of life), while requests run (one a step) and after a ping.

    Time counts only as far as this process sees it pass: one that was itself suspended must not blame the engine.
    """

    def __init__(self, stall_seconds: float, now: float) -> None:
        self.tick = min(_LONGEST_TICK, stall_seconds / 4)
        self.silent = 0.0  # seconds for which a frame has been owed
        self.last_frame = now
        self.first_tokens_due: set[int] = set()  # requests that may still be in their prefill
        self._stall_seconds = stall_seconds
        self._pinged = False
        self._started = True  # it has said something
        self._looked = now

    def engine_started(self) -> None:
        self.silent = 0.0
        self._pinged = self._started = False
        self.first_tokens_due.clear()

    def heard(self, now: float) -> None:
        self.silent = 0.0
        self.last_frame = now
        self._pinged = False
        self._started = True

    def look(self, now: float, *, owes: bool) -> bool:
        """True: ping it. owes: it loads, or has been asked something; requests are known from `stats`."""
        passed = min(now - self._looked, 2 * self.tick)
        self._looked = now
        if owes or self._pinged or self.first_tokens_due:
            self.silent += passed
        elif now - self.last_frame > _PING_EVERY:
            self._pinged = True
            return True
        return False

    def limit(self, info: EngineInfo | None, stats: EngineStats) -> float:
        """Seconds of silence that are too many, by what the step at hand can be."""
        if not self._started:
            return self._stall_seconds + _STARTING
        if info is None:
            return self._stall_seconds
        only_decodes = not self.first_tokens_due and stats.waiting == 0 and stats.step_rows <= stats.running
        rows = stats.running if only_decodes else info.max_rows
        return self._stall_seconds + rows * info.macs_per_token / _SLOWEST_MACS
