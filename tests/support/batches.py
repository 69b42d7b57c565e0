"""Batches and sampling rows for tests that call an executor directly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.executor.interface import SCALARS, Batch, Edits, SamplingRows
from octavo.limits import BLOCK_TOKENS


def batch_of(
    sequences: Sequence[tuple[Sequence[int], int, Sequence[int]]],
    *,
    logit_rows: Sequence[int] | None = None,
    block_ops: Sequence[tuple[int, int, int]] | None = None,
) -> Batch:
    """Each sequence is (token ids of this step, position of the first, block table).

    By default every row's logits are wanted, and the blocks this step enters at their first token are zeroed.
    """
    rows = [len(tokens) for tokens, _, _ in sequences]
    positions = [np.arange(start, start + len(tokens)) for tokens, start, _ in sequences]
    if block_ops is None:
        block_ops = [
            (table[position // BLOCK_TOKENS], -1, 0)
            for (_, _, table), where in zip(sequences, positions)
            for position in where
            if position % BLOCK_TOKENS == 0
        ]
    return Batch(
        token_ids=np.concatenate([np.asarray(tokens, dtype=np.int32) for tokens, _, _ in sequences]),
        positions=np.concatenate(positions).astype(np.int64),
        sequence_rows=np.cumsum([0, *rows]).astype(np.int32),
        block_tables=np.concatenate([np.asarray(table, dtype=np.int32) for _, _, table in sequences]),
        block_offsets=np.cumsum([0, *(len(table) for _, _, table in sequences)]).astype(np.int32),
        logit_rows=np.arange(sum(rows), dtype=np.int32) if logit_rows is None else np.array(logit_rows, dtype=np.int32),
        block_ops=np.array(block_ops, dtype=np.int32).reshape(-1, 3),
    )


def prompt_batch(token_ids: Sequence[int]) -> Batch:
    """One sequence from its start, in blocks 0, 1, …; logits for every row."""
    return batch_of([(token_ids, 0, range(-(-len(token_ids) // BLOCK_TOKENS)))])


def sampling_rows(
    rows: int, *, targets: Sequence[int] | None = None, temperature: float = 0.0, num_logprobs: int = 0
) -> SamplingRows:
    """Greedy rows (or rows that report `targets`) with every filter and penalty off."""
    packed = [
        SCALARS.pack(0, temperature, 1, 0, 1, 0, 0, 1, 0, 0, target, num_logprobs)
        for target in (targets if targets is not None else [-1] * rows)
    ]
    return SamplingRows(b"".join(packed), np.zeros(rows, dtype=np.int64))


def no_edits(rows: int) -> Edits:
    """Arrays that say what `edits=None` says."""
    none = np.zeros(rows + 1, dtype=np.int32)
    empty = np.zeros(0, dtype=np.int32)
    return Edits(
        mask_index=np.full(rows, -1, dtype=np.int32),
        masks=np.zeros((0, 0), dtype=np.uint32),
        banned_offsets=none,
        banned_ids=empty,
        bias_offsets=none,
        bias_ids=empty,
        bias_values=np.zeros(0, dtype=np.float32),
        seen_offsets=none,
        seen_ids=empty,
        seen_counts=empty,
    )
