"""A tensor of a checkpoint as it lies in its file."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Tensor:
    """`shape` is (outputs, inputs) for a matrix, (n,) for a vector. `data` is the file's bytes, read-only, mapped.

    encoding: f32 f16 bf16 q8_0 q4_0 q4_1 q5_0 q5_1 q4_k q5_k q6_k (row-major; quantised rows are whole blocks).
    row_order: when set, output i of the model is row row_order[i] of the file (GGUF stores Llama's q and k permuted).
    """

    name: str
    encoding: str
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]
    row_order: npt.NDArray[np.int32] | None = None
