"""Tiny valid model files: the same random llama as GGUF and as a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.support.gguf_writer import gguf_bytes
from tests.support.safetensors_writer import write_safetensors

VOCAB, HIDDEN, INNER, LAYERS, HEADS, KV_HEADS = 40, 32, 64, 2, 4, 2
HEAD_DIM = HIDDEN // HEADS

HF_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}

GGUF_METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": LAYERS,
    "llama.context_length": 128,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": INNER,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "llama.rope.dimension_count": HEAD_DIM,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": [f"t{i}é" for i in range(VOCAB)],
    "tokenizer.ggml.token_type": np.ones(VOCAB, np.int32),
    "tokenizer.ggml.merges": ["a b", "b c"],
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.chat_template": "{{ messages }}",
}

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def hf_weights(seed: int = 0) -> dict[str, npt.NDArray[np.float32]]:
    """By Hugging Face name; written out by hand, so that a wrong table in the loader shows."""
    rng = np.random.default_rng(seed)
    kv = KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        shapes[f"{at}input_layernorm.weight"] = (HIDDEN,)
        shapes[f"{at}post_attention_layernorm.weight"] = (HIDDEN,)
        shapes[f"{at}self_attn.q_proj.weight"] = (HIDDEN, HIDDEN)
        shapes[f"{at}self_attn.k_proj.weight"] = (kv, HIDDEN)
        shapes[f"{at}self_attn.v_proj.weight"] = (kv, HIDDEN)
        shapes[f"{at}self_attn.o_proj.weight"] = (HIDDEN, HIDDEN)
        shapes[f"{at}mlp.gate_proj.weight"] = (INNER, HIDDEN)
        shapes[f"{at}mlp.up_proj.weight"] = (INNER, HIDDEN)
        shapes[f"{at}mlp.down_proj.weight"] = (HIDDEN, INNER)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def llama_permute(rows: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """What llama.cpp's converter does to q and k: (head, half, i) becomes (head, i, half)."""
    split = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(rows.shape)


def gguf_tensors(weights: dict[str, npt.NDArray[np.float32]]) -> list[tuple[str, str, tuple[int, ...], bytes]]:
    """The weights under GGUF's names, q and k permuted, all F32."""
    top = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    result = []
    for name, array in weights.items():
        if name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            stem, kind = rest.rsplit(".", 1)
            gguf_name = f"blk.{layer}.{_LAYER_NAMES[stem]}.{kind}"
            if stem in ("self_attn.q_proj", "self_attn.k_proj"):
                array = llama_permute(array, HEADS if stem.endswith("q_proj") else KV_HEADS)
        else:
            gguf_name = top.get(name, "output.weight")
        result.append((gguf_name, "F32", array.shape, np.ascontiguousarray(array).tobytes()))
    return result


def tiny_gguf(metadata: dict[str, Any] | None = None, seed: int = 0) -> bytes:
    """`metadata` is laid over GGUF_METADATA; a value of None removes the key."""
    merged = {**GGUF_METADATA, **(metadata or {})}
    return gguf_bytes({k: v for k, v in merged.items() if v is not None}, gguf_tensors(hf_weights(seed)))


def write_tiny_hf(folder: Path, config: dict[str, Any] | None = None, weights: dict[str, Any] | None = None) -> Path:
    """`config` is laid over HF_CONFIG; a value of None stays null in the file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**HF_CONFIG, **(config or {})}))
    write_safetensors(folder / "model.safetensors", hf_weights() if weights is None else weights)
    return folder
