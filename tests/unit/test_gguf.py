"""Our GGUF reader: what a valid file says, and one clear error for every way it can be damaged."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo import limits
from octavo.errors import ModelFileError, UnsupportedModelError
from octavo.weights.checkpoint import load_checkpoint
from octavo.weights.gguf import ENCODINGS, read_gguf
from tests.support.gguf_writer import TYPES, encode_value, gguf_bytes, write_gguf
from tests.support.tiny_files import GGUF_METADATA, HEADS, gguf_tensors, hf_weights, tiny_gguf

ONE = [("w", "F32", (2, 3), np.arange(6, dtype="<f4").tobytes())]


def write(tmp_path: Path, raw: bytes) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(raw)
    return path


@pytest.mark.parametrize("version", [2, 3])
def test_every_kind_of_metadata_value_is_read_back(tmp_path: Path, version: int) -> None:
    scalars: dict[str, Any] = {
        "bool": True,
        "u32": 7,
        "u64": 1 << 40,
        "i64": -5,
        "f32": 0.5,
        "text": "héllo ▁",
        "f64": np.float64(1.25),
        "u8": np.uint8(255),
        "i8": np.int8(-3),
        "u16": np.uint16(65535),
        "i16": np.int16(-300),
        "i32": np.int32(-70000),
    }
    arrays = {"strings": ["", "a", "日本"], "numbers": np.array([1, -2], np.int32), "flags": np.array([True, False])}
    path = tmp_path / "m.gguf"
    write_gguf(path, {**scalars, **arrays, "none": []}, ONE, version=version)
    file = read_gguf(path)
    assert file.version == version
    for key, value in scalars.items():
        assert file.metadata[key] == value, key
        assert type(file.metadata[key]) in (bool, int, float, str)
    assert file.metadata["strings"] == arrays["strings"]
    assert file.metadata["none"] == []
    np.testing.assert_array_equal(file.metadata["numbers"], arrays["numbers"])
    assert file.metadata["flags"].dtype == np.bool_


def test_tensor_shape_is_outputs_by_inputs_and_its_bytes_are_read_only_views(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", {}, [*ONE, ("v", "F32", (3,), b"x" * 12)])
    tensors = read_gguf(tmp_path / "m.gguf").tensors
    assert tensors["w"].shape == (2, 3)
    assert tensors["w"].encoding == "f32"
    np.testing.assert_array_equal(tensors["w"].data.view("<f4"), np.arange(6))
    assert bytes(tensors["v"].data) == b"x" * 12
    assert not tensors["w"].data.flags.writeable
    assert tensors["w"].data.base is not None


@pytest.mark.parametrize("name", [kind for kind, code in TYPES.items() if code in ENCODINGS])
def test_size_of_every_encoding_is_exact(tmp_path: Path, name: str) -> None:
    encoding, block, size = ENCODINGS[TYPES[name]]
    raw = bytes(3 * 2 * size)
    write_gguf(tmp_path / "m.gguf", {}, [("w", name, (3, 2 * block), raw)])
    tensor = read_gguf(tmp_path / "m.gguf").tensors["w"]
    assert (tensor.encoding, tensor.shape, tensor.data.size) == (encoding, (3, 2 * block), len(raw))
    path = write(tmp_path, gguf_bytes({}, [("w", name, (3, 2 * block), raw)])[:-1])
    with pytest.raises(ModelFileError, match="truncated"):
        read_gguf(path)


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "IQ4_NL"])
def test_a_type_that_is_not_read_is_refused_with_tensor_and_type(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, gguf_bytes({}, [("blk.0.w", name, (1, 256), bytes(256))]))
    with pytest.raises(UnsupportedModelError, match=rf"'blk\.0\.w' has the type {name}"):
        read_gguf(path)


def test_alignment_of_the_file_is_used(tmp_path: Path) -> None:
    path = write(tmp_path, gguf_bytes({"general.alignment": 256}, [*ONE, ("v", "F32", (1,), b"abcd")]))
    assert bytes(read_gguf(path).tensors["v"].data) == b"abcd"
    for bad in (0, 3, limits.MAX_GGUF_ALIGNMENT * 2, "32", True):
        path = write(tmp_path, header(entries=1) + entry("general.alignment", encode_value(bad)))
        with pytest.raises(ModelFileError, match=r"general\.alignment"):
            read_gguf(path)


def header(tensors: int = 0, entries: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, entries)


def entry(key: str, body: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key.encode() + body


def info(name: str, dims: list[int], kind: int, offset: int) -> bytes:
    return entry(name, struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset))


BIG = 1 << 62
DAMAGED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "truncated"),
    "other magic": (b"GGML" + bytes(64), "not a GGUF file"),
    "version 1": (header(version=1), "version 1"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "no counts": (header()[:12], "truncated"),
    "too many tensors": (header(tensors=BIG), "tensors"),
    "too many entries": (header(entries=BIG), "metadata entries"),
    "entries that are not there": (header(entries=2), "truncated"),
    "key longer than the file": (header(entries=1) + struct.pack("<Q", 900), "truncated"),
    "endless key": (header(entries=1) + struct.pack("<Q", (1 << 64) - 1), "at most"),
    "key not UTF-8": (header(entries=1) + struct.pack("<Q", 1) + b"\xff", "UTF-8"),
    "unknown value type": (header(entries=1) + entry("k", struct.pack("<I", 13)), "unknown type 13"),
    "boolean 2": (header(entries=1) + entry("k", struct.pack("<IB", 7, 2)), "boolean"),
    "endless string": (header(entries=1) + entry("k", struct.pack("<IQ", 8, BIG)), "at most"),
    "string past the end": (header(entries=1) + entry("k", struct.pack("<IQ", 8, 100)), "truncated"),
    "string not UTF-8": (header(entries=1) + entry("k", struct.pack("<IQ", 8, 2) + b"\xc3\x28"), "UTF-8"),
    "endless array": (header(entries=1) + entry("k", struct.pack("<IIQ", 9, 4, BIG)), "at most"),
    "array past the end": (header(entries=1) + entry("k", struct.pack("<IIQ", 9, 4, 1000)), "truncated"),
    "array of arrays": (header(entries=1) + entry("k", struct.pack("<IIQ", 9, 9, 1)), "array of arrays"),
    "array of unknown": (header(entries=1) + entry("k", struct.pack("<IIQ", 9, 99, 1)), "unknown type 99"),
    "strings past the end": (header(entries=1) + entry("k", struct.pack("<IIQQQ", 9, 8, 2, 0, BIG)), "after 1 of 2"),
    "strings not UTF-8": (
        header(entries=1) + entry("k", struct.pack("<IIQQ", 9, 8, 1, 1) + b"\xff"),
        "element 0 .* UTF-8",
    ),
    "same key twice": (header(entries=2) + 2 * entry("k", struct.pack("<II", 4, 1)), "'k' occurs twice"),
    "same tensor twice": (header(tensors=2) + 2 * info("w", [1], 0, 0) + bytes(64), "'w' occurs twice"),
    "no dimensions": (header(tensors=1) + info("w", [], 0, 0), "0 dimensions"),
    "five dimensions": (header(tensors=1) + info("w", [1] * 5, 0, 0), "5 dimensions"),
    "a dimension of 0": (header(tensors=1) + info("w", [4, 0], 0, 0), "dimension of 0"),
    "overflowing shape": (header(tensors=1) + info("w", [1 << 32, 1 << 32], 0, 0), "truncated"),
    "huge shape": (header(tensors=1) + info("w", [BIG, BIG, BIG, BIG], 0, 0), "truncated"),
    "part of a block": (header(tensors=1) + info("w", [33], 8, 0) + bytes(99), "whole blocks of 32"),
    "unknown tensor type": (header(tensors=1) + info("w", [1], 77, 0), "unknown type 77"),
    "removed tensor type": (header(tensors=1) + info("w", [1], 4, 0), "unknown type 4"),
    "unaligned offset": (header(tensors=1) + info("w", [1], 0, 1) + bytes(99), "multiple of 32"),
    "offset past the end": (header(tensors=1) + info("w", [1], 0, 1 << 20) + bytes(99), "truncated"),
    "wrapping offset": (header(tensors=1) + info("w", [1], 0, (1 << 64) - 32) + bytes(99), "truncated"),
    "overlap": (
        header(tensors=2) + info("a", [16], 0, 0) + info("b", [1], 0, 32) + bytes(200),
        "'a' and 'b' overlap",
    ),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_damage_gives_one_clear_error_with_the_path(tmp_path: Path, what: str) -> None:
    raw, words = DAMAGED[what]
    path = write(tmp_path, raw)
    with pytest.raises(ModelFileError, match=words) as caught:
        read_gguf(path)
    assert str(caught.value).startswith(str(path))
    assert len(str(caught.value)) < 400 + len(str(path))


def test_every_truncation_of_a_model_gives_a_model_file_error(tmp_path: Path) -> None:
    raw = tiny_gguf()
    data_start = len(raw) - sum(len(item[3]) for item in gguf_tensors(hf_weights()))
    for length in [*range(0, data_start + 64, 7), len(raw) - 1]:
        with pytest.raises(ModelFileError):
            load_checkpoint(write(tmp_path, raw[:length]))


def test_a_header_beyond_the_bound_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_GGUF_HEADER_BYTES", 100)
    path = write(tmp_path, gguf_bytes({f"key{i}": i for i in range(20)}, []))
    with pytest.raises(ModelFileError, match="first 100 bytes"):
        read_gguf(path)


def test_what_is_not_a_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    for path in (tmp_path / "pipe.gguf", tmp_path, tmp_path / "absent.gguf", Path("/dev/null")):
        with pytest.raises(ModelFileError):
            read_gguf(path)


def test_a_split_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"split\.count=3"):
        read_gguf(write(tmp_path, gguf_bytes({"split.count": 3}, [])))


def test_llama_rows_come_back_in_hugging_face_order(tmp_path: Path) -> None:
    weights = hf_weights()
    checkpoint = load_checkpoint(write(tmp_path, tiny_gguf()))
    assert checkpoint.tensors.keys() == weights.keys()
    for name, expected in weights.items():
        tensor = checkpoint.tensors[name]
        rows = tensor.data.view("<f4").reshape(tensor.shape)
        permuted = name.split(".")[-2] in ("q_proj", "k_proj")
        assert (tensor.row_order is not None) == permuted
        np.testing.assert_array_equal(rows if tensor.row_order is None else rows[tensor.row_order], expected)


def test_qwen_rows_are_as_the_file_has_them(tmp_path: Path) -> None:
    metadata = {k.replace("llama.", "qwen2."): v for k, v in GGUF_METADATA.items()}
    metadata["general.architecture"] = "qwen2"
    tensors = gguf_tensors(hf_weights())
    for layer in (0, 1):
        for name, width in (("q", 32), ("k", 16), ("v", 16)):
            tensors.append((f"blk.{layer}.attn_{name}.bias", "F32", (width,), np.ones(width, "<f4").tobytes()))
    checkpoint = load_checkpoint(write(tmp_path, gguf_bytes(metadata, tensors)))
    assert checkpoint.config.attention_bias
    assert all(tensor.row_order is None for tensor in checkpoint.tensors.values())


def test_llama_biases_of_q_and_k_are_reordered_with_their_rows(tmp_path: Path) -> None:
    tensors = gguf_tensors(hf_weights())
    for layer in (0, 1):
        for name, width in (("q", 32), ("k", 16), ("v", 16), ("output", 32)):
            tensors.append((f"blk.{layer}.attn_{name}.bias", "F32", (width,), np.ones(width, "<f4").tobytes()))
    checkpoint = load_checkpoint(write(tmp_path, gguf_bytes(GGUF_METADATA, tensors)))
    bias = checkpoint.tensors["model.layers.1.self_attn.q_proj.bias"]
    assert bias.row_order is not None
    assert sorted(bias.row_order.tolist()) == list(range(32))
    assert bias.row_order[: 32 // HEADS].tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert checkpoint.tensors["model.layers.1.self_attn.v_proj.bias"].row_order is None


def test_without_an_output_matrix_the_embedding_is_tied(tmp_path: Path) -> None:
    tensors = [item for item in gguf_tensors(hf_weights()) if item[0] != "output.weight"]
    checkpoint = load_checkpoint(write(tmp_path, gguf_bytes(GGUF_METADATA, tensors)))
    assert checkpoint.config.tie_embeddings
    assert "lm_head.weight" not in checkpoint.tensors


def test_what_the_file_says_beside_its_weights(tmp_path: Path) -> None:
    extra = {"tokenizer.ggml.eot_token_id": 9, "tokenizer.ggml.eom_token_id": 4000, "general.sampling.top_k": 20}
    checkpoint = load_checkpoint(write(tmp_path, tiny_gguf(extra)))
    assert checkpoint.eos_token_ids == {2, 9}  # 4000 lies outside the vocabulary and never occurs
    assert checkpoint.bos_token_id == 1
    assert checkpoint.chat_template == "{{ messages }}"
    assert checkpoint.generation_defaults == {"top_k": 20}
    assert checkpoint.tokenizer.kind == "gguf"
    assert checkpoint.tokenizer.config["tokenizer.ggml.tokens"][3] == "t3é"
    assert "llama.block_count" not in checkpoint.tokenizer.config


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokens", "abc"),
        ("merges", np.zeros(3, np.int32)),
        ("token_type", True),
        ("scores", ["x"]),
        ("eos_token_id", "2"),
        ("unknown_token_id", 0.5),
        ("add_bos_token", 1),
        ("pre", 3),
    ],
)
def test_a_tokenizer_entry_of_the_wrong_kind_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(ModelFileError, match=rf"tokenizer\.ggml\.{key}=.* is not allowed"):
        load_checkpoint(write(tmp_path, tiny_gguf({f"tokenizer.ggml.{key}": value})))


def test_more_tokens_than_embedding_rows_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, tiny_gguf({"tokenizer.ggml.tokens": ["x"] * 41}))
    with pytest.raises(ModelFileError, match=r"41 tokens .* 40 rows"):
        load_checkpoint(path)
