"""Tiny random models of every page, made with transformers, and the same weights as GGUF.

Weights come from NumPy's PCG64, so that they are the same bytes with every torch. Sizes are odd on purpose (a
vocabulary of 131, inner widths of 80): tails are part of the promise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

TOKENS = 64
_SHAPE: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

# name: (transformers config class, GGUF architecture, what differs from _SHAPE)
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": (
        "LlamaConfig",
        "llama",
        {"rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    "llama3": (
        "LlamaConfig",
        "llama",
        {"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_parameters": _LLAMA3},
    ),
    "mistral": (
        "MistralConfig",
        "llama",
        {"sliding_window": None, "head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}},
    ),
    "qwen2": (
        "Qwen2Config",
        "qwen2",
        {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}},
    ),
    "qwen3": (
        "Qwen3Config",
        "qwen3",
        {"hidden_size": 48, "head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}},
    ),
}


def build(name: str) -> Any:
    """The transformers model, float32, eager attention."""
    import torch
    import transformers

    config_class, _, differences = MODELS[name]
    config = getattr(transformers, config_class)(**{**_SHAPE, **differences}, dtype="float32")
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    rng = np.random.default_rng(list(name.encode()))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(_random(rng, key, tuple(parameter.shape))))
    return model


def _random(rng: np.random.Generator, key: str, shape: tuple[int, ...]) -> np.ndarray:
    noise = rng.standard_normal(shape, dtype=np.float32)
    if key.endswith("norm.weight"):
        return 1 + noise * np.float32(0.2)
    if key.endswith("bias"):
        return noise * np.float32(0.5)
    if "embed_tokens" in key:
        return noise * np.float32(0.4)
    return noise * np.float32(1.3 / np.sqrt(shape[1]))


def token_ids(name: str) -> np.ndarray:
    return np.random.default_rng(len(name)).integers(3, _SHAPE["vocab_size"], TOKENS).astype(np.int32)


def logits(model: Any, ids: np.ndarray) -> np.ndarray:
    """float32 [T, vocab] of one sequence."""
    import torch

    with torch.no_grad():
        out = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0]
    return out.float().numpy()


_GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_GGUF_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def _gguf_name(key: str) -> str:
    module, _, kind = key.rpartition(".")
    if module in _GGUF_TOP:
        return f"{_GGUF_TOP[module]}.{kind}"
    layer, _, rest = module.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_GGUF_NAMES[rest]}.{kind}"


def _permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from halves (x1…, x2…) to pairs (x1, x2), …: how GGUF stores Llama's q and k."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _llama3_factors(head_dim: int) -> np.ndarray:
    """What rope_freqs.weight holds: each frequency of Llama 3.1 is divided by its factor."""
    frequencies = _LLAMA3["rope_theta"] ** (-np.arange(0, head_dim, 2) / head_dim)
    turns = _LLAMA3["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high, factor = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"], _LLAMA3["factor"]
    blend = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - blend) / factor + blend)).astype(np.float32)


def write_gguf(name: str, model: Any, path: Path) -> None:
    """The model as GGUF F32, laid out as llama.cpp's converter does it."""
    import gguf

    config, arch = model.config, MODELS[name][1]
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name(f"tiny random {name}")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(config.vocab_size)
    if name == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(head_dim))
    for key, tensor in model.named_parameters():  # a tied lm_head is listed once, as the embedding
        array = tensor.detach().numpy()
        if arch == "llama" and ".q_proj." in key:
            array = _permute(array, heads)
        if arch == "llama" and ".k_proj." in key:
            array = _permute(array, kv_heads)
        writer.add_tensor(_gguf_name(key), np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
