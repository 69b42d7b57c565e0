"""A `Program`: a model's forward pass as a flat list of operations over values.

A value is an array [rows, width] in float32 (rows: the tokens of a step, or, after `select`, the rows whose logits are
wanted). Weights are named as in the checkpoint (Hugging Face names). Operations and their attributes:

| kind      | inputs       | weights          | attributes |
|-----------|--------------|------------------|------------|
| embed     | (token ids)  | table            | |
| rms_norm  | x            | weight           | eps, heads (0: over the whole width; h: over each of h heads) |
| linear    | x            | matrix[, bias]   | |
| rope      | x            |                  | heads, head_dim, rope (a `Rope`): the first half turns with the second |
| attention | q, k, v      |                  | layer, heads, kv_heads, head_dim, scale, window, soft_cap (0: none) |
| add       | a, b         |                  | |
| silu_mul  | gate, up     |                  | silu(gate) * up |
| select    | x            |                  | keeps the rows whose logits are wanted |
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from octavo.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding (Su et al. 2021). Frequencies: theta ** (-2i / rotary_dim), then `scaling` (see rope.py).

    scaling: "none"; "linear" (divided by factor); "llama3" (Llama 3.1's by-wavelength blend; factor, low_freq_factor,
    high_freq_factor, original_context); "factors" (divided by `factors`, one a frequency, as GGUF's rope_freqs.weight).
    """

    theta: float
    rotary_dim: int
    scaling: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Op:
    kind: str
    inputs: tuple[int, ...]
    output: int
    weights: tuple[str, ...] = ()
    attrs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Program:
    ops: tuple[Op, ...]
    widths: tuple[int, ...]  # width of each value; value 0 is the token ids (width 1)
    output: int  # the logits
    vocab_size: int
    layers: int
    kv_heads: int
    head_dim: int

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight the program reads, with the shape it must have: (outputs, inputs) or (n,)."""
        shapes: dict[str, tuple[int, ...]] = {}
        for op in self.ops:
            for name, shape in zip(op.weights, self._shapes(op)):
                if shapes.setdefault(name, shape) != shape:
                    raise UnsupportedModelError(f"{name}: used with shapes {shapes[name]} and {shape}")
        return shapes

    def macs(self) -> tuple[int, int]:
        """Multiply-adds of the linears: for each row of a step, and again for each row whose logits are wanted."""
        counts, selected = [0, 0], False
        for op in self.ops:
            selected = selected or op.kind == "select"
            if op.kind == "linear":
                counts[selected] += self.widths[op.output] * self.widths[op.inputs[0]]
        return counts[0], counts[1]

    def _shapes(self, op: Op) -> tuple[tuple[int, ...], ...]:
        width = self.widths[op.output]
        if op.kind == "embed":
            return ((self.vocab_size, width),)
        if op.kind == "linear":
            return ((width, self.widths[op.inputs[0]]), (width,))
        if op.kind == "rms_norm":
            return ((width // max(op.attrs["heads"], 1),),)
        return ()
