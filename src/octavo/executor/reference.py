"""The oracle: a `Program` executed in NumPy float64, as plainly as it can be written.

It runs the same `Batch` over the same kind of paged KV memory as the native executor, so that the two can be compared
step for step. It is not fast, and its bits are not promised: it says what the right numbers are, within rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.errors import InvalidParameterError
from octavo.executor.interface import Batch, SamplingRows, StepResult
from octavo.limits import BLOCK_TOKENS
from octavo.program.program import Op, Program, Rope
from octavo.program.rope import scale_frequencies

F64 = npt.NDArray[np.float64]
# What K and V are kept in; int8 values are kept as what they stand for, element times scale.
_KV_DTYPES: dict[str, npt.DTypeLike] = {"f64": np.float64, "f32": np.float32, "f16": np.float16, "int8": np.float64}


class ReferenceExecutor:
    """`weights`: every array of `program.weight_shapes()`, dense. `kv_dtype`: what stored K and V are rounded to."""

    def __init__(
        self,
        program: Program,
        weights: Mapping[str, npt.NDArray[Any]],
        *,
        num_blocks: int,
        kv_dtype: str = "f64",
    ) -> None:
        if kv_dtype not in _KV_DTYPES:
            raise InvalidParameterError("kv_dtype", kv_dtype, f"one of {', '.join(_KV_DTYPES)}")
        self._program = program
        self._weights: dict[str, F64] = {}
        for name, shape in program.weight_shapes().items():
            array = np.asarray(weights[name], dtype=np.float64)
            if array.shape != shape:
                raise InvalidParameterError(name, array.shape, f"the program needs shape {shape}")
            self._weights[name] = array
        # [block][layer][K, V][kv_head][token][head_dim]
        shape = (num_blocks, program.layers, 2, program.kv_heads, BLOCK_TOKENS, program.head_dim)
        self._pool = np.zeros(shape, dtype=_KV_DTYPES[kv_dtype])
        self._kv_dtype = kv_dtype
        self._arithmetic = f"reference-{kv_dtype}"

    @property
    def arithmetic(self) -> str:
        return self._arithmetic

    @property
    def num_blocks(self) -> int:
        return len(self._pool)

    @property
    def vocab_size(self) -> int:
        return self._program.vocab_size

    def step(self, batch: Batch, sampling: SamplingRows) -> StepResult:
        """Greedy rows and target rows only; logprobs from the raw logits."""
        _only_greedy_or_target(sampling)
        logits, finite = self._run(batch)
        return _sample(logits, finite, sampling)

    def logits(self, batch: Batch) -> F64:
        """Runs the step and gives the logits [R, vocab] instead of sampling."""
        return self._run(batch)[0]

    def forward(self, token_ids: Sequence[int]) -> F64:
        """Logits [T, vocab] of one sequence from its start; overwrites the first blocks of the pool."""
        blocks = -(-len(token_ids) // BLOCK_TOKENS)
        rows = np.arange(len(token_ids), dtype=np.int32)
        block_ids = np.arange(blocks, dtype=np.int32)
        nothing = np.full(blocks, -1, dtype=np.int32)
        return self.logits(
            Batch(
                token_ids=np.asarray(token_ids, dtype=np.int32),
                positions=rows.astype(np.int64),
                sequence_rows=np.array([0, len(token_ids)], dtype=np.int32),
                block_tables=block_ids,
                block_offsets=np.array([0, blocks], dtype=np.int32),
                logit_rows=rows,
                block_ops=np.stack([block_ids, nothing, np.zeros_like(nothing)], axis=1),
            )
        )

    def export_block(self, block: int) -> bytes:
        data: bytes = self._pool[block].tobytes()
        return data

    def import_block(self, block: int, data: bytes) -> None:
        if len(data) != self._pool[block].nbytes:
            raise InvalidParameterError("data", f"{len(data)} bytes", f"a block has {self._pool[block].nbytes} bytes")
        self._pool[block] = np.frombuffer(data, dtype=self._pool.dtype).reshape(self._pool[block].shape)

    def close(self) -> None:
        self._weights.clear()

    # Execution ------------------------------------------------------------------------------------------------------

    def _run(self, batch: Batch) -> tuple[F64, npt.NDArray[np.bool_]]:
        for target, source, tokens in batch.block_ops:
            self._pool[target] = 0
            if source >= 0:
                self._pool[target, :, :, :, :tokens] = self._pool[source, :, :, :, :tokens]
        values: dict[int, F64] = {}
        finite = np.ones(len(batch.token_ids), dtype=np.bool_)
        with np.errstate(all="ignore"):  # a NaN in one row is reported by its flag, not by a warning
            for op in self._program.ops:
                values[op.output] = self._compute(op, [values[i] for i in op.inputs if i], batch, finite)
        return values[self._program.output], finite

    def _compute(self, op: Op, inputs: list[F64], batch: Batch, finite: npt.NDArray[np.bool_]) -> F64:
        weights = [self._weights[name] for name in op.weights]
        attrs = op.attrs
        if op.kind == "embed":
            embedded: F64 = weights[0][np.asarray(batch.token_ids)]
            return embedded
        if op.kind == "rms_norm":
            return _rms_norm(inputs[0], weights[0], attrs["eps"], max(attrs["heads"], 1))
        if op.kind == "linear":
            y: F64 = inputs[0] @ weights[0].T
            return y + weights[1] if len(weights) > 1 else y
        if op.kind == "rope":
            return _rotate(inputs[0], np.asarray(batch.positions), attrs["heads"], attrs["rope"])
        if op.kind == "attention":
            return self._attention(op, inputs, batch, finite)
        if op.kind == "add":
            return inputs[0] + inputs[1]
        if op.kind == "silu_mul":
            return inputs[0] / (1.0 + np.exp(-inputs[0])) * inputs[1]
        if op.kind == "select":
            finite &= np.isfinite(inputs[0]).all(axis=1)
            selected: F64 = inputs[0][np.asarray(batch.logit_rows)]
            return selected
        raise InvalidParameterError("op", op.kind, "not an operation of program.py")

    def _attention(self, op: Op, inputs: list[F64], batch: Batch, finite: npt.NDArray[np.bool_]) -> F64:
        q, k, v = inputs
        layer, heads, kv_heads, head_dim = (op.attrs[a] for a in ("layer", "heads", "kv_heads", "head_dim"))
        out = np.empty_like(q)
        for rows, table in _sequences(batch):
            positions = np.asarray(batch.positions)[rows]
            blocks, slots = table[positions // BLOCK_TOKENS], positions % BLOCK_TOKENS
            for which, new in ((0, k), (1, v)):
                stored = new[rows].reshape(-1, kv_heads, head_dim)
                stored = _rounded_to_int8(stored) if self._kv_dtype == "int8" else stored.astype(self._pool.dtype)
                self._pool[blocks, layer, which, :, slots] = stored
                finite[rows] &= np.isfinite(stored).all(axis=(1, 2))
            length = int(positions[-1]) + 1
            past = self._pool[table[: -(-length // BLOCK_TOKENS)], layer]  # [blocks][K, V][kv_head][16][head_dim]
            past = past.transpose(1, 2, 0, 3, 4).reshape(2, kv_heads, -1, head_dim)[:, :, :length].astype(np.float64)
            queries = q[rows].reshape(-1, kv_heads, heads // kv_heads, head_dim)
            out[rows] = _attend(queries, past[0], past[1], positions, op.attrs).reshape(-1, heads * head_dim)
        return out


def _sequences(batch: Batch) -> Iterator[tuple[slice, npt.NDArray[np.int32]]]:
    """Rows and block table of each sequence."""
    for s in range(len(batch.sequence_rows) - 1):
        table = np.asarray(batch.block_tables)[batch.block_offsets[s] : batch.block_offsets[s + 1]]
        yield slice(int(batch.sequence_rows[s]), int(batch.sequence_rows[s + 1])), table


def _rounded_to_int8(x: F64) -> F64:
    """Each vector x[..., :] rounded to 255 levels of its own largest magnitude; NaN where it isn't finite."""
    scale = np.abs(x).max(axis=-1, keepdims=True) / 127
    scale = np.where(np.isinf(scale), np.nan, scale)
    levels: F64 = np.where(scale < 1e-30 / 127, 0.0, np.rint(x / scale))
    return levels * scale


def _rms_norm(x: F64, weight: F64, eps: float, heads: int) -> F64:
    parts: F64 = x.reshape(len(x), heads, -1)
    parts = parts / np.sqrt((parts**2).mean(axis=2, keepdims=True) + eps) * weight
    return parts.reshape(x.shape)


def _rotate(x: F64, positions: npt.NDArray[np.int64], heads: int, rope: Rope) -> F64:
    half = rope.rotary_dim // 2
    frequencies = scale_frequencies([rope.theta ** (-2 * i / rope.rotary_dim) for i in range(half)], rope)
    angle = positions[:, None] * np.array(frequencies)  # [T, half]
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    out: F64 = x.reshape(len(x), heads, -1).copy()
    x1, x2 = out[:, :, :half].copy(), out[:, :, half : 2 * half].copy()
    out[:, :, :half] = x1 * cos - x2 * sin
    out[:, :, half : 2 * half] = x2 * cos + x1 * sin
    return out.reshape(x.shape)


def _attend(q: F64, k: F64, v: F64, positions: npt.NDArray[np.int64], attrs: Mapping[str, Any]) -> F64:
    """q [T, kv_heads, group, d]; k, v [kv_heads, length, d] → [T, kv_heads, group, d]."""
    scores = np.einsum("thgd,hnd->thgn", q * attrs["scale"], k, optimize=True)
    if attrs["soft_cap"]:
        scores = attrs["soft_cap"] * np.tanh(scores / attrs["soft_cap"])
    distance = positions[:, None] - np.arange(k.shape[1])[None, :]
    visible = distance >= 0
    if attrs["window"]:
        visible &= distance < attrs["window"]
    scores = np.where(visible[:, None, None, :], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=3, keepdims=True))
    weights /= weights.sum(axis=3, keepdims=True)
    out: F64 = np.einsum("thgn,hnd->thgd", weights, v, optimize=True)
    return out


# Sampling -----------------------------------------------------------------------------------------------------------


def _only_greedy_or_target(sampling: SamplingRows) -> None:
    def refuse(field: str, bad: Iterable[bool]) -> None:
        if any(bad):
            raise InvalidParameterError(field, "set", "the reference executor is greedy, or reports targets")

    table = sampling.table()
    drawn = table["target"] < 0
    for field, off in {"temperature": 0, "presence": 0, "frequency": 0, "repetition": 1}.items():
        refuse(field, (table[field] != off) & drawn)
    edits = sampling.edits
    if edits is not None:
        refuse("mask_index", (edits.mask_index >= 0) & drawn)
        refuse("banned_ids", (np.diff(edits.banned_offsets) > 0) & drawn)
        refuse("bias_ids", (np.diff(edits.bias_offsets) > 0) & drawn)


def _sample(logits: F64, finite: npt.NDArray[np.bool_], sampling: SamplingRows) -> StepResult:
    count = len(logits)
    ok = np.asarray(np.isfinite(logits).all(axis=1))
    ids, logprobs, ranks = [-1] * count, [0.0] * count, [0] * count
    top_ids: list[list[int]] = [[] for _ in range(count)]
    top_logprobs: list[list[float]] = [[] for _ in range(count)]
    table = sampling.table()
    for r in np.flatnonzero(ok):
        row = logits[r]
        target, wanted = int(table["target"][r]), int(table["num_logprobs"][r])
        ids[r] = chosen = target if target >= 0 else int(row.argmax())
        if wanted < 0:
            continue
        known = row - row.max() - np.log(np.exp(row - row.max()).sum())
        logprobs[r] = float(known[chosen])
        ranks[r] = 1 + int(np.count_nonzero(row > row[chosen]))
        best = np.argsort(-row, kind="stable")[:wanted]
        top_ids[r], top_logprobs[r] = best.tolist(), known[best].tolist()
    return StepResult(ids, logprobs, ranks, top_ids, top_logprobs, _flags(ok), _flags(finite))


def _flags(values: npt.NDArray[np.bool_]) -> bytes:
    return values.astype(np.uint8).tobytes()
