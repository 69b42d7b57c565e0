"""Builds `SamplingRows`, every step: so what a row keeps from step to step is packed once, by its sampler."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from octavo.executor.interface import F32, I32, SCALARS, U32, Edits, SamplingRows
from octavo.sampling.resolve import ResolvedParams

_NO_I32: I32 = np.zeros(0, dtype=np.int32)
_NO_F32: F32 = np.zeros(0, dtype=np.float32)
_NO_BIAS = (_NO_I32, _NO_F32)
_NO_SEEN = (_NO_I32, _NO_I32)
Values = TypeVar("Values", bound=np.generic)


class RowEdits(NamedTuple):
    """What is done to one row's logits. Arrays may be views that the next token changes: build rows before that."""

    banned: Sequence[int] = ()
    bias: tuple[I32, F32] | None = None  # ids, values
    seen: tuple[I32, I32] | None = None  # distinct ids, times in the output
    mask: U32 | None = None  # bitmap of allowed ids, [ceil(vocab / 32)]


def pack_scalars(resolved: ResolvedParams, n_index: int) -> bytes:
    """The scalars with which a sequence's tokens are drawn."""
    r = resolved
    logprobs = -1 if r.logprobs is None else r.logprobs
    return SCALARS.pack(
        r.seed & 0xFFFFFFFFFFFFFFFF,
        r.temperature,
        r.top_p,
        r.min_p,
        r.typical_p,
        r.presence_penalty,
        r.frequency_penalty,
        r.repetition_penalty,
        r.top_k,
        n_index,
        -1,
        logprobs,
    )


def pack_target(target: int, num_logprobs: int) -> bytes:
    """The scalars of a row that draws nothing and reports the target's logprob."""
    return SCALARS.pack(0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0, 0, target, num_logprobs)


def build_rows(
    scalars: Sequence[bytes], positions: Sequence[int], edits: Sequence[RowEdits | None], vocab_size: int
) -> SamplingRows:
    """The entries of each row, in order: packed scalars, absolute position of the token drawn, edits of its logits."""
    built = _build_edits([each or RowEdits() for each in edits], vocab_size) if any(edits) else None
    return SamplingRows(b"".join(scalars), array("q", positions), built)


def _build_edits(edits: Sequence[RowEdits], vocab_size: int) -> Edits:
    mask_index, masks = _masks([each.mask for each in edits], vocab_size)
    banned_offsets, banned_ids = _flat_ids([each.banned for each in edits])
    bias_offsets, bias_ids, bias_values = _flat_pairs([each.bias or _NO_BIAS for each in edits], _NO_BIAS)
    seen_offsets, seen_ids, seen_counts = _flat_pairs([each.seen or _NO_SEEN for each in edits], _NO_SEEN)
    return Edits(
        mask_index=mask_index,
        masks=masks,
        banned_offsets=banned_offsets,
        banned_ids=banned_ids,
        bias_offsets=bias_offsets,
        bias_ids=bias_ids,
        bias_values=bias_values,
        seen_offsets=seen_offsets,
        seen_ids=seen_ids,
        seen_counts=seen_counts,
    )


def _offsets(sizes: Sequence[int]) -> I32:
    return np.array([0, *accumulate(sizes)], dtype=np.int32)


def _flat_ids(lists: Sequence[Sequence[int]]) -> tuple[I32, I32]:
    if not any(lists):
        return np.zeros(len(lists) + 1, dtype=np.int32), _NO_I32
    return _offsets([len(ids) for ids in lists]), np.array(list(chain.from_iterable(lists)), dtype=np.int32)


def _flat_pairs(
    pairs: Sequence[tuple[I32, npt.NDArray[Values]]], none: tuple[I32, npt.NDArray[Values]]
) -> tuple[I32, I32, npt.NDArray[Values]]:
    offsets = _offsets([len(ids) for ids, _ in pairs])
    if offsets[-1] == 0:
        return offsets, *none
    ids: I32 = np.concatenate([pair[0] for pair in pairs])
    return offsets, ids, np.concatenate([pair[1] for pair in pairs])


def _masks(given: Sequence[U32 | None], vocab_size: int) -> tuple[I32, U32]:
    """Rows with the same mask object share its copy."""
    words = (vocab_size + 31) // 32
    if all(mask is None for mask in given):
        return np.full(len(given), -1, dtype=np.int32), np.zeros((0, words), dtype=np.uint32)
    distinct: dict[int, U32] = {}
    index = []
    slot: dict[int, int] = {}
    for mask in given:
        if mask is None:
            index.append(-1)
        else:
            distinct[id(mask)] = mask
            index.append(slot.setdefault(id(mask), len(slot)))
    return np.array(index, dtype=np.int32), np.stack(list(distinct.values()))
