"""Scaling of rotary frequencies, one formula for every executor.

Plain float64 +, -, *, / in a written order: no libm, so that every machine gets the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.errors import UnsupportedModelError
from octavo.program.program import Rope

TWO_PI = 6.283185307179586


def scale_frequencies(frequencies: Sequence[float], rope: Rope) -> list[float]:
    """`frequencies` (theta ** (-2i / rotary_dim), radians a token, one a rotated pair) after `rope.scaling`."""
    if rope.scaling == "none":
        return [float(f) for f in frequencies]
    if rope.scaling == "linear":
        return [float(f) / rope.factor for f in frequencies]
    if rope.scaling == "llama3":
        return [_llama3(float(f), rope) for f in frequencies]
    if rope.scaling == "factors":
        if len(rope.factors) != len(frequencies):
            raise UnsupportedModelError(f"rope: {len(rope.factors)} factors for {len(frequencies)} frequencies")
        return [float(f) / factor for f, factor in zip(frequencies, rope.factors)]
    raise UnsupportedModelError(f"rope scaling {rope.scaling!r}; supported: none, linear, llama3, factors")


def _llama3(frequency: float, rope: Rope) -> float:
    """Llama 3.1: short wavelengths stay, long ones are divided by `factor`, those between are blended."""
    turns = rope.original_context * frequency / TWO_PI  # full turns within the original context
    if turns > rope.high_freq_factor:
        return frequency
    if turns < rope.low_freq_factor:
        return frequency / rope.factor
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return (1.0 - blend) * (frequency / rope.factor) + blend * frequency
