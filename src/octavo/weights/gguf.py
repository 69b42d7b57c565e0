"""Reads GGUF (versions 2 and 3, little-endian): metadata as Python values, tensors as views into the mapped file.

Layout: "GGUF", u32 version, u64 tensor count, u64 metadata count; metadata (string key, u32 type, value); tensor infos
(string name, u32 dimensions, u64 each, u32 type, u64 offset); padding to `general.alignment`; data. A string is a u64
length and UTF-8 bytes. Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

Every length, count and offset is compared with the bytes that are left before it is used (Python integers do not
overflow), so memory stays within a small multiple of the file's header. All damage gives a ModelFileError.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from octavo import limits
from octavo.errors import ModelFileError, UnsupportedModelError
from octavo.weights.mapped import byte_view, check_no_overlap, map_file
from octavo.weights.tensor import Tensor

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32

# ggml type → (encoding, elements in a block, bytes of a block)
ENCODINGS: dict[int, tuple[str, int, int]] = {
    0: ("f32", 1, 4),
    1: ("f16", 1, 2),
    2: ("q4_0", 32, 18),
    3: ("q4_1", 32, 20),
    6: ("q5_0", 32, 22),
    7: ("q5_1", 32, 24),
    8: ("q8_0", 32, 34),
    12: ("q4_k", 256, 144),
    13: ("q5_k", 256, 176),
    14: ("q6_k", 256, 210),
    30: ("bf16", 1, 2),
}
# Types that exist and are not read.
_OTHER_TYPES: dict[int, str] = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip

_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS: dict[int, tuple[struct.Struct, str]] = {  # value type → (scalar, NumPy type of an array)
    0: (struct.Struct("<B"), "<u1"),
    1: (struct.Struct("<b"), "<i1"),
    2: (struct.Struct("<H"), "<u2"),
    3: (struct.Struct("<h"), "<i2"),
    4: (struct.Struct("<I"), "<u4"),
    5: (struct.Struct("<i"), "<i4"),
    6: (struct.Struct("<f"), "<f4"),
    7: (struct.Struct("<B"), "<u1"),
    10: (struct.Struct("<Q"), "<u8"),
    11: (struct.Struct("<q"), "<i8"),
    12: (struct.Struct("<d"), "<f8"),
}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """`metadata`: str, int, float, bool; arrays of strings as lists, of numbers as NumPy arrays. `tensors`: by the
    file's own names, shapes in row-major order (a matrix is (outputs, inputs))."""

    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]


class _Header:
    """A cursor over the header. `end` is the file's end; the header itself is bounded by limits."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.end = min(self.size, limits.MAX_GGUF_HEADER_BYTES)
        self.at = 0

    def fail(self, problem: str) -> ModelFileError:
        return ModelFileError(self.path, problem)

    def need(self, count: int, what: str) -> None:
        if count > self.end - self.at:
            if self.end < self.size:
                raise self.fail(f"{what} does not end within the first {self.end} bytes, the most a header may take")
            raise self.fail(f"is truncated or damaged: {what} needs {count} bytes at offset {self.at} of {self.size}")

    def number(self, form: struct.Struct, what: str) -> Any:
        self.need(form.size, what)
        (value,) = form.unpack_from(self.data, self.at)
        self.at += form.size
        return value

    def string(self, what: str, longest: int) -> str:
        length: int = self.number(_U64, what)
        if length > longest:
            raise self.fail(f"{what} has {length} bytes, at most {longest} are allowed")
        self.need(length, what)
        raw = self.data[self.at : self.at + length]
        self.at += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not valid UTF-8") from None

    def strings(self, count: int, what: str) -> list[str]:
        data, at, end = self.data, self.at, self.end
        unpack = _U64.unpack_from
        values: list[str] = []
        append = values.append
        last = end - 8
        try:
            for _ in range(count):
                if at > last:
                    break
                start = at + 8
                at = start + unpack(data, at)[0]
                if at > end:
                    break
                append(str(data[start:at], "utf-8"))
        except UnicodeDecodeError:
            raise self.fail(f"element {len(values)} of {what} is not valid UTF-8") from None
        if len(values) != count:
            raise self.fail(f"is truncated or damaged: {what} ends after {len(values)} of {count} strings")
        self.at = at
        return values

    def value(self, key: str) -> Any:
        what = f"metadata {key!r:.200}"
        kind: int = self.number(_U32, what)
        if kind == _STRING:
            return self.string(what, limits.MAX_GGUF_STRING_BYTES)
        if kind == _ARRAY:
            return self.array(what)
        if kind not in _NUMBERS:
            raise self.fail(f"{what} has the unknown type {kind}")
        value = self.number(_NUMBERS[kind][0], what)
        if kind != _BOOL:
            return value
        if value > 1:
            raise self.fail(f"{what} is a boolean with the value {value}")
        return bool(value)

    def array(self, what: str) -> Any:
        kind: int = self.number(_U32, what)
        count: int = self.number(_U64, what)
        if count > limits.MAX_GGUF_ARRAY_ELEMENTS:
            raise self.fail(f"{what} has {count} elements, at most {limits.MAX_GGUF_ARRAY_ELEMENTS} are allowed")
        if kind == _STRING:
            self.need(8 * count, what)
            return self.strings(count, what)
        if kind == _ARRAY:
            raise self.fail(f"{what} is an array of arrays, which is not supported")
        if kind not in _NUMBERS:
            raise self.fail(f"{what} has elements of the unknown type {kind}")
        dtype = np.dtype(_NUMBERS[kind][1])
        self.need(dtype.itemsize * count, what)
        values = np.frombuffer(self.data[self.at : self.at + dtype.itemsize * count], dtype)
        self.at += dtype.itemsize * count
        if kind == _BOOL:
            if count and values.max() > 1:
                raise self.fail(f"{what} holds booleans other than 0 and 1")
            return values.astype(np.bool_)
        return values


def read_gguf(path: str | Path) -> GGUFFile:
    """Raises ModelFileError (damaged) or UnsupportedModelError (a tensor type, or a split file, that is not read)."""
    path = Path(path)
    data = map_file(path, 4)
    header = _Header(path, data)
    if data[:4] != MAGIC:
        raise header.fail("is not a GGUF file (it does not start with GGUF)")
    header.at = 4
    version: int = header.number(_U32, "the version")
    if version not in (2, 3):
        if version & 0xFFFF == 0:
            raise header.fail("is a big-endian GGUF file, only little-endian ones are read")
        raise header.fail(f"has GGUF version {version}, only 2 and 3 are read")
    tensor_count: int = header.number(_U64, "the tensor count")
    entry_count: int = header.number(_U64, "the metadata count")
    if entry_count > limits.MAX_GGUF_METADATA_ENTRIES:
        most = limits.MAX_GGUF_METADATA_ENTRIES
        raise header.fail(f"claims {entry_count} metadata entries, at most {most} are allowed")
    if tensor_count > limits.MAX_GGUF_TENSORS:
        raise header.fail(f"claims {tensor_count} tensors, at most {limits.MAX_GGUF_TENSORS} are allowed")

    metadata: dict[str, Any] = {}
    for index in range(entry_count):
        key = header.string(f"the key of metadata entry {index}", limits.MAX_TENSOR_NAME_BYTES)
        if key in metadata:
            raise header.fail(f"metadata {key!r:.200} occurs twice")
        metadata[key] = header.value(key)
    parts = metadata.get("split.count", 0)
    if isinstance(parts, int) and parts > 1:
        raise UnsupportedModelError(f"{path}: split.count={parts}: a split GGUF; merge its parts into one file first")
    tensors = _read_tensors(header, tensor_count, _alignment(header, metadata))
    return GGUFFile(path, version, metadata, tensors)


def _alignment(header: _Header, metadata: dict[str, Any]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(value) is not int or not 1 <= value <= limits.MAX_GGUF_ALIGNMENT or value & (value - 1):
        raise header.fail(f"general.alignment={value!r:.40} must be a power of two up to {limits.MAX_GGUF_ALIGNMENT}")
    return value


def _read_tensors(header: _Header, count: int, alignment: int) -> dict[str, Tensor]:
    infos: dict[str, tuple[str, tuple[int, ...], int, int]] = {}  # name → encoding, shape, offset, bytes
    for index in range(count):
        name = header.string(f"the name of tensor {index}", limits.MAX_TENSOR_NAME_BYTES)
        if name in infos:
            raise header.fail(f"tensor {name!r:.200} occurs twice")
        infos[name] = _read_info(header, name, alignment)
    start = -(-header.at // alignment) * alignment
    spans: list[tuple[int, int, str]] = []
    for name, (_, _, offset, size) in infos.items():
        if start + offset + size > header.size:
            raise header.fail(
                f"is truncated or damaged: tensor {name!r:.200} lies at bytes {start + offset} to "
                f"{start + offset + size}, the file has {header.size}"
            )
        spans.append((offset, offset + size, name))
    check_no_overlap(header.path, spans)
    data = byte_view(header.data)
    return {
        name: Tensor(name, encoding, shape, data[start + offset : start + offset + size])
        for name, (encoding, shape, offset, size) in infos.items()
    }


def _read_info(header: _Header, name: str, alignment: int) -> tuple[str, tuple[int, ...], int, int]:
    what = f"tensor {name!r:.200}"
    rank: int = header.number(_U32, what)
    if not 1 <= rank <= 4:
        raise header.fail(f"{what} has {rank} dimensions, 1 to 4 are allowed")
    dims: list[int] = [header.number(_U64, what) for _ in range(rank)]
    kind: int = header.number(_U32, what)
    offset: int = header.number(_U64, what)
    if kind not in ENCODINGS:
        if kind in _OTHER_TYPES:
            read = " ".join(encoding.upper() for encoding, _, _ in ENCODINGS.values())
            raise UnsupportedModelError(f"{header.path}: {what} has the type {_OTHER_TYPES[kind]}; types read: {read}")
        raise header.fail(f"{what} has the unknown type {kind}")
    encoding, block, block_bytes = ENCODINGS[kind]
    elements = 1
    for dim in dims:
        if dim < 1:
            raise header.fail(f"{what} has a dimension of 0")
        elements *= dim
    if dims[0] % block:
        raise header.fail(f"{what} has rows of {dims[0]} values, {encoding} needs whole blocks of {block}")
    if offset % alignment:
        raise header.fail(f"{what} has the offset {offset}, which is not a multiple of {alignment}")
    return encoding, tuple(reversed(dims)), offset, elements // block * block_bytes
