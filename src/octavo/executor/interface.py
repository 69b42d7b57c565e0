"""The seam: an `Executor` owns weights and KV memory and runs one step at a time.

No layer above sees a KV address, a memory layout or, unless asked, logits. Between steps an executor keeps nothing of
a request but its KV.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step computes. T rows (tokens), S sequences, R rows that need logits.

    `block_ops` come first, in order: each row (dst, src, n) zeroes block dst and then, when src >= 0, copies the first
    n tokens of block src to it. Allocation is always such a row: a block is never handed out with old contents.
    """

    token_ids: I32  # [T]
    positions: I64  # [T]; consecutive within a sequence
    sequence_rows: I32  # [S + 1]; sequence s owns rows sequence_rows[s] .. sequence_rows[s + 1] - 1
    block_tables: I32  # flat; sequence s owns block_offsets[s] .. block_offsets[s + 1] - 1
    block_offsets: I32  # [S + 1]
    logit_rows: I32  # [R]; increasing row indices
    block_ops: I32  # [B, 3]


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How each of R logit rows is sampled; meanings and order of edits as in native/ops/sample.h.

    Ragged fields hold row r at offsets[r] .. offsets[r + 1] - 1.
    """

    temperature: F32  # [R]; 0: greedy
    top_k: I32  # [R]; 0: off
    top_p: F32  # [R]
    min_p: F32  # [R]
    typical_p: F32  # [R]
    presence: F32  # [R]
    frequency: F32  # [R]
    repetition: F32  # [R]
    seed: U64  # [R]
    position: I64  # [R]; absolute position of the token drawn
    n_index: I32  # [R]
    target: I32  # [R]; -1: draw; >= 0: only report this id
    num_logprobs: I32  # [R]; -1: none
    mask_index: I32  # [R]; row of `masks`, -1: all ids allowed
    masks: U32  # [M, ceil(vocab / 32)]
    banned_offsets: I32  # [R + 1]
    banned_ids: I32
    bias_offsets: I32  # [R + 1]
    bias_ids: I32
    bias_values: F32
    seen_offsets: I32  # [R + 1]
    seen_ids: I32
    seen_counts: I32


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step gives back. K is the largest num_logprobs of the step (0 when none)."""

    ids: I32  # [R]; -1 where `ok` is 0
    logprobs: F32  # [R]
    ranks: I32  # [R]; 1 is the most likely
    top_ids: I32  # [R, K]
    top_logprobs: F32  # [R, K]
    ok: U8  # [R]; 0: a NaN or infinity in the row's logits, or nothing left to draw from
    finite: U8  # [T]; 0: a NaN or infinity in the row's residual or in its K/V as stored


class Executor(Protocol):
    """Runs a `Program` over paged KV memory."""

    @property
    def arithmetic(self) -> str:
        """Name of the arithmetic; bits are promised only between equal ones."""
        ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def vocab_size(self) -> int:
        """Width of a row of logits; every token id is checked against it."""
        ...

    def step(self, batch: Batch, sampling: SamplingRows) -> StepResult: ...

    def export_block(self, block: int) -> bytes: ...

    def import_block(self, block: int, data: bytes) -> None: ...

    def close(self) -> None: ...
