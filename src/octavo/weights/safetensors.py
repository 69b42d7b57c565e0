"""Reads safetensors: one file, or shards named by model.safetensors.index.json; tensors are views into mapped files.

Layout: u64 header length, a JSON object {name: {dtype, shape, data_offsets: [begin, end]}}, data.
Source: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

from octavo import limits
from octavo.errors import ModelFileError
from octavo.weights.mapped import byte_view, check_no_overlap, map_file
from octavo.weights.strict_json import parse_object, read_object
from octavo.weights.tensor import Tensor

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=@ -]{0,200}\.safetensors")

# dtype → bits of one value. Only F32, F16 and BF16 are weights Octavo reads; the others may lie in a file unused.
_BITS = {
    "F32": 32, "F16": 16, "BF16": 16, "F64": 64, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32,
    "U16": 16, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "C64": 64,
}  # fmt: skip


def read_safetensors(path: str | Path) -> dict[str, Tensor]:
    """Every tensor of one file; `encoding` is the dtype in lower case. Raises ModelFileError."""
    path = Path(path)
    mapped = map_file(path, 8)
    size = len(mapped)
    (header_bytes,) = struct.unpack_from("<Q", mapped, 0)
    if header_bytes > limits.MAX_SAFETENSORS_HEADER_BYTES:
        most = limits.MAX_SAFETENSORS_HEADER_BYTES
        raise ModelFileError(path, f"claims a header of {header_bytes} bytes, at most {most} are allowed")
    if header_bytes > size - 8:
        raise ModelFileError(path, f"is truncated: its header needs {header_bytes} bytes, {size - 8} are left")
    header = parse_object(path, mapped[8 : 8 + header_bytes], "the header")
    header.pop("__metadata__", None)

    data = byte_view(mapped)[8 + header_bytes :]
    tensors: dict[str, Tensor] = {}
    spans: list[tuple[int, int, str]] = []
    for name, info in header.items():
        if len(name) > limits.MAX_TENSOR_NAME_BYTES:
            raise ModelFileError(path, f"the tensor name {name[:40]!r}... has {len(name)} characters")
        dtype, shape, begin, end = _check_info(path, name, info, len(data))
        spans.append((begin, end, name))
        tensors[name] = Tensor(name, dtype.lower(), shape, data[begin:end])
    check_no_overlap(path, spans)
    return tensors


def _check_info(path: Path, name: str, info: Any, available: int) -> tuple[str, tuple[int, ...], int, int]:
    what = f"tensor {name!r:.200}"
    if not isinstance(info, dict):
        raise ModelFileError(path, f"{what} is not described by a JSON object")
    dtype, shape, offsets = info.get("dtype"), info.get("shape"), info.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise ModelFileError(path, f"{what} has the unknown dtype {dtype!r:.40}")
    if not isinstance(shape, list) or len(shape) > 8 or not all(_is_size(dim) for dim in shape):
        raise ModelFileError(path, f"{what} has a damaged shape")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(offset) for offset in offsets):
        raise ModelFileError(path, f"{what} has damaged data_offsets")
    begin, end = offsets
    if not begin <= end <= available:
        raise ModelFileError(
            path, f"is truncated or damaged: {what} lies at data bytes {begin} to {end}, there are {available}"
        )
    bits = _BITS[dtype]
    for dim in shape:
        bits *= dim
    if bits != 8 * (end - begin):
        raise ModelFileError(path, f"{what} of shape {tuple(shape)} and dtype {dtype} cannot have {end - begin} bytes")
    return dtype, tuple(shape), begin, end


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def shard_names(index_path: Path, index: dict[str, Any]) -> dict[str, str]:
    """The index's weight_map, tensor name → file name; file names are plain and in the index's own folder."""
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(index_path, "has no weight_map")
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or not _PLAIN_NAME.fullmatch(file):
            raise ModelFileError(index_path, f"maps {tensor!r:.80} to {file!r:.80}, which is not a plain file name")
    if len(set(weight_map.values())) > limits.MAX_SAFETENSORS_FILES:
        raise ModelFileError(index_path, f"names more than {limits.MAX_SAFETENSORS_FILES} files")
    return weight_map


def read_safetensors_folder(folder: Path) -> dict[str, Tensor]:
    """All tensors of a Hugging Face folder: its index's shards, else model.safetensors, else its only *.safetensors."""
    index_path = folder / INDEX_NAME
    if not index_path.exists():
        return read_safetensors(_single_file(folder))
    weight_map = shard_names(index_path, read_object(index_path))
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(weight_map.values())):
        if not (folder / file).exists():
            raise ModelFileError(index_path, f"names {file}, which is not in the folder")
        shard = read_safetensors(folder / file)
        twice = tensors.keys() & shard.keys()
        if twice:
            raise ModelFileError(folder / file, f"holds tensor {min(twice)!r:.200}, which another shard holds too")
        for name, mapped_to in weight_map.items():
            if mapped_to == file and name not in shard:
                raise ModelFileError(folder / file, f"lacks tensor {name!r:.200}, which the index expects in it")
        tensors.update(shard)
    return tensors


def _single_file(folder: Path) -> Path:
    single = folder / SINGLE_NAME
    if single.exists():
        return single
    files = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated"))
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(path.name for path in files[:8])
        raise ModelFileError(folder, f"has several safetensors files and no {INDEX_NAME}: {names}")
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pth", ".pt"))
    hint = f" ({pickles[0]} is not read: pickled files can run code)" if pickles else ""
    raise ModelFileError(folder, f"has no weights: {SINGLE_NAME}, {INDEX_NAME} or a .gguf file is expected{hint}")
