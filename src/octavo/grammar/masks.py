"""The masks of one step's constrained rows, computed without the interpreter's lock, and side by side if it pays."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from octavo.grammar.constraint import Constraint

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

U32 = npt.NDArray[np.uint32]
_WORTH_THREADS = 0.002  # seconds of work; most masks take some microseconds, and to wake threads takes longer


class MaskBuffer:
    """Bitmaps of allowed ids, in memory that the next step uses again."""

    def __init__(self, vocab_size: int, threads: int) -> None:
        self._vocab_size = vocab_size
        self._threads = threads
        self._executor: LLExecutor | None = None
        self._rows: U32 = np.zeros((0, 0), dtype=np.uint32)
        self._seconds = 0.0  # a mask took, in the last step

    def fill(self, constraints: Sequence[Constraint]) -> list[U32]:
        """A bitmap [ceil(vocab / 32)] for each constraint that has begun; good until the next call.

        A matcher that came upon a limit says so in `Constraint.check`.
        """
        words = constraints[0].vocabulary.mask_words
        if len(self._rows) < len(constraints):
            self._rows = np.zeros((len(constraints), words), dtype=np.uint32)
        rows = self._rows
        free = []
        for row, constraint in enumerate(constraints):
            token_id = constraint.forced
            if token_id is None:
                free.append((constraint.matcher, row))
            else:
                rows[row] = 0
                rows[row, token_id >> 5] = 1 << (token_id & 31)
        if free:
            self._compute(free, rows)
        used, spare = (self._vocab_size + 31) // 32, self._vocab_size & 31
        if spare:
            rows[: len(constraints), used - 1] &= np.uint32((1 << spare) - 1)
        return [rows[row, :used] for row in range(len(constraints))]

    def _compute(self, free: list[tuple[LLMatcher, int]], rows: U32) -> None:
        begin = time.perf_counter()
        row_bytes = rows.shape[1] * 4
        if self._threads > 1 and self._seconds * len(free) > _WORTH_THREADS:
            if self._executor is None:
                from llguidance import LLExecutor

                self._executor = LLExecutor(self._threads)
            self._executor.unsafe_compute_mask_ptr(free, rows.ctypes.data, row_bytes, len(rows))
            threads = self._threads
        else:
            start = rows.ctypes.data
            for matcher, row in free:
                matcher.unsafe_compute_mask_ptr(start + row * row_bytes, row_bytes)
            threads = 1
        self._seconds = (time.perf_counter() - begin) * threads / len(free)
