"""`Graph` traces a model page into a `Program`.

A page calls one method per operation and passes the values on; nothing is computed. Weights are named by their module,
as in the checkpoint: `g.linear(x, "lm_head", …)` reads `lm_head.weight` (and `lm_head.bias`). Widths are checked while
tracing, so that a wrong page or an inconsistent config fails with the name of the operation, before any weight is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo.errors import UnsupportedModelError
from octavo.program.program import Op, Program, Rope


@dataclass(frozen=True, slots=True)
class Value:
    """A symbolic array [rows, width]; `selected`: its rows are those whose logits are wanted, not the step's tokens."""

    index: int
    width: int
    selected: bool = False


class Graph:
    def __init__(self) -> None:
        self._ops: list[Op] = []
        self._widths: list[int] = [1]  # value 0: the token ids
        self._vocab_size = 0
        self._layers = 0
        self._kv_shape: tuple[int, int] | None = None  # (kv_heads, head_dim), the same in every layer

    def embed(self, module: str, vocab_size: int, width: int) -> Value:
        """Rows of the table [vocab_size, width] at the token ids."""
        self._vocab_size = _positive(f"{module}: vocab_size", vocab_size)
        return self._append("embed", (Value(0, 1),), _positive(f"{module}: width", width), (f"{module}.weight",))

    def rms_norm(self, x: Value, module: str, eps: float, heads: int = 0) -> Value:
        """x / sqrt(mean(x²) + eps) * weight, over the whole width, or over each of `heads` heads with one weight."""
        if heads:
            _divides(f"{module}: heads", heads, x.width)
        if not eps > 0:
            raise UnsupportedModelError(f"{module}: eps={eps} must be positive")
        return self._append("rms_norm", (x,), x.width, (f"{module}.weight",), eps=float(eps), heads=heads)

    def linear(self, x: Value, module: str, width: int, bias: bool = False) -> Value:
        """x · weightᵀ (+ bias); weight is [width, x.width]."""
        weights = (f"{module}.weight", f"{module}.bias") if bias else (f"{module}.weight",)
        return self._append("linear", (x,), _positive(f"{module}: width", width), weights)

    def rope(self, x: Value, heads: int, rope: Rope) -> Value:
        """Rotates each head by its row's position."""
        head_dim = _divides("rope: heads", heads, x.width)
        if rope.rotary_dim % 2 or not 0 < rope.rotary_dim <= head_dim:
            raise UnsupportedModelError(f"rope: rotary_dim={rope.rotary_dim} must be even and at most {head_dim}")
        if rope.scaling == "factors" and len(rope.factors) != rope.rotary_dim // 2:
            raise UnsupportedModelError(f"rope: {len(rope.factors)} factors for {rope.rotary_dim // 2} frequencies")
        return self._append("rope", (x,), x.width, heads=heads, head_dim=head_dim, rope=rope)

    def attention(
        self,
        q: Value,
        k: Value,
        v: Value,
        *,
        layer: int,
        heads: int,
        kv_heads: int,
        scale: float | None = None,
        window: int = 0,
        soft_cap: float = 0.0,
    ) -> Value:
        """Causal attention over the sequence's KV after appending k and v; scale is 1/sqrt(head_dim) by default."""
        where = f"attention of layer {layer}"
        head_dim = _divides(f"{where}: heads", heads, q.width)
        _divides(f"{where}: kv_heads", kv_heads, heads)
        if k.width != kv_heads * head_dim or v.width != k.width:
            raise UnsupportedModelError(
                f"{where}: k and v have widths {k.width} and {v.width}, "
                f"{kv_heads} heads of {head_dim} need {kv_heads * head_dim}"
            )
        if layer != self._layers:
            raise UnsupportedModelError(f"{where}: layers must come in order, layer {self._layers} is next")
        if self._kv_shape not in (None, (kv_heads, head_dim)):
            raise UnsupportedModelError(f"{where}: KV shape {(kv_heads, head_dim)} differs from {self._kv_shape}")
        self._kv_shape = (kv_heads, head_dim)
        self._layers += 1
        return self._append(
            "attention",
            (q, k, v),
            q.width,
            layer=layer,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5 if scale is None else float(scale),
            window=window,
            soft_cap=float(soft_cap),
        )

    def add(self, a: Value, b: Value) -> Value:
        return self._append("add", (a, b), self._same("add", a, b))

    def silu_mul(self, gate: Value, up: Value) -> Value:
        """silu(gate) * up."""
        return self._append("silu_mul", (gate, up), self._same("silu_mul", gate, up))

    def select(self, x: Value) -> Value:
        """Only the rows whose logits are wanted; everything after it is computed for them alone."""
        if any(op.kind == "select" for op in self._ops):
            raise UnsupportedModelError("select: a program selects its rows once")
        out = self._append("select", (x,), x.width)
        return Value(out.index, out.width, selected=True)

    def output(self, logits: Value) -> Program:
        """Ends the trace: `logits` are the program's result."""
        if self._kv_shape is None:
            raise UnsupportedModelError("output: a program has at least one attention layer")
        if not logits.selected:
            raise UnsupportedModelError("output: logits are computed after select")
        if logits.width != self._vocab_size:
            raise UnsupportedModelError(f"output: logits have width {logits.width}, the vocabulary {self._vocab_size}")
        kv_heads, head_dim = self._kv_shape
        program = Program(
            ops=tuple(self._ops),
            widths=tuple(self._widths),
            output=logits.index,
            vocab_size=self._vocab_size,
            layers=self._layers,
            kv_heads=kv_heads,
            head_dim=head_dim,
        )
        program.weight_shapes()  # raises when a weight is used with two shapes
        return program

    def _append(
        self, kind: str, inputs: tuple[Value, ...], width: int, weights: tuple[str, ...] = (), **attrs: Any
    ) -> Value:
        selected = inputs[0].selected
        if any(value.selected != selected for value in inputs):
            raise UnsupportedModelError(f"{kind}: one input has all rows, another only the selected ones")
        if selected and kind in ("rope", "attention"):
            raise UnsupportedModelError(f"{kind}: needs all rows, so it comes before select")
        index = len(self._widths)
        self._widths.append(width)
        self._ops.append(Op(kind, tuple(value.index for value in inputs), index, weights, attrs))
        return Value(index, width, selected)

    @staticmethod
    def _same(kind: str, a: Value, b: Value) -> int:
        if a.width != b.width:
            raise UnsupportedModelError(f"{kind}: widths {a.width} and {b.width} differ")
        return a.width


def _positive(what: str, number: int) -> int:
    if number <= 0:
        raise UnsupportedModelError(f"{what}={number} must be positive")
    return number


def _divides(what: str, parts: int, whole: int) -> int:
    """Size of one of `parts` equal parts of `whole`."""
    if parts <= 0 or whole % parts:
        raise UnsupportedModelError(f"{what}={parts} does not divide {whole}")
    return whole // parts
