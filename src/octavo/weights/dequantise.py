"""Every encoding of a checkpoint as float32, in NumPy: what the float64 oracle computes with.

Block layouts are GGML's (ggml-common.h). d and m are fp16; all products here are exact in float32, so each value is
rounded once and equals what the packed kernel formats hold. Blocks have 32 values, K-blocks 256.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from octavo.errors import UnsupportedModelError
from octavo.weights.tensor import Tensor

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]


def dequantise(tensor: Tensor) -> F32:
    """The tensor's values [shape], rows in the model's order."""
    values = decode(tensor.encoding, tensor.data).reshape(tensor.shape)
    return values if tensor.row_order is None else values[tensor.row_order]


def decode(encoding: str, data: U8) -> F32:
    """All values of `data` (whole blocks of `encoding`), flat."""
    data = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    if encoding == "f32":
        return data.view(np.float32)
    if encoding == "f16":
        return data.view(np.float16).astype(np.float32)
    if encoding == "bf16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if encoding not in _BLOCKS:
        raise UnsupportedModelError(f"encoding {encoding!r} is not supported; supported: {', '.join(ENCODINGS)}")
    block_bytes, decode_blocks = _BLOCKS[encoding]
    return decode_blocks(data.reshape(-1, block_bytes)).reshape(-1)


def _half(blocks: U8, at: int) -> F32:
    """The fp16 at byte `at` of each block, [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: U8) -> U8:
    """[blocks, n] bytes → [blocks, 2n]: all low nibbles, then all high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _fifth_bits(packed: U8) -> U8:
    """4 bytes a block → [blocks, 32]: bit i is bit 4 of value i."""
    bits: U8 = np.unpackbits(packed, axis=1, bitorder="little") * np.uint8(16)
    return bits


def _q4_0(b: U8) -> F32:
    return _half(b, 0) * (_nibbles(b[:, 2:18]).astype(np.float32) - 8)


def _q4_1(b: U8) -> F32:
    return _nibbles(b[:, 4:20]).astype(np.float32) * _half(b, 0) + _half(b, 2)


def _q5_0(b: U8) -> F32:
    q = _nibbles(b[:, 6:22]) | _fifth_bits(b[:, 2:6])
    return _half(b, 0) * (q.astype(np.float32) - 16)


def _q5_1(b: U8) -> F32:
    q = _nibbles(b[:, 8:24]) | _fifth_bits(b[:, 4:8])
    return q.astype(np.float32) * _half(b, 0) + _half(b, 2)


def _q8_0(b: U8) -> F32:
    return _half(b, 0) * b[:, 2:34].view(np.int8).astype(np.float32)


def _k_scales(packed: U8) -> tuple[F32, F32]:
    """12 bytes a block → 8 six-bit scales and 8 six-bit mins, each [blocks, 8, 1]."""
    low, high, top = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([low & 63, (top & 15) | (low >> 6 << 4)], axis=1)
    mins = np.concatenate([high & 63, (top >> 4) | (high >> 6 << 4)], axis=1)
    return scales.astype(np.float32)[:, :, None], mins.astype(np.float32)[:, :, None]


def _k_affine(b: U8, q: U8) -> F32:
    """d·scale·q − dmin·min for q [blocks, 8, 32]."""
    scales, mins = _k_scales(b[:, 4:16])
    scaled: F32 = q.astype(np.float32) * (_half(b, 0)[:, :, None] * scales)
    return scaled - _half(b, 2)[:, :, None] * mins


def _q4_k(b: U8) -> F32:
    packed = b[:, 16:144].reshape(-1, 4, 1, 32)  # 64 values share 32 bytes: low nibbles first
    q = np.concatenate([packed & 15, packed >> 4], axis=2).reshape(-1, 8, 32)
    return _k_affine(b, q)


def _q5_k(b: U8) -> F32:
    packed = b[:, 48:176].reshape(-1, 4, 1, 32)
    q = np.concatenate([packed & 15, packed >> 4], axis=2).reshape(-1, 8, 32)
    shifts = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    fifth = (b[:, 16:48].reshape(-1, 1, 32) >> shifts & 1) << 4  # bit g of byte i: value i of group g
    return _k_affine(b, q | fifth)


def _q6_k(b: U8) -> F32:
    low = b[:, 0:128].reshape(-1, 2, 1, 64)  # a half of 128 values: 64 bytes of low nibbles, 32 of upper bit pairs
    low = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 1, 4, 1)
    high = (b[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3) << 4
    q = (low | high).reshape(-1, 16, 16).astype(np.float32) - 32
    scales = b[:, 192:208].view(np.int8).astype(np.float32)
    return (_half(b, 208) * scales)[:, :, None] * q


_BLOCKS: dict[str, tuple[int, Callable[[U8], F32]]] = {
    "q8_0": (34, _q8_0),
    "q4_0": (18, _q4_0),
    "q4_1": (20, _q4_1),
    "q5_0": (22, _q5_0),
    "q5_1": (24, _q5_1),
    "q4_k": (144, _q4_k),
    "q5_k": (176, _q5_k),
    "q6_k": (210, _q6_k),
}
ENCODINGS = ("f32", "f16", "bf16", *_BLOCKS)
