"""Damage to files: bytes at random, integers at their extremes, JSON values of the wrong kind."""

from __future__ import annotations

import json
import random
import struct
from typing import Any

import numpy as np

_EXTREMES = [0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 40,
             (1 << 62), (1 << 63) - 1, 1 << 63, (1 << 64) - 32, (1 << 64) - 1]  # fmt: skip
_VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 1 << 31, 1 << 63, 1 << 64, 0.0, -0.5, 0.5, 1e308, 1e-320, "", "x", "\ud800",
    "llama3", "yarn", "../x.safetensors", "F16", [], {}, [0], [-1, 4], [1 << 62, 1 << 62], [[]], {"a": 1}, ["x"] * 50,
]  # fmt: skip
_METADATA: list[Any] = [
    0, 1, 2, 3, 7, 1 << 31, 1 << 63, -1, True, False, 0.0, -0.5, 1e-5, float("nan"), float("inf"), "", "x", "linear",
    "yarn", "llama", "gpt2", "smollm", "qwen2", "none", [], ["x"], ["a b"], ["a"] * 60, np.zeros(40, np.int32),
    np.full(40, 6, np.int32), np.full(3, np.nan, np.float32), np.array([], np.float64), np.array([True]),
    np.float64(1e300), np.int8(-1),
]  # fmt: skip
_RAW = [b"NaN", b"1e999", b"9" * 6000, b"[" * 5000, b'"\\ud800"', b"{", b"\xff\xfe", b"-0", b'{"a":1,"a":2}', b"null"]


def damage_bytes(rng: random.Random, raw: bytes, most: int) -> bytes:
    """One to four cuts, flips, insertions or extreme integers, within the first `most` bytes where that is possible."""
    data = bytearray(raw)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        end = min(len(data), most)
        at = rng.randrange(end + 1)
        kind = rng.randrange(7)
        if kind == 0:
            del data[rng.randrange(len(data) + 1) :]
        elif kind == 1 and end:
            data[at % end] ^= 1 << rng.randrange(8)
        elif kind == 2:
            data[at:at] = rng.randbytes(rng.choice((1, 4, 8, 100)))
        elif kind == 3:
            del data[at : at + rng.choice((1, 4, 8, 100))]
        elif kind == 4:
            length = rng.choice((1, 4, 8, 40))
            data[at : at + length] = rng.randbytes(length)
        elif kind == 5:
            start = rng.randrange(end + 1)
            data[at:at] = data[start : start + rng.choice((8, 32, 200))]
        else:
            size, code = rng.choice(((1, "<B"), (2, "<H"), (4, "<I"), (8, "<Q")))
            value = rng.choice([*_EXTREMES, len(data), len(data) - at, len(data) // 4]) % (1 << (8 * size))
            data[at : at + size] = struct.pack(code, value)
    return bytes(data)


def damage_metadata(rng: random.Random, metadata: dict[str, Any]) -> dict[str, Any]:
    """Well-formed GGUF metadata that says something else: values of other kinds and sizes, keys missing or renamed."""
    result = dict(metadata)
    for _ in range(rng.choice((1, 1, 2, 4))):
        key = rng.choice(sorted(result))
        value = result.pop(key)
        kind = rng.random()
        if isinstance(value, (list, np.ndarray)) and kind < 0.6:
            items = list(value)
            at = rng.randrange(len(items)) if items else 0
            items[at : at + 1] = rng.choice(([], items[:1] * 2, items[-1:], items[:1]))
            result[key] = items if isinstance(value, list) else np.array(items, value.dtype)
        elif type(value) is int and kind < 0.3:
            result[key] = max(0, value + rng.choice((-1, 1, 8, -value, 1 << 20, 1 << 31)))
        elif kind < 0.85:
            result[key] = rng.choice(_METADATA)
        elif kind < 0.9:
            result[rng.choice((key + "x", key[:-1], "tokenizer.ggml.pre", "llama.expert_count"))] = value
        if not result:
            return {key: value}
    return result


def damage_json(rng: random.Random, raw: bytes) -> bytes:
    """Mostly still JSON: values replaced, keys dropped, doubled or moved. Sometimes bytes are damaged instead."""
    if rng.random() < 0.2:
        return damage_bytes(rng, raw, len(raw))
    value = json.loads(raw)
    for _ in range(rng.choice((1, 1, 2, 4))):
        value = _damage_value(rng, value)
    out = json.dumps(value).encode()
    if rng.random() < 0.15:
        at = rng.randrange(len(out) + 1)
        out = out[:at] + rng.choice(_RAW) + out[at:]
    return out


def _damage_value(rng: random.Random, value: Any) -> Any:
    if rng.random() < 0.02:
        return rng.choice(_VALUES)
    if isinstance(value, dict) and value:
        key = rng.choice(list(value))
        kind = rng.random()
        if kind < 0.35:
            return {**value, key: _damage_value(rng, value[key])}
        if kind < 0.65:
            return {**value, key: rng.choice(_VALUES)}
        if kind < 0.8:
            return {name: item for name, item in value.items() if name != key}
        return {**value, rng.choice((key + "x", key[:-1], "")): value[key]}
    if isinstance(value, list) and value:
        at = rng.randrange(len(value))
        replaced = rng.choice(([], [rng.choice(_VALUES)], [_damage_value(rng, value[at])], value[:3]))
        return value[:at] + replaced + value[at + 1 :]
    if type(value) is int and rng.random() < 0.5:
        return value + rng.choice((-1, 1, 8, -value, 1 << 20))
    return rng.choice(_VALUES)
