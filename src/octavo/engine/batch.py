"""Turns a scheduler's plan into the arrays of a `Batch`."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from itertools import chain

import numpy as np

from octavo.executor.interface import Batch
from octavo.scheduler.plan import StepPlan


def build_batch(plan: StepPlan, logit_rows: SequenceOf[int]) -> Batch:
    """`logit_rows`: increasing rows of the step whose logits are wanted."""
    counts = [chunk.count for chunk in plan.sequences]
    starts = [chunk.start for chunk in plan.sequences]
    tables = [chunk.sequence.block_table for chunk in plan.sequences]
    rows = sum(counts)
    if rows == len(counts):  # all decode: one token each
        tokens = [chunk.sequence.token_ids[chunk.start] for chunk in plan.sequences]
        positions = np.array(starts, dtype=np.int64)
    else:
        tokens = list(
            chain.from_iterable(chunk.sequence.token_ids[chunk.start : chunk.start + chunk.count] for chunk in plan.sequences)
        )
        positions = np.concatenate([np.arange(start, start + count) for start, count in zip(starts, counts)])
    table_sizes = [len(table) for table in tables]
    return Batch(
        token_ids=np.array(tokens, dtype=np.int32),
        positions=positions,
        sequence_rows=_offsets(counts),
        block_tables=np.fromiter(chain.from_iterable(tables), dtype=np.int32, count=sum(table_sizes)),
        block_offsets=_offsets(table_sizes),
        logit_rows=np.array(logit_rows, dtype=np.int32),
        block_ops=np.array(plan.block_ops, dtype=np.int32).reshape(-1, 3),
    )


def _offsets(counts: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    offsets = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=offsets[1:])
    return offsets
