"""Turns a scheduler's plan into the arrays of a `Batch`, and remembers what each row of logits is for."""

from __future__ import annotations

from array import array
from collections.abc import Collection
from collections.abc import Sequence as SequenceOf

import numpy as np

from octavo.executor.interface import I32, Batch, SamplingRows
from octavo.sampling import RowEdits, build_rows
from octavo.scheduler.plan import StepPlan

DRAW = -1  # the row draws the next token

_NO_BLOCK_OPS: I32 = np.zeros((0, 3), dtype=np.int32)


class LogitRows:
    """The rows of a step whose logits are wanted, in increasing order: five lists of equal length.

    `undrawable`, by chunk: why nothing can be drawn for it. What its row draws is thrown away.
    """

    __slots__ = ("edits", "positions", "rows", "scalars", "undrawable", "uses")

    def __init__(self) -> None:
        self.rows: list[int] = []
        # How each is sampled, as in build_rows. Where nothing is drawn the position is 0.
        self.scalars: list[bytes] = []
        self.positions: list[int] = []
        self.edits: list[RowEdits | None] = []
        # (index of its chunk in the plan, DRAW or the position of the token it scores)
        self.uses: list[tuple[int, int]] = []
        self.undrawable: dict[int, Exception] = {}

    def drop(self, chunks: Collection[int]) -> None:
        """Forgets the rows of some chunks; they are computed all the same, but nothing is drawn from them."""
        kept = [i for i, (chunk, _) in enumerate(self.uses) if chunk not in chunks]
        for name in ("edits", "positions", "rows", "scalars", "uses"):
            setattr(self, name, [getattr(self, name)[i] for i in kept])

    def sampling(self, vocab_size: int, errors: dict[int, Exception]) -> SamplingRows:
        """The arrays for the executor. Chunks with a row that can't be built are dropped and go to `errors`."""
        try:
            return build_rows(self.scalars, self.positions, self.edits, vocab_size)
        except Exception:
            for i, (chunk, _) in enumerate(self.uses):
                one = slice(i, i + 1)
                try:
                    build_rows(self.scalars[one], self.positions[one], self.edits[one], vocab_size)
                except Exception as error:
                    errors[chunk] = error
            self.drop(errors)
            return build_rows(self.scalars, self.positions, self.edits, vocab_size)


def build_batch(plan: StepPlan, logit_rows: SequenceOf[int]) -> Batch:
    """`logit_rows`: increasing rows of the step whose logits are wanted."""
    token_ids, positions, sequence_rows = array("i"), array("q"), array("i", (0,))
    block_tables, block_offsets = array("i"), array("i", (0,))
    for chunk in plan.sequences:
        sequence, start, count = chunk.sequence, chunk.start, chunk.count
        if count == 1:
            token_ids.append(sequence.token_ids[start])
            positions.append(start)
        else:
            token_ids.extend(sequence.token_ids[start : start + count])
            positions.extend(range(start, start + count))
        sequence_rows.append(len(token_ids))
        block_tables.extend(sequence.block_table)
        block_offsets.append(len(block_tables))
    return Batch(
        token_ids,
        positions,
        sequence_rows,
        block_tables,
        block_offsets,
        array("i", logit_rows),
        np.array(plan.block_ops, dtype=np.int32) if plan.block_ops else _NO_BLOCK_OPS,
    )
