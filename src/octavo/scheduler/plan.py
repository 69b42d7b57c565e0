"""What one step shall compute, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.scheduler.sequence import Sequence


@dataclass(slots=True, eq=False)
class ScheduledChunk:
    """Compute tokens start .. start + count - 1 of a sequence."""

    sequence: Sequence
    start: int
    count: int
    samples: bool  # the chunk reaches the last known token, so a new one is drawn


@dataclass(slots=True)
class StepPlan:
    """One step. Build the `Batch` from it at once: block tables hold only until the scheduler's next call."""

    sequences: list[ScheduledChunk] = field(default_factory=list)
    block_ops: list[tuple[int, int, int]] = field(default_factory=list)  # (dst, src or -1, tokens), as in `Batch`
    preempted: list[Sequence] = field(default_factory=list)
    rows: int = 0


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Blocks, queue and totals since the start."""

    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_used: int
    waste_percent: float  # share of used blocks' token slots that hold no live, unique token
    waiting: int
    running: int
    steps: int
    computed_tokens: int
    prefix_hit_tokens: int  # at first admissions
    recompute_hit_tokens: int  # at admissions after a preemption
    copied_tokens: int  # part of the hits that was copied from inside a block
    preemptions: int
    evictions: int
    shared_blocks: int  # blocks given up at commit because the tree already had an equal one
    prefix_waits: int  # times a sequence was held back for the one computing its prefix
    aged: int  # sequences put first because they had waited long


@dataclass(slots=True)
class Counters:
    """Running totals behind `SchedulerStats`."""

    steps: int = 0
    computed_tokens: int = 0
    prefix_hit_tokens: int = 0
    recompute_hit_tokens: int = 0
    copied_tokens: int = 0
    preemptions: int = 0
    shared_blocks: int = 0
    prefix_waits: int = 0
