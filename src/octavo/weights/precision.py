"""Which kernel format a tensor of a file is packed into. Formats are those of native/formats/weight.h."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from octavo.errors import InvalidParameterError
from octavo.weights.tensor import Tensor

logger = logging.getLogger("octavo.weights")

CHOICES = ("auto", "f32", "q8", "q4")

# A quantised file keeps its own class; its groups' scales are fitted to those of our blocks (native/formats/pack.h).
_QUANTISED = {
    "q4_0": "q4",
    "q4_1": "q4",
    "q4_k": "q4",
    "q5_0": "q8",
    "q8_0": "q8",
    "q5_1": "q8",
    "q5_k": "q8",
    "q6_k": "q8",
}
_FLOAT = ("f32", "f16", "bf16")


def kernel_format(encoding: str, choice: str = "auto") -> str:
    """The format (f32 f16 bf16 q8 q4) for a matrix of this encoding.

    auto: a file's own precision class; f16 and bf16 become q8. f32: the file's numbers, none rounded (f16 and bf16 hold
    them in half the memory, quantised ones become f32). q8, q4: float encodings are quantised; quantised stay as auto.
    """
    if choice not in CHOICES:
        raise InvalidParameterError("weights", choice, f"one of {', '.join(CHOICES)}")
    if encoding in _FLOAT:
        if choice == "auto":
            return "f32" if encoding == "f32" else "q8"
        return encoding if choice == "f32" else choice
    return "f32" if choice == "f32" else _QUANTISED[encoding]


def kernel_formats(tensors: Mapping[str, Tensor], choice: str = "auto") -> dict[str, str]:
    """The format of every tensor, by name: vectors (norms, biases) stay f32. Logs what `auto` rounds."""
    formats = {
        name: kernel_format(tensor.encoding, choice) if len(tensor.shape) == 2 else "f32"
        for name, tensor in tensors.items()
    }
    if choice == "auto":
        halves = sorted({t.encoding for t in tensors.values() if len(t.shape) == 2} & {"f16", "bf16"})
        if halves:
            logger.info(
                "%s weights are packed as q8 (weights=auto); weights=f32 keeps them exact", " and ".join(halves)
            )
        rounded = sorted({t.encoding for t in tensors.values()} & {"q5_1", "q5_k", "q6_k"})
        if rounded:
            logger.info("%s weights are requantised to q8 (weights=auto)", " and ".join(rounded))
    return formats
