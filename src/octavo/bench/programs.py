"""Programs that consist of one kernel, many times over: what is measured runs in the executor itself, on its team.

Every program ends in an attention layer of eight numbers and a head of 16 tokens, because a program has to; a step that
wants no logits leaves the head out. What that ending and the step itself cost is measured with `empty` and subtracted.
Values nobody reads are computed all the same: nothing removes dead operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from octavo.executor.interface import Batch, SamplingRows
from octavo.limits import BLOCK_TOKENS
from octavo.program.graph import Graph, Value
from octavo.program.program import Program
from octavo.sampling import build_rows
from octavo.weights.tensor import Tensor

VOCABULARY = 16
_HEAD = 8  # width of the ending

# The encoding of a file whose tensors are packed in a format.
ENCODING = {"q4": "q4_1", "q8": "q8_0", "f16": "f16", "bf16": "bf16", "f32": "f32"}


@dataclass(slots=True)
class Bench:
    """A program and its weights. `weights`: the executor's choice that keeps their formats."""

    program: Program
    tensors: dict[str, Tensor]
    weights: str = "f32"
    fusion: bool = False


@dataclass(slots=True)
class _Making:
    graph: Graph = field(default_factory=Graph)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(1))

    def embed(self, module: str, width: int) -> Value:
        self._add(f"{module}.weight", random_tensor("f32", (VOCABULARY, width), self.rng))
        return self.graph.embed(module, VOCABULARY, width)

    def linear(self, x: Value, module: str, width: int, format: str) -> Value:
        if f"{module}.weight" not in self.tensors:
            self._add(f"{module}.weight", random_tensor(format, (width, x.width), self.rng))
        return self.graph.linear(x, module, width)

    def norm(self, x: Value, module: str) -> Value:
        self._add(f"{module}.weight", random_tensor("f32", (x.width,), self.rng))
        return self.graph.rms_norm(x, module, 1e-5)

    def ending(self, weights: str, *, fusion: bool = False, layer: int = 0) -> Bench:
        if layer == 0:
            e = self.embed("ending", _HEAD)
            x = self.graph.attention(e, e, e, layer=0, heads=1, kv_heads=1)
        else:
            x = self.embed("ending", _HEAD)
        logits = self.linear(self.graph.select(x), "head", VOCABULARY, "f32")
        return Bench(self.graph.output(logits), self.tensors, weights, fusion)

    def _add(self, name: str, tensor: Tensor) -> None:
        self.tensors[name] = Tensor(name, tensor.encoding, tensor.shape, tensor.data)


def empty() -> Bench:
    return _Making().ending("f32")


def linears(n: int, k: int, format: str, copies: int) -> Bench:
    """`copies` matrices [n, k] of their own, all times the same input, one instruction each."""
    making = _Making()
    x = making.embed("x", k)
    for i in range(copies):
        making.linear(x, f"matrix.{i}", n, format)
    return making.ending("auto" if format.startswith("q") else "f32")


def norms(width: int, copies: int, *, normed: bool) -> Bench:
    """`copies` times norm + quantise in one pass, then a small q8 linear; or, not `normed`, only the linears."""
    making = _Making()
    x = making.embed("x", width)
    for i in range(copies):
        h = making.norm(x, f"norm.{i}") if normed else x
        making.linear(h, "small", VOCABULARY, "q8")
    return making.ending("auto", fusion=normed)


def attentions(heads: int, kv_heads: int, head_dim: int, layers: int) -> Bench:
    """`layers` layers that store K and V and attend, each with a KV memory of its own."""
    making = _Making()
    q = making.embed("q", heads * head_dim)
    k, v = making.embed("k", kv_heads * head_dim), making.embed("v", kv_heads * head_dim)
    for layer in range(layers):
        making.graph.attention(q, k, v, layer=layer, heads=heads, kv_heads=kv_heads)
    return making.ending("f32", layer=layers)


def random_tensor(format: str, shape: tuple[int, ...], rng: np.random.Generator) -> Tensor:
    """Random weights of a moderate size, encoded so that they are packed in that format."""
    encoding = ENCODING[format]
    size = int(np.prod(shape))
    if encoding in ("f32", "f16", "bf16"):
        values = rng.standard_normal(size, dtype=np.float32) * np.float32(0.05)
        if encoding == "f16":
            return Tensor("", encoding, shape, values.astype(np.float16).view(np.uint8))
        if encoding == "bf16":
            return Tensor("", encoding, shape, (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8))
        return Tensor("", encoding, shape, values.view(np.uint8))
    if size % 32 or shape[-1] % 32:
        raise ValueError(f"a quantised matrix has rows of whole groups of 32, not {shape[-1]}")
    head: list[float] = {"q4_1": [0.01, -0.08], "q8_0": [0.0005]}[encoding]
    scales = np.array(head, dtype=np.float16).view(np.uint8)
    blocks = np.empty((size // 32, scales.size + (32 if encoding == "q8_0" else 16)), dtype=np.uint8)
    blocks[:, : scales.size] = scales
    blocks[:, scales.size :] = rng.integers(0, 256, (size // 32, blocks.shape[1] - scales.size), dtype=np.uint8)
    return Tensor("", encoding, shape, blocks.reshape(-1))


def batch(
    rows: Sequence[int], contexts: Sequence[int], block_ops: npt.NDArray[np.int32] | None = None
) -> tuple[Batch, SamplingRows]:
    """A step without logits: sequence s has rows[s] tokens, the last of them at position contexts[s] - 1."""
    blocks = [(context + BLOCK_TOKENS - 1) // BLOCK_TOKENS for context in contexts]
    offsets = np.cumsum([0, *blocks], dtype=np.int32)
    positions = [np.arange(context - count, context, dtype=np.int64) for count, context in zip(rows, contexts)]
    step = Batch(
        token_ids=np.arange(sum(rows), dtype=np.int32) % VOCABULARY,
        positions=np.concatenate(positions),
        sequence_rows=np.cumsum([0, *rows], dtype=np.int32),
        block_tables=np.arange(offsets[-1], dtype=np.int32),
        block_offsets=offsets,
        logit_rows=np.zeros(0, dtype=np.int32),
        block_ops=np.zeros((0, 3), dtype=np.int32) if block_ops is None else block_ops,
    )
    return step, build_rows([], [], [], VOCABULARY)
