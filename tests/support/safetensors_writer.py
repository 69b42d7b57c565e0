"""Writes small safetensors files for tests."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_DTYPES = {"<f4": "F32", "<f2": "F16", "<i8": "I64"}
Item = npt.NDArray[Any] | tuple[str, tuple[int, ...], bytes]


def safetensors_bytes(tensors: Mapping[str, Item]) -> bytes:
    """`tensors`: name → array (float32, float16 or int64), or (dtype such as "BF16", shape, bytes)."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = bytearray()
    for name, item in tensors.items():
        if isinstance(item, tuple):
            dtype, shape, raw = item
        else:
            dtype, shape, raw = _DTYPES[item.dtype.str], item.shape, np.ascontiguousarray(item).tobytes()
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + bytes(data)


def write_safetensors(path: str | Path, tensors: Mapping[str, Item]) -> None:
    Path(path).write_bytes(safetensors_bytes(tensors))
