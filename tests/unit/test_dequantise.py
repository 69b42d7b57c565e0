from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from octavo.errors import UnsupportedModelError
from octavo.weights.dequantise import ENCODINGS, decode, dequantise
from octavo.weights.tensor import Tensor

BLOCKS = Path(__file__).parent.parent / "parity" / "golden" / "blocks.npz"


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_random_blocks_decode_to_the_bits_of_the_gguf_package(encoding: str) -> None:
    with np.load(BLOCKS) as golden:
        data, values = golden[f"{encoding}.data"], golden[f"{encoding}.values"]
    decoded = decode(encoding, data)
    assert decoded.dtype == np.float32
    np.testing.assert_array_equal(decoded.view(np.uint32), values.view(np.uint32))


def test_row_order_gives_the_rows_of_the_model() -> None:
    values = np.arange(12, dtype=np.float32).reshape(4, 3)
    order = np.array([0, 2, 1, 3], dtype=np.int32)
    tensor = Tensor("q", "f32", (4, 3), values.reshape(-1).view(np.uint8), order)
    np.testing.assert_array_equal(dequantise(tensor), values[[0, 2, 1, 3]])


def test_unknown_encoding_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="iq2_xs"):
        decode("iq2_xs", np.zeros(64, dtype=np.uint8))
