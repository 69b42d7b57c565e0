"""Turns a scheduler's plan into the arrays of a `Batch`, and remembers what each row of logits is for."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from octavo.executor.interface import I32, Batch, SamplingRows
from octavo.sampling import RowEntry, build_rows
from octavo.scheduler.plan import StepPlan

DRAW = -1  # the row draws the next token


@dataclass(slots=True)
class LogitRows:
    """The rows of a step whose logits are wanted, in increasing order: three lists of equal length.

    `entries`: how each is sampled. `uses`: (index of its chunk in the plan, DRAW or the prompt position it scores).
    """

    rows: list[int] = field(default_factory=list)
    entries: list[RowEntry] = field(default_factory=list)
    uses: list[tuple[int, int]] = field(default_factory=list)

    def extend(self, wanted: SequenceOf[tuple[int, RowEntry, tuple[int, int]]]) -> None:
        for row, entry, use in wanted:
            self.rows.append(row)
            self.entries.append(entry)
            self.uses.append(use)

    def drop(self, chunks: Collection[int]) -> None:
        """Forgets the rows of some chunks; they are computed all the same, but nothing is drawn from them."""
        kept = [i for i, (chunk, _) in enumerate(self.uses) if chunk not in chunks]
        self.rows = [self.rows[i] for i in kept]
        self.entries = [self.entries[i] for i in kept]
        self.uses = [self.uses[i] for i in kept]

    def sampling(self, vocab_size: int, errors: dict[int, Exception]) -> SamplingRows:
        """The arrays for the executor. Chunks with an entry that can't be built are dropped and go to `errors`."""
        try:
            return build_rows(self.entries, vocab_size)
        except Exception:
            for (chunk, _), entry in zip(self.uses, self.entries):
                try:
                    build_rows([entry], vocab_size)
                except Exception as error:
                    errors[chunk] = error
            self.drop(errors)
            return build_rows(self.entries, vocab_size)


def build_batch(plan: StepPlan, logit_rows: SequenceOf[int]) -> Batch:
    """`logit_rows`: increasing rows of the step whose logits are wanted."""
    counts = [chunk.count for chunk in plan.sequences]
    starts = [chunk.start for chunk in plan.sequences]
    tables = [chunk.sequence.block_table for chunk in plan.sequences]
    if sum(counts) == len(counts):  # all decode: one token each
        tokens = [chunk.sequence.token_ids[chunk.start] for chunk in plan.sequences]
        positions = np.array(starts, dtype=np.int64)
    else:
        tokens = list(
            chain.from_iterable(
                chunk.sequence.token_ids[chunk.start : chunk.start + chunk.count] for chunk in plan.sequences
            )
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


def _offsets(counts: list[int]) -> I32:
    offsets = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=offsets[1:])
    return offsets
