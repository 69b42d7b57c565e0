"""Builds the arrays of `SamplingRows` from one entry a row; runs every step, so it works on packed records."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np

from octavo.executor.interface import F32, I32, U32, SamplingRows
from octavo.sampling.resolve import ResolvedParams

# The scalars of a row that stay the same while a sequence runs, in the order of _FIELDS.
_RECORD = struct.Struct("=Q8f4i")
_FIELDS = np.dtype(
    [("seed", np.uint64)]
    + [
        (name, np.float32)
        for name in ("temperature", "top_p", "min_p", "typical_p", "presence", "frequency", "repetition", "unused")
    ]
    + [(name, np.int32) for name in ("top_k", "n_index", "target", "num_logprobs")]
)
assert _FIELDS.itemsize == _RECORD.size

_NO_I32 = np.zeros(0, dtype=np.int32)
_NO_F32 = np.zeros(0, dtype=np.float32)


class RowEntry(NamedTuple):
    """How one row is sampled. Arrays may be views that the next token changes: build the rows before it is folded in."""

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
        0.0,
        r.top_k,
        n_index,
        -1,
        logprobs,
    )


def pack_target(target: int, num_logprobs: int) -> bytes:
    """The scalars of a row that draws nothing and reports the target's logprob."""
    return _RECORD.pack(0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0, 0, target, num_logprobs)


def build_rows(entries: Sequence[RowEntry], vocab_size: int) -> SamplingRows:
    """One row an entry, in order. vocab_size: width of a row of logits."""
    records = np.frombuffer(b"".join([entry.record for entry in entries]), dtype=_FIELDS)
    # One transposing copy instead of a gather a field; the seed's two words come out first.
    columns = np.ascontiguousarray(records.view(np.int32).reshape(len(entries), -1).T)
    floats = columns.view(np.float32)
    mask_index, masks = _masks(entries, vocab_size)
    banned_offsets, banned_ids = _flat_ids([entry.banned for entry in entries])
    bias_offsets, bias_ids, bias_values = _flat_pairs([entry.bias for entry in entries], _NO_F32)
    seen_offsets, seen_ids, seen_counts = _flat_pairs([entry.seen for entry in entries], _NO_I32)
    return SamplingRows(
        temperature=floats[2],
        top_k=columns[10],
        top_p=floats[3],
        min_p=floats[4],
        typical_p=floats[5],
        presence=floats[6],
        frequency=floats[7],
        repetition=floats[8],
        seed=np.ascontiguousarray(records["seed"]),
        position=np.array([entry.position for entry in entries], dtype=np.int64),
        n_index=columns[11],
        target=columns[12],
        num_logprobs=columns[13],
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
    pairs: Sequence[tuple[I32, F32] | None] | Sequence[tuple[I32, I32] | None], none: F32 | I32
) -> tuple[I32, I32, F32 | I32]:
    present = [pair for pair in pairs if pair is not None]
    if not present:
        return np.zeros(len(pairs) + 1, dtype=np.int32), _NO_I32, none
    offsets = _offsets([0 if pair is None else len(pair[0]) for pair in pairs])
    ids: I32 = np.concatenate([pair[0] for pair in present])
    return offsets, ids, np.concatenate([pair[1] for pair in present])


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
