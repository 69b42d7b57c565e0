"""Builds the arrays of `SamplingRows` from one entry a row; runs every step, so it works on packed records."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from octavo.executor.interface import F32, I32, U32, SamplingRows
from octavo.sampling.resolve import ResolvedParams

# The scalars of a row that stay the same while a sequence runs. As 32-bit words: 0 and 1 seed, 2 temperature,
# 3 top_p, 4 min_p, 5 typical_p, 6 presence, 7 frequency, 8 repetition, 9 top_k, 10 n_index, 11 target,
# 12 num_logprobs, 13 unused.
_RECORD = struct.Struct("=Q7f4i4x")
_WORDS = _RECORD.size // 4

_NO_I32: I32 = np.zeros(0, dtype=np.int32)
_NO_F32: F32 = np.zeros(0, dtype=np.float32)
_NO_BIAS = (_NO_I32, _NO_F32)
_NO_SEEN = (_NO_I32, _NO_I32)
Values = TypeVar("Values", bound=np.generic)


class RowEntry(NamedTuple):
    """How one row is sampled. Arrays may be views that the next token changes: build rows before folding it in."""

    record: bytes  # see pack_record
    position: int  # absolute position of the token drawn
    banned: Sequence[int] = ()
    bias: tuple[I32, F32] | None = None  # ids, values
    seen: tuple[I32, I32] | None = None  # distinct ids, times in the output
    mask: U32 | None = None  # bitmap of allowed ids, [ceil(vocab / 32)]


def pack_record(resolved: ResolvedParams, n_index: int) -> bytes:
    """The scalars with which a sequence's tokens are drawn."""
    r = resolved
    logprobs = -1 if r.logprobs is None else r.logprobs
    return _RECORD.pack(
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
    return _RECORD.pack(0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0, 0, target, num_logprobs)


def build_rows(entries: Sequence[RowEntry], vocab_size: int) -> SamplingRows:
    """One row an entry, in order. vocab_size: width of a row of logits."""
    packed = bytearray().join([entry.record for entry in entries])
    words = np.frombuffer(packed, dtype=np.int32).reshape(len(entries), _WORDS)
    # One transposing copy, then a row is a field.
    columns = np.ascontiguousarray(words.T)
    floats = columns.view(np.float32)
    mask_index, masks = _masks(entries, vocab_size)
    banned_offsets, banned_ids = _flat_ids([entry.banned for entry in entries])
    bias_offsets, bias_ids, bias_values = _flat_pairs([entry.bias or _NO_BIAS for entry in entries], _NO_BIAS)
    seen_offsets, seen_ids, seen_counts = _flat_pairs([entry.seen or _NO_SEEN for entry in entries], _NO_SEEN)
    return SamplingRows(
        temperature=floats[2],
        top_k=columns[9],
        top_p=floats[3],
        min_p=floats[4],
        typical_p=floats[5],
        presence=floats[6],
        frequency=floats[7],
        repetition=floats[8],
        seed=np.ascontiguousarray(words[:, :2]).view(np.uint64)[:, 0],
        position=np.array([entry.position for entry in entries], dtype=np.int64),
        n_index=columns[10],
        target=columns[11],
        num_logprobs=columns[12],
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


def _masks(entries: Sequence[RowEntry], vocab_size: int) -> tuple[I32, U32]:
    """Rows with the same mask object share its copy."""
    words = (vocab_size + 31) // 32
    if all(entry.mask is None for entry in entries):
        return np.full(len(entries), -1, dtype=np.int32), np.zeros((0, words), dtype=np.uint32)
    distinct: dict[int, U32] = {}
    index = []
    slot: dict[int, int] = {}
    for entry in entries:
        if entry.mask is None:
            index.append(-1)
        else:
            distinct[id(entry.mask)] = entry.mask
            index.append(slot.setdefault(id(entry.mask), len(slot)))
    return np.array(index, dtype=np.int32), np.stack(list(distinct.values()))
