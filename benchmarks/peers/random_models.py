"""Models of other shapes with random weights, so that nothing is tuned to one: the arithmetic costs the same.

    python -m benchmarks.peers.random_models qwen2.5-0.5b qwen2.5-1.5b qwen2.5-0.5b-bf16 FOLDER

The first two are GGUFs with layers in Q4_1 and the embedding, which is the head too, in Q8_0. The last is a Hugging
Face folder in bfloat16, and beside it the same weights as a Q8_0 GGUF. Their tokenizer knows bytes; other ids have no
text.
"""

from __future__ import annotations

import argparse
import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from tests.support.gguf_writer import TYPES, encode_value

Floats = npt.NDArray[np.float32]
BLOCK, ALIGNMENT = 32, 32
VOCABULARY = 151_936


@dataclass(frozen=True)
class Shape:
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


SHAPES = {
    "qwen2.5-0.5b": Shape(896, 4864, 24, 14, 2),
    "qwen2.5-1.5b": Shape(1536, 8960, 28, 12, 2),
}
NAMES = (*SHAPES, "qwen2.5-0.5b-bf16")


@dataclass(frozen=True)
class Weight:
    """gguf: its name there; hf: in a Hugging Face checkpoint. spread: standard deviation; 0 for norms, which are 1."""

    gguf: str
    hf: str
    shape: tuple[int, ...]
    spread: float


def weights(shape: Shape) -> Iterator[Weight]:
    """Scaled so that activations keep their size and logits spread by about 1.5."""
    hidden, kv = shape.hidden, shape.kv_heads * shape.head_dim
    yield Weight("token_embd.weight", "model.embed_tokens.weight", (VOCABULARY, hidden), 1.5 * hidden**-0.5)
    yield Weight("output_norm.weight", "model.norm.weight", (hidden,), 0.0)
    for n in range(shape.layers):
        for gguf, hf, outputs, inputs in (
            ("attn_q", "self_attn.q_proj", hidden, hidden),
            ("attn_k", "self_attn.k_proj", kv, hidden),
            ("attn_v", "self_attn.v_proj", kv, hidden),
            ("attn_output", "self_attn.o_proj", hidden, hidden),
            ("ffn_gate", "mlp.gate_proj", shape.intermediate, hidden),
            ("ffn_up", "mlp.up_proj", shape.intermediate, hidden),
            ("ffn_down", "mlp.down_proj", hidden, shape.intermediate),
        ):
            names = f"blk.{n}.{gguf}", f"model.layers.{n}.{hf}"
            yield Weight(f"{names[0]}.weight", f"{names[1]}.weight", (outputs, inputs), inputs**-0.5)
            if gguf in ("attn_q", "attn_k", "attn_v"):
                yield Weight(f"{names[0]}.bias", f"{names[1]}.bias", (outputs,), 0.1)
        yield Weight(f"blk.{n}.attn_norm.weight", f"model.layers.{n}.input_layernorm.weight", (hidden,), 0.0)
        yield Weight(f"blk.{n}.ffn_norm.weight", f"model.layers.{n}.post_attention_layernorm.weight", (hidden,), 0.0)


def values(weight: Weight, rng: np.random.Generator) -> Floats:
    if weight.spread == 0.0:
        return np.ones(weight.shape, np.float32)
    array: Floats = rng.standard_normal(weight.shape, dtype=np.float32)
    array *= np.float32(weight.spread)
    return array


def bfloat16(array: Floats) -> npt.NDArray[np.uint16]:
    """Rounded to the nearest even."""
    bits = array.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def q8_0(array: Floats) -> bytes:
    """ggml's format: of every 32 values along K an fp16 scale and 32 int8."""
    blocks = array.reshape(-1, BLOCK)
    scale = np.abs(blocks).max(axis=1, keepdims=True) / 127
    out = np.empty(len(blocks), [("scale", "<f2"), ("values", "i1", BLOCK)])
    out["scale"] = scale[:, 0]
    out["values"] = np.rint(blocks / np.maximum(scale, 1e-30))
    return out.tobytes()


def q4_1(array: Floats) -> bytes:
    """ggml's format: of 32 values an fp16 scale, an fp16 minimum, and 16 bytes; byte i has values i and 16 + i."""
    blocks = array.reshape(-1, BLOCK)
    low = blocks.min(axis=1, keepdims=True)
    scale = (blocks.max(axis=1, keepdims=True) - low) / 15
    levels = np.clip(np.rint((blocks - low) / np.maximum(scale, 1e-30)), 0, 15).astype(np.uint8)
    out = np.empty(len(blocks), [("scale", "<f2"), ("low", "<f2"), ("values", "u1", BLOCK // 2)])
    out["scale"], out["low"] = scale[:, 0], low[:, 0]
    out["values"] = levels[:, : BLOCK // 2] | levels[:, BLOCK // 2 :] << 4
    return out.tobytes()


_ENCODERS: dict[str, tuple[Callable[[Floats], bytes], int, int]] = {
    "F32": (lambda array: array.tobytes(), 1, 4),
    "Q4_1": (q4_1, 32, 20),
    "Q8_0": (q8_0, 32, 34),
}


def write_gguf(path: Path, name: str, shape: Shape, layers: str, *, round_to_bf16: bool = False) -> None:
    """Encoded a tensor at a time: the file may be larger than the memory at hand."""
    infos = bytearray()
    encodings, offset = [], 0
    every = list(weights(shape))
    for weight in every:
        encoding = "F32" if len(weight.shape) == 1 else "Q8_0" if weight.gguf == "token_embd.weight" else layers
        _, block, size = _ENCODERS[encoding]
        dims = tuple(reversed(weight.shape))
        raw = weight.gguf.encode()
        infos += struct.pack("<Q", len(raw)) + raw
        infos += struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, TYPES[encoding], offset)
        offset += -(-int(np.prod(weight.shape)) // block * size // ALIGNMENT) * ALIGNMENT
        encodings.append(encoding)
    metadata = _metadata(name, shape)
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, len(every), len(metadata)))
        for key, value in metadata.items():
            file.write(struct.pack("<Q", len(key)) + key.encode() + encode_value(value))
        file.write(infos)
        _pad(file)
        rng = np.random.default_rng(0)
        for weight, encoding in zip(every, encodings):
            array = values(weight, rng)
            if round_to_bf16:
                array = (bfloat16(array).astype(np.uint32) << 16).view(np.float32)
            file.write(_ENCODERS[encoding][0](array))
            _pad(file)
    part.rename(path)


def _pad(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % ALIGNMENT))


def _metadata(name: str, shape: Shape) -> dict[str, Any]:
    tokens = _tokens()
    return {
        "general.architecture": "qwen2",
        "general.name": f"random weights, {name}",
        "qwen2.block_count": shape.layers,
        "qwen2.context_length": 32_768,
        "qwen2.embedding_length": shape.hidden,
        "qwen2.feed_forward_length": shape.intermediate,
        "qwen2.attention.head_count": shape.heads,
        "qwen2.attention.head_count_kv": shape.kv_heads,
        "qwen2.attention.layer_norm_rms_epsilon": 1e-6,
        "qwen2.rope.freq_base": 1e6,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([1] * (len(tokens) - 1) + [3], np.int32),
        "tokenizer.ggml.merges": [f"{tokens[0]} {tokens[1]}"],
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
        "tokenizer.ggml.add_bos_token": False,
    }


def _tokens() -> list[str]:
    """A byte-level BPE's 256 bytes, one merge of two of them, names for the rest, and an end of text."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(byte) for byte in printable] + [chr(256 + i) for i in range(256 - len(printable))]
    named = [f"unused{i}" for i in range(VOCABULARY - 258)]
    return [*letters, letters[0] + letters[1], *named, "<|endoftext|>"]


def write_folder(folder: Path, shape: Shape) -> None:
    """The weights of write_gguf(round_to_bf16=True), in safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = _tokens()
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "eos_token_id": VOCABULARY - 1,
    }
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    end = {"content": tokens[-1], "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": VOCABULARY - 1, "special": True, **end}],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens[:-1])},
            "merges": [[tokens[0], tokens[1]]],
        },
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    header, offset = {}, 0
    for weight in weights(shape):
        size = 2 * int(np.prod(weight.shape))
        header[weight.hf] = {"dtype": "BF16", "shape": weight.shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    part = folder / "model.part"
    with part.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        rng = np.random.default_rng(0)
        for weight in weights(shape):
            file.write(bfloat16(values(weight, rng)).tobytes())
    part.rename(folder / "model.safetensors")


def make(name: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    shape = SHAPES[name.removesuffix("-bf16")]
    if name.endswith("-bf16"):
        write_folder(folder / name, shape)
    write_gguf(
        folder / f"{name}.gguf",
        name,
        shape,
        "Q8_0" if name.endswith("-bf16") else "Q4_1",
        round_to_bf16=name.endswith("-bf16"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", choices=NAMES, metavar="NAME")
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    for name in arguments.names:
        make(name, arguments.folder)
        print(f"{name}: in {arguments.folder}")


if __name__ == "__main__":
    main()
