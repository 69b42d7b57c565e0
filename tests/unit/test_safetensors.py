"""Our safetensors reader: the same bytes as the reference package, and one clear error for damage."""

from __future__ import annotations

import json
import logging
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo import limits
from octavo.errors import InvalidParameterError, ModelFileError, ModelNotFoundError, UnsupportedModelError
from octavo.weights.checkpoint import load_checkpoint
from octavo.weights.precision import kernel_format, kernel_formats
from octavo.weights.safetensors import read_safetensors
from tests.support.safetensors_writer import safetensors_bytes, write_safetensors
from tests.support.tiny_files import HF_CONFIG, hf_weights, write_tiny_hf


def raw_file(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(shape: Any, begin: Any, end: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_reads_what_the_reference_package_wrote(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    arrays = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.array([1.5, -2], np.float16),
        "c": np.array(3, np.float32),
        "unread": np.arange(3, dtype=np.int64),
    }
    save_file(arrays, tmp_path / "m.safetensors", metadata={"format": "np"})
    tensors = read_safetensors(tmp_path / "m.safetensors")
    assert {name: item.encoding for name, item in tensors.items()} == {
        "a": "f32", "b": "f16", "c": "f32", "unread": "i64",
    }  # fmt: skip
    for name, array in arrays.items():
        assert tensors[name].shape == array.shape
        assert bytes(tensors[name].data) == array.tobytes()
        assert not tensors[name].data.flags.writeable


def test_the_reference_package_reads_what_the_test_writer_wrote(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    write_safetensors(tmp_path / "m.safetensors", hf_weights())
    for name, array in load_file(tmp_path / "m.safetensors").items():
        np.testing.assert_array_equal(array, hf_weights()[name])


DAMAGED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "truncated"),
    "seven bytes": (b"1234567", "truncated"),
    "huge header": (struct.pack("<Q", 1 << 60) + b"{}", "at most"),
    "header past the end": (struct.pack("<Q", 100) + b"{}", "truncated"),
    "no JSON": (raw_file(b"{'a': 1}"), "not valid JSON"),
    "not UTF-8": (raw_file(b'{"\xff": 1}'), "UTF-8"),
    "a list": (raw_file([]), "not a JSON object"),
    "deep nesting": (raw_file(b'{"a":' + b"[" * 100_000), "nested too deeply"),
    "NaN": (raw_file(b'{"a": NaN}'), "NaN"),
    "endless integer": (raw_file(b'{"a": ' + b"9" * 5000 + b"}"), "5000 digits"),
    "infinite float": (raw_file(b'{"a": 1e999}'), "not finite"),
    "half a surrogate pair": (raw_file(b'{"a": ["\\ud800"]}'), "not valid Unicode"),
    "same name twice": (raw_file(b'{"a": 1, "a": 2}'), "'a' twice"),
    "no object": (raw_file({"a": 1}), "not described"),
    "unknown dtype": (raw_file({"a": tensor([1], 0, 4, "F99")}, bytes(4)), "unknown dtype 'F99'"),
    "dtype is a list": (raw_file({"a": tensor([1], 0, 4, [])}, bytes(4)), "unknown dtype"),
    "negative dimension": (raw_file({"a": tensor([-1, -1], 0, 4)}, bytes(4)), "damaged shape"),
    "float dimension": (raw_file({"a": tensor([1.0], 0, 4)}, bytes(4)), "damaged shape"),
    "boolean dimension": (raw_file({"a": tensor([True], 0, 4)}, bytes(4)), "damaged shape"),
    "too many dimensions": (raw_file({"a": tensor([1] * 99, 0, 4)}, bytes(4)), "damaged shape"),
    "no offsets": (raw_file({"a": {"dtype": "F32", "shape": [1]}}, bytes(4)), "data_offsets"),
    "three offsets": (raw_file({"a": {**tensor([1], 0, 4), "data_offsets": [0, 4, 8]}}, bytes(8)), "data_offsets"),
    "negative offset": (raw_file({"a": tensor([1], -4, 0)}, bytes(4)), "data_offsets"),
    "end before begin": (raw_file({"a": tensor([1], 4, 0)}, bytes(8)), "truncated or damaged"),
    "past the end": (raw_file({"a": tensor([2], 0, 8)}, bytes(7)), "truncated or damaged"),
    "wrong size": (raw_file({"a": tensor([3], 0, 8)}, bytes(8)), "cannot have 8 bytes"),
    "overflowing shape": (raw_file({"a": tensor([1 << 62, 1 << 62], 0, 8)}, bytes(8)), "cannot have 8 bytes"),
    "overlap": (raw_file({"a": tensor([2], 0, 8), "b": tensor([2], 4, 12)}, bytes(12)), "'a' and 'b' overlap"),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_damage_gives_one_clear_error_with_the_path(tmp_path: Path, what: str) -> None:
    raw, words = DAMAGED[what]
    path = tmp_path / "m.safetensors"
    path.write_bytes(raw)
    with pytest.raises(ModelFileError, match=words) as caught:
        read_safetensors(path)
    assert str(caught.value).startswith(str(path))


def shard(folder: Path) -> dict[str, str]:
    """Splits the tiny model in two files and writes the index; returns its weight_map."""
    write_tiny_hf(folder)
    (folder / "model.safetensors").unlink()
    weights = hf_weights()
    names = sorted(weights)
    weight_map = {}
    for part, chosen in (("one", names[::2]), ("two", names[1::2])):
        write_safetensors(folder / f"model-{part}.safetensors", {name: weights[name] for name in chosen})
        weight_map |= dict.fromkeys(chosen, f"model-{part}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def test_shards_hold_the_same_model_as_one_file(tmp_path: Path) -> None:
    shard(tmp_path / "shards")
    one, many = load_checkpoint(write_tiny_hf(tmp_path / "one")), load_checkpoint(tmp_path / "shards")
    assert one.digest == many.digest
    for name, array in hf_weights().items():
        assert bytes(many.tensors[name].data) == array.tobytes()
        assert many.tensors[name].row_order is None


def test_digest_tells_models_apart(tmp_path: Path) -> None:
    weights = hf_weights()
    base = load_checkpoint(write_tiny_hf(tmp_path / "a")).digest
    assert load_checkpoint(write_tiny_hf(tmp_path / "b", {"rope_theta": 10001.0})).digest != base
    weights["model.norm.weight"][3] += 1
    assert load_checkpoint(write_tiny_hf(tmp_path / "c", weights=weights)).digest != base


@pytest.mark.parametrize(
    "name",
    ["../model.safetensors", "/etc/model.safetensors", "a/b.safetensors", "..\\b.safetensors", "m.bin", "",
     ".safetensors", "é.safetensors", "x" * 5000 + ".safetensors", 7, None, "a\0.safetensors"],
)  # fmt: skip
def test_an_index_cannot_name_files_outside_its_folder(tmp_path: Path, name: object) -> None:
    weight_map: dict[str, Any] = shard(tmp_path)
    weight_map["model.norm.weight"] = name
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelFileError, match="plain file name"):
        load_checkpoint(tmp_path)


def test_an_index_must_agree_with_its_shards(tmp_path: Path) -> None:
    weight_map = shard(tmp_path)
    index = tmp_path / "model.safetensors.index.json"

    def expect(content: object, words: str) -> None:
        index.write_text(json.dumps(content))
        with pytest.raises(ModelFileError, match=words):
            load_checkpoint(tmp_path)

    expect({}, "no weight_map")
    expect({"weight_map": {}}, "no weight_map")
    expect({"weight_map": {**weight_map, "lm_head.weight": "model-three.safetensors"}}, "not in the folder")
    other = {"model-one.safetensors": "model-two.safetensors", "model-two.safetensors": "model-one.safetensors"}
    expect({"weight_map": {**weight_map, "lm_head.weight": other[weight_map["lm_head.weight"]]}}, "lacks tensor")
    one = hf_weights()
    write_safetensors(tmp_path / "model-two.safetensors", one)
    expect({"weight_map": weight_map}, "another shard holds too")


def test_a_missing_misshapen_or_unread_tensor_is_named(tmp_path: Path) -> None:
    def load(change: Any, config: dict[str, Any] | None = None) -> None:
        weights: dict[str, Any] = dict(hf_weights())
        change(weights)
        load_checkpoint(write_tiny_hf(tmp_path / "m", config, weights))

    with pytest.raises(ModelFileError, match=r"lacks tensor 'model\.norm\.weight' of shape \(32,\)"):
        load(lambda w: w.pop("model.norm.weight"))
    q = "model.layers.1.self_attn.q_proj.weight"
    with pytest.raises(ModelFileError, match=r"q_proj\.weight' has shape \(32, 16\), \(32, 32\) is expected"):
        load(lambda w: w.update({q: w[q][:, :16].copy()}))
    for extra in ("model.layers.0.self_attn.q_proj.bias", "model.layers.0.self_attn.q_norm.weight", "model.extra"):
        with pytest.raises(UnsupportedModelError, match=f"'{extra}' of shape .* ignoring it would change the result"):
            load(lambda w, extra=extra: w.update({extra: np.ones(32, np.float32)}))
    with pytest.raises(ModelFileError, match="too few for 900 layers"):
        load(lambda w: None, {"num_hidden_layers": 900})
    with pytest.raises(UnsupportedModelError, match=r"norm\.weight' is i64; supported here"):
        load(lambda w: w.update({"model.norm.weight": ("I64", (32,), bytes(256))}))


def test_tables_of_rotary_frequencies_are_ignored(tmp_path: Path) -> None:
    weights: dict[str, Any] = dict(hf_weights())
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    weights["model.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    assert load_checkpoint(write_tiny_hf(tmp_path, weights=weights)).tensors.keys() == hf_weights().keys()


def test_a_tied_head_may_be_in_the_file_only_if_it_equals_the_embedding(tmp_path: Path) -> None:
    weights = hf_weights()
    with pytest.raises(UnsupportedModelError, match=r"lm_head\.weight differs"):
        load_checkpoint(write_tiny_hf(tmp_path, {"tie_word_embeddings": True}, weights))
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    checkpoint = load_checkpoint(write_tiny_hf(tmp_path, {"tie_word_embeddings": True}, weights))
    assert "lm_head.weight" not in checkpoint.tensors
    weights.pop("lm_head.weight")
    with pytest.raises(ModelFileError, match=r"lacks tensor 'lm_head\.weight'"):
        load_checkpoint(write_tiny_hf(tmp_path, {}, weights))


def test_a_folder_without_weights_says_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        load_checkpoint(tmp_path / "absent")
    with pytest.raises(ModelFileError, match=r"neither a config\.json nor a \.gguf"):
        load_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG))
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelFileError, match=r"no weights.*pickled files can run code"):
        load_checkpoint(tmp_path)


def test_the_small_files_of_a_folder_reach_the_checkpoint(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b'{"model": {}}')
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named, "eos_token": "</s>"}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<x>", "bos_token": "<s>"}))
    generation = {"eos_token_id": [3, 5], "temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_length": 99}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    checkpoint = load_checkpoint(tmp_path)
    assert checkpoint.tokenizer.kind == "hf"
    assert checkpoint.tokenizer.tokenizer_json == b'{"model": {}}'
    assert checkpoint.tokenizer.config["eos_token"] == "</s>"
    assert checkpoint.tokenizer.config["bos_token"] == "<s>"
    assert checkpoint.chat_template == "D"
    assert checkpoint.eos_token_ids == {2, 3, 5}
    assert checkpoint.bos_token_id == 1
    assert checkpoint.generation_defaults == {"temperature": 0.6, "top_p": 0.9, "top_k": 20}
    (tmp_path / "chat_template.jinja").write_text("J")
    assert load_checkpoint(tmp_path).chat_template == "J"


def test_a_chat_template_or_default_of_the_wrong_kind_is_refused(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": {"a": 1}}))
    with pytest.raises(ModelFileError, match="chat_template"):
        load_checkpoint(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": "x" * (limits.MAX_TEMPLATE_CHARS + 1)})
    )
    with pytest.raises(ModelFileError, match="at most"):
        load_checkpoint(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "generation_config.json").write_text('{"temperature": "hot"}')
    with pytest.raises(ModelFileError, match="temperature='hot'"):
        load_checkpoint(tmp_path)


FORMATS = {
    "auto": "f32 q8 q8 q8 q4 q4 q8 q8 q4 q8 q8",
    "f32": "f32 f16 bf16 f32 f32 f32 f32 f32 f32 f32 f32",
    "q8": "q8 q8 q8 q8 q4 q4 q8 q8 q4 q8 q8",
    "q4": "q4 q4 q4 q8 q4 q4 q8 q8 q4 q8 q8",
}


@pytest.mark.parametrize("choice", FORMATS)
def test_kernel_format_of_every_encoding_and_choice(choice: str) -> None:
    encodings = ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k"]
    assert [kernel_format(encoding, choice) for encoding in encodings] == FORMATS[choice].split()
    with pytest.raises(InvalidParameterError, match="weights='q2'"):
        kernel_format("f32", "q2")


def test_auto_says_in_the_log_that_it_rounds_bf16(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    halves = {name: ("BF16", array.shape, bytes(2 * array.size)) for name, array in hf_weights().items()}
    tensors = load_checkpoint(write_tiny_hf(tmp_path, weights=halves)).tensors
    with caplog.at_level(logging.INFO, "octavo.weights"):
        formats = kernel_formats(tensors, "auto")
    assert formats["lm_head.weight"] == "q8"
    assert formats["model.norm.weight"] == "f32"
    assert "bf16 weights are packed as q8" in caplog.text
    caplog.clear()
    kernel_formats(tensors, "f32")
    assert caplog.text == ""


def test_writer_pads_its_header(tmp_path: Path) -> None:
    (length,) = struct.unpack_from("<Q", safetensors_bytes({"a": np.zeros(1, np.float32)}))
    assert length % 8 == 0
