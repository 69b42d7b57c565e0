"""The engine's numbers as the API process knows them: now, and totals that outlive engine processes."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.engine.ipc import Counters

_TOTALS = ("steps", "computed_tokens", "prefix_hit_tokens", "preemptions", "evictions", "jump_forward_tokens")


@dataclass(slots=True)
class EngineStats:
    """From the last frame: sequences that run and wait, blocks (free + cached + used is all), waste_percent of the used
    ones, the last step's seconds and rows. Totals over restarts: the others, see Engine.stats."""

    running: int = 0
    waiting: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0
    blocks_used: int = 0
    waste_percent: float = 0.0
    step_seconds: float = 0.0
    step_rows: int = 0
    steps: int = 0
    computed_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    evictions: int = 0
    jump_forward_tokens: int = 0
    generated_tokens: int = 0
    _last: Counters = field(default_factory=Counters)

    def absorb(self, counters: Counters) -> int:
        """Returns the steps done since the last frame."""
        last, self._last = self._last, counters
        self.running = counters.running
        self.waiting = counters.waiting
        self.blocks_free = counters.blocks_free
        self.blocks_cached = counters.blocks_cached
        self.blocks_used = counters.blocks_used
        self.waste_percent = counters.waste_percent
        self.step_seconds = counters.step_seconds
        self.step_rows = counters.step_rows
        self.computed_tokens += counters.computed_tokens - last.computed_tokens
        self.prefix_hit_tokens += counters.prefix_hit_tokens - last.prefix_hit_tokens
        self.preemptions += counters.preemptions - last.preemptions
        self.evictions += counters.evictions - last.evictions
        self.jump_forward_tokens += counters.jump_forward_tokens - last.jump_forward_tokens
        steps = counters.steps - last.steps
        self.steps += steps
        return steps

    def engine_ended(self) -> None:
        """The next engine counts from nothing."""
        self.absorb(Counters(**{name: getattr(self._last, name) for name in _TOTALS}))
        self._last = Counters()
