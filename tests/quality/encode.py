"""Simple encoders of Q5_1, Q5_K and Q6_K (round to nearest, no search), to measure what requantising costs.

Each takes float32 [rows, n], n a multiple of the block (32, 256, 256), and gives the bytes uint8 [rows, bytes].
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def _halves(x: np.ndarray) -> np.ndarray:
    """float32 [...] → fp16 as bytes [..., 2]."""
    return np.ascontiguousarray(x.astype(np.float16))[..., None].view(np.uint8)


def _rounded(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).astype(np.float32)


def _divided(x: np.ndarray, by: np.ndarray) -> np.ndarray:
    return np.divide(x, by, out=np.zeros(np.broadcast_shapes(x.shape, by.shape), np.float32), where=by != 0)


def encode_q5_1(x: np.ndarray) -> np.ndarray:
    blocks = x.reshape(len(x), -1, 32)
    low = _rounded(blocks.min(axis=2, keepdims=True))
    scale = _rounded((blocks.max(axis=2, keepdims=True) - low) / 31)
    q = np.clip(np.rint(_divided(blocks - low, scale)), 0, 31).astype(np.uint8)
    fifth = np.packbits(q >> 4, axis=2, bitorder="little")
    nibbles = (q[..., :16] & 15) | (q[..., 16:] & 15) << 4
    return np.concatenate([_halves(scale[..., 0]), _halves(low[..., 0]), fifth, nibbles], axis=2).reshape(len(x), -1)


def encode_q5_k(x: np.ndarray) -> np.ndarray:
    blocks = x.reshape(len(x), -1, 8, 32)
    low = np.maximum(0, -blocks.min(axis=3))  # what is subtracted; [rows, blocks, 8]
    scale = (np.maximum(blocks.max(axis=3), 0) + low) / 31
    d = _rounded(scale.max(axis=2, keepdims=True) / 63)
    dmin = _rounded(low.max(axis=2, keepdims=True) / 63)
    scales = np.clip(np.rint(_divided(scale, d)), 0, 63)
    mins = np.clip(np.rint(_divided(low, dmin)), 0, 63)
    q = _divided(blocks + (dmin * mins)[..., None], (d * scales)[..., None])
    q = np.clip(np.rint(q), 0, 31).astype(np.uint8)
    s, m = scales.astype(np.uint8), mins.astype(np.uint8)
    packed = [
        s[..., :4] | (s[..., 4:] >> 4) << 6,
        m[..., :4] | (m[..., 4:] >> 4) << 6,
        (s[..., 4:] & 15) | (m[..., 4:] & 15) << 4,
    ]
    fifth = np.packbits(q >> 4, axis=2, bitorder="little").reshape(*q.shape[:2], 32)
    nibbles = ((q[:, :, 0::2] & 15) | (q[:, :, 1::2] & 15) << 4).reshape(*q.shape[:2], 128)
    parts = [_halves(d[..., 0]), _halves(dmin[..., 0]), *packed, fifth, nibbles]
    return np.concatenate(parts, axis=2).reshape(len(x), -1)


def encode_q6_k(x: np.ndarray) -> np.ndarray:
    groups = x.reshape(len(x), -1, 16, 16)
    scale = np.abs(groups).max(axis=3) / 31
    d = _rounded(scale.max(axis=2, keepdims=True) / 127)
    scales = np.clip(np.rint(_divided(scale, d)), 0, 127)
    q = np.clip(np.rint(_divided(groups, (d * scales)[..., None])), -32, 31).astype(np.int8) + 32
    q = q.astype(np.uint8).reshape(*q.shape[:2], 2, 4, 32)  # two halves of four rows of 32
    low = ((q[..., :2, :] & 15) | (q[..., 2:, :] & 15) << 4).reshape(*q.shape[:2], 128)
    high = q[..., 0, :] >> 4 | (q[..., 1, :] >> 4) << 2 | (q[..., 2, :] >> 4) << 4 | (q[..., 3, :] >> 4) << 6
    parts = [low, high.reshape(*q.shape[:2], 64), scales.astype(np.int8).view(np.uint8), _halves(d[..., 0])]
    return np.concatenate(parts, axis=2).reshape(len(x), -1)


ENCODERS: dict[str, tuple[int, Callable[[np.ndarray], np.ndarray]]] = {
    "q5_1": (32, encode_q5_1),
    "q5_k": (256, encode_q5_k),
    "q6_k": (256, encode_q6_k),
}
