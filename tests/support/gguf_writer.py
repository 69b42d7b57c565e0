"""Writes small GGUF files for tests. Independent of the reader on purpose: the layout is written out again here."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11, "Q4_K": 12,
    "Q5_K": 13, "Q6_K": 14, "IQ4_NL": 20, "BF16": 30,
}  # fmt: skip
_NUMPY_KINDS = {"u1": 0, "i1": 1, "u2": 2, "i2": 3, "u4": 4, "i4": 5, "f4": 6, "b1": 7, "u8": 10, "i8": 11, "f8": 12}


def _string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def encode_value(value: Any) -> bytes:
    """bool, int (u32; u64 or i64 when it does not fit), float (f32), str, list of these, or a NumPy array or scalar."""
    if isinstance(value, (bool, np.bool_)):
        return struct.pack("<IB", 7, value)
    if isinstance(value, np.generic):
        return struct.pack("<I", _NUMPY_KINDS[value.dtype.str[1:]]) + value.tobytes()
    if isinstance(value, int):
        if 0 <= value < 1 << 32:
            return struct.pack("<II", 4, value)
        return struct.pack("<IQ", 10, value) if value > 0 else struct.pack("<Iq", 11, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, (str, bytes)):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, np.ndarray):
        return struct.pack("<IIQ", 9, _NUMPY_KINDS[value.dtype.str[1:]], value.size) + value.tobytes()
    kind = struct.unpack("<I", encode_value(value[0])[:4])[0] if value else 8
    return struct.pack("<IIQ", 9, kind, len(value)) + b"".join(encode_value(item)[4:] for item in value)


def gguf_bytes(
    metadata: dict[str, Any],
    tensors: list[tuple[str, str, tuple[int, ...], bytes]],
    *,
    version: int = 3,
) -> bytes:
    alignment = int(metadata.get("general.alignment", 32))
    out = bytearray(b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata)))
    for key, value in metadata.items():
        out += _string(key) + encode_value(value)
    data = bytearray()
    for name, kind, shape, raw in tensors:
        data += bytes(-len(data) % alignment)
        dims = tuple(reversed(shape))
        out += _string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, TYPES[kind], len(data))
        data += raw
    out += bytes(-len(out) % alignment)
    return bytes(out + data)


def write_gguf(
    path: str | Path,
    metadata: dict[str, Any],
    tensors: list[tuple[str, str, tuple[int, ...], bytes]],
    *,
    version: int = 3,
) -> None:
    """`tensors`: (name, ggml type such as "Q4_1", shape (outputs, inputs) or (n,), the encoded bytes)."""
    Path(path).write_bytes(gguf_bytes(metadata, tensors, version=version))
