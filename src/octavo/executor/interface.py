"""The seam: an `Executor` owns weights and KV memory and runs one step at a time.

No layer above sees a KV address, a memory layout or, unless asked, logits. Between steps an executor keeps nothing of
a request but its KV.
"""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]
F32 = npt.NDArray[np.float32]
# What a step takes: array.array, which is made and passed on faster than a small NumPy array, or NumPy's. Contiguous;
# executors only read them. np.asarray(…) is a view of either.
Ints: TypeAlias = "array[int] | I32"
Longs: TypeAlias = "array[int] | I64"


@dataclass(slots=True)
class Batch:
    """What one step computes. T rows (tokens), S sequences, R rows that need logits.

    `block_ops` come first, in order: each row (dst, src, n) zeroes block dst and then, when src >= 0, copies the first
    n tokens of block src to it. Allocation is always such a row: a block is never handed out with old contents.
    """

    token_ids: Ints  # [T]
    positions: Longs  # [T]; consecutive within a sequence
    sequence_rows: Ints  # [S + 1]; sequence s owns rows sequence_rows[s] .. sequence_rows[s + 1] - 1
    block_tables: Ints  # flat; sequence s owns block_offsets[s] .. block_offsets[s + 1] - 1
    block_offsets: Ints  # [S + 1]
    logit_rows: Ints  # [R]; increasing row indices
    block_ops: I32  # [B, 3]


# A record of SamplingRows.scalars. Its fields, in the order of packing: seed, temperature, top_p, min_p, typical_p,
# presence, frequency, repetition, top_k, n_index, target, num_logprobs.
SCALARS = struct.Struct("=Q7f4i4x")
_SCALARS_TYPE = np.dtype(
    {
        "names": [
            *("seed", "temperature", "top_p", "min_p", "typical_p", "presence", "frequency", "repetition"),
            *("top_k", "n_index", "target", "num_logprobs"),
        ],
        "formats": ["u8", *["f4"] * 7, *["i4"] * 4],
        "itemsize": SCALARS.size,
    }
)


@dataclass(slots=True)
class Edits:
    """What is done to the logits of R rows before they are sampled.

    Ragged fields hold row r at offsets[r] .. offsets[r + 1] - 1.
    """

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


@dataclass(slots=True)
class SamplingRows:
    """How each of R logit rows is sampled; meanings and order of edits as in native/ops/sample.h.

    temperature 0: greedy. top_k 0: off. target -1: draw; >= 0: only report this id. num_logprobs -1: none.
    """

    scalars: bytes | bytearray  # R records of SCALARS
    position: Longs  # [R]; absolute position of the token drawn
    edits: Edits | None = None  # None: no row has any

    def table(self) -> npt.NDArray[Any]:
        """The scalars as a NumPy array of records with the fields of SCALARS."""
        return np.frombuffer(self.scalars, dtype=_SCALARS_TYPE)


@dataclass(slots=True)
class StepResult:
    """What one step gives back, of R logit rows and T rows in all."""

    ids: list[int]  # [R]; -1 where `ok` is 0
    logprobs: list[float]  # [R]; here and below 0 where the row asked for none
    ranks: list[int]  # [R]; 1 is the most likely
    top_ids: list[list[int]]  # [R]; as many as the row asked for, best first
    top_logprobs: list[list[float]]
    ok: bytes  # [R]; 0: a NaN or infinity in the row's logits, or nothing left to draw from; else 1
    finite: bytes  # [T]; 0: a NaN or infinity in the row's residual or in its K/V as stored; else 1


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
