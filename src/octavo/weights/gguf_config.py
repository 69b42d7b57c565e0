"""GGUF metadata → `ModelConfig`. What would change the result and is not supported is refused by name."""

from __future__ import annotations

import numpy as np

from octavo import limits
from octavo.errors import ModelFileError, UnsupportedModelError
from octavo.models.config import ModelConfig
from octavo.program.program import Rope
from octavo.weights.fields import Fields, is_neutral, shown
from octavo.weights.gguf import GGUFFile
from octavo.weights.hf_config import check_heads
from octavo.weights.names import ROPE_FACTORS

ARCHITECTURES = ("llama", "qwen2", "qwen3")

# Keys under the architecture's prefix that Octavo reads or that do not change the result.
_KNOWN = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "attention.head_count",
    "attention.head_count_kv", "attention.layer_norm_rms_epsilon", "attention.key_length", "attention.value_length",
    "attention.causal", "attention.sliding_window", "rope.freq_base", "rope.dimension_count", "rope.scale_linear",
    "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned",
    "rope.scaling.attn_factor", "tensor_data_layout", "decoder_start_token_id",
}  # fmt: skip


def parse_gguf_config(file: GGUFFile) -> ModelConfig:
    """Raises ModelFileError (damaged) or UnsupportedModelError (refused by name)."""
    path = file.path
    architecture = Fields(path, file.metadata).text("general.architecture")
    if architecture not in ARCHITECTURES:
        why = f"supported are {', '.join(ARCHITECTURES)}"
        raise UnsupportedModelError(f"{path}: general.architecture={shown(architecture)} is not supported: {why}")
    fields = Fields(path, file.metadata, f"{architecture}.")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelFileError(path, "has no tensor token_embd.weight of two dimensions")
    vocab = embedding.shape[0]
    if vocab > limits.MAX_VOCABULARY:
        raise ModelFileError(path, f"has a vocabulary of {vocab}, at most {limits.MAX_VOCABULARY} is allowed")

    hidden = fields.integer("embedding_length", 1, limits.MAX_HIDDEN)
    heads = fields.integer("attention.head_count", 1, limits.MAX_HEADS)
    kv_heads = fields.integer("attention.head_count_kv", 1, heads, heads)
    context = fields.integer("context_length", 1, limits.MAX_CONTEXT)
    head_dim = fields.integer("attention.key_length", 2, limits.MAX_HEAD_DIM, hidden // heads)
    check_heads(path, hidden, heads, kv_heads, head_dim)
    if fields.integer("attention.value_length", 1, limits.MAX_HEAD_DIM, head_dim) != head_dim:
        raise fields.unsupported("attention.value_length", f"only the key length, {head_dim}, is")
    _refuse_what_is_not_supported(fields, context)
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=fields.integer("feed_forward_length", 1, limits.MAX_INTERMEDIATE),
        layers=fields.integer("block_count", 1, limits.MAX_LAYERS),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=fields.real("attention.layer_norm_rms_epsilon", 0.0, 1.0),
        rope=_rope(file, fields, head_dim),
        context=context,
        tie_embeddings="output.weight" not in file.tensors,
        # GGUF has no key for biases: the tensors themselves tell.
        attention_bias=architecture == "qwen2" or "blk.0.attn_q.bias" in file.tensors,
        output_bias=architecture != "qwen2" and "blk.0.attn_output.bias" in file.tensors,
        mlp_bias=architecture == "llama" and "blk.0.ffn_up.bias" in file.tensors,
    )


def _refuse_what_is_not_supported(fields: Fields, context: int) -> None:
    for full_key, value in fields.values.items():
        key = full_key.removeprefix(fields.prefix)
        if key == full_key or key in _KNOWN or (isinstance(value, np.ndarray) and not value.any()):
            continue
        neutral = (0, 1.0) if "scale" in key or "factor" in key else (0,)
        if isinstance(value, np.ndarray) or not is_neutral(value, *neutral):
            raise UnsupportedModelError(f"{fields.path}: {full_key!r:.80}={shown(value)} is not supported")
    if not fields.boolean("attention.causal", True):
        raise fields.unsupported("attention.causal")
    window = fields.integer("attention.sliding_window", 0, 1 << 32, 0)
    if 0 < window < context:
        raise fields.unsupported("attention.sliding_window", f"only a window of at least the context, {context}, is")
    layout = fields.text("tensor_data_layout", "")
    if layout not in ("", "Meta AI original pth"):
        raise fields.unsupported("tensor_data_layout")


def _rope(file: GGUFFile, fields: Fields, head_dim: int) -> Rope:
    if fields.integer("rope.dimension_count", 1, limits.MAX_HEAD_DIM, head_dim) != head_dim:
        raise fields.unsupported("rope.dimension_count", f"only the head's width, {head_dim}, is")
    theta = fields.real("rope.freq_base", 0.0, 1e15, 10_000.0)
    if not is_neutral(fields.get("rope.scaling.attn_factor"), 1.0):
        raise fields.unsupported("rope.scaling.attn_factor")
    # A factor without a type means linear; rope.scale_linear is its older name. 0 stands for "not given".
    kind = fields.text("rope.scaling.type", "linear")
    if kind not in ("none", "linear"):
        raise fields.unsupported("rope.scaling.type", "supported are none and linear")
    factor = fields.real("rope.scaling.factor", -1.0, 1e6, fields.real("rope.scale_linear", -1.0, 1e6, 0.0))
    if factor < 0:
        raise fields.damaged("rope.scaling.factor", "a number from 0 to 1e6")
    linear = kind == "linear" and factor not in (0.0, 1.0)
    factors = _factors(file, head_dim)
    if factors and linear:
        raise UnsupportedModelError(f"{file.path}: {ROPE_FACTORS} together with linear rope scaling is not supported")
    if factors:
        return Rope(theta, head_dim, "factors", factors=factors)
    return Rope(theta, head_dim, "linear", factor) if linear else Rope(theta, head_dim)


def _factors(file: GGUFFile, head_dim: int) -> tuple[float, ...]:
    """Llama 3.1's rope scaling as the converter stores it: one divisor for each frequency."""
    for name in file.tensors:
        if name.startswith("rope_factors_"):
            raise UnsupportedModelError(f"{file.path}: tensor {name!r:.200} (longrope scaling) is not supported")
    tensor = file.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return ()
    if tensor.encoding != "f32" or tensor.shape != (head_dim // 2,):
        raise ModelFileError(
            file.path, f"{ROPE_FACTORS} is {tensor.encoding} {tensor.shape}, f32 {(head_dim // 2,)} is expected"
        )
    values = tensor.data.view("<f4") if tensor.data.ctypes.data % 4 == 0 else tensor.data.copy().view("<f4")
    if not (np.isfinite(values).all() and (values > 0).all()):
        raise ModelFileError(file.path, f"{ROPE_FACTORS} must hold finite numbers above 0")
    return tuple(float(value) for value in values)
