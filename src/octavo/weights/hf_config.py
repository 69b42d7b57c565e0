"""A Hugging Face config.json → `ModelConfig`. What would change the result and is not supported is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo import limits
from octavo.errors import ModelFileError, UnsupportedModelError
from octavo.models.config import ModelConfig
from octavo.program.program import Rope
from octavo.weights.fields import Fields, is_neutral, shown

# architecture → page in octavo.models. Mistral without a sliding window is Llama's arithmetic.
PAGES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_MODEL_TYPES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}

# Keys that change the result, each with the values that do not. Null, false and empty are always neutral.
_REFUSED: dict[str, tuple[object, ...]] = {
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "attention_multiplier": (),
    "attention_scale": (),
    "embedding_multiplier": (1.0,),
    "embedding_scale": (1.0,),
    "scale_embedding": (),
    "scale_emb": (1.0,),
    "scale_depth": (),
    "dim_model_base": (),
    "residual_multiplier": (1.0,),
    "logits_scaling": (1.0,),
    "logit_scale": (1.0,),
    "lm_head_multiplier": (1.0,),
    "partial_rotary_factor": (1.0,),
    "rotary_pct": (1.0,),
    "rope_ratio": (1.0,),
    "rope_interleaved": (),
    "rope_local_base_freq": (),
    "mrope_section": (),
    "no_rope_layers": (),
    "no_rope_layer_interval": (0,),
    "quantization_config": (),
    "compression_config": (),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
    "n_routed_experts": (0,),
    "moe_intermediate_size": (0,),
    "num_nextn_predict_layers": (0,),
    "parallel_residual": (),
    "use_parallel_residual": (),
    "clip_qkv": (),
    "qk_norm": (),
    "use_qk_norm": (),
    "qk_layernorm": (),
    "attn_temperature_tuning": (),
    "dual_chunk_attention_config": (),
    "use_bidirectional_attention": (),
    "is_encoder_decoder": (),
    "cross_attention_layers": (),
    "attention_chunk_size": (0,),
    "sparse_attention_config": (),
    "use_sparse_attention": (),
    "alibi": (),
    "zero_centered_gamma": (),
    "mup_base_width": (),
}
# A key nobody has listed but whose name says that it scales, caps or routes is refused unless it is neutral.
_SUSPICIOUS = ("softcap", "multiplier", "_scaling", "expert", "alibi", "lora_rank", "window", "hyper_connection")
_READ_ELSEWHERE = ("rope_scaling", "sliding_window", "use_sliding_window", "max_window_layers")

_ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
_ROPE_COMMON = ("type", "rope_type", "rope_theta", "partial_rotary_factor")


def parse_hf_config(raw: Mapping[str, Any], path: Path) -> ModelConfig:
    """`path` is for messages. Raises ModelFileError (damaged) or UnsupportedModelError (refused by name)."""
    fields = Fields(path, raw)
    page = _page(fields)
    layers = fields.integer("num_hidden_layers", 1, limits.MAX_LAYERS)
    hidden = fields.integer("hidden_size", 1, limits.MAX_HIDDEN)
    heads = fields.integer("num_attention_heads", 1, limits.MAX_HEADS)
    kv_heads = fields.integer("num_key_value_heads", 1, heads, heads)
    context = fields.integer("max_position_embeddings", 1, limits.MAX_CONTEXT)
    head_dim = fields.integer("head_dim", 2, limits.MAX_HEAD_DIM, 128 if page == "qwen3" else hidden // heads)
    check_heads(path, hidden, heads, kv_heads, head_dim)
    _refuse_what_is_not_supported(fields, page, context)
    biased = page != "qwen2" and fields.boolean("attention_bias", False) and not _is_mistral(fields)
    return ModelConfig(
        architecture=page,
        vocab_size=fields.integer("vocab_size", 1, limits.MAX_VOCABULARY),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size", 1, limits.MAX_INTERMEDIATE),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=fields.real("rms_norm_eps", 0.0, 1.0, 1e-6),
        rope=_rope(fields, head_dim, context),
        context=context,
        tie_embeddings=fields.boolean("tie_word_embeddings", False),
        attention_bias=page == "qwen2" or biased,
        output_bias=biased,
        mlp_bias=page == "llama" and fields.boolean("mlp_bias", False) and not _is_mistral(fields),
    )


def check_heads(path: Path, hidden: int, heads: int, kv_heads: int, head_dim: int) -> None:
    if heads % kv_heads:
        raise ModelFileError(path, f"{heads} attention heads cannot share {kv_heads} key-value heads evenly")
    if head_dim < 2 or head_dim % 2 or head_dim > limits.MAX_HEAD_DIM:
        raise ModelFileError(path, f"a head of {head_dim} values is not allowed: even, 2 to {limits.MAX_HEAD_DIM}")
    if heads * head_dim > limits.MAX_HIDDEN:
        raise ModelFileError(path, f"{heads} heads of {head_dim} values exceed the width {limits.MAX_HIDDEN}")


def _is_mistral(fields: Fields) -> bool:
    return fields.get("architectures") == ["MistralForCausalLM"] or (
        not fields.get("architectures") and fields.get("model_type") == "mistral"
    )


def _page(fields: Fields) -> str:
    supported = ", ".join(PAGES)
    names = fields.get("architectures")
    kind = fields.text("model_type", "")
    if names is not None and (not isinstance(names, list) or not all(isinstance(name, str) for name in names)):
        raise fields.damaged("architectures", "a list of names")
    if kind and kind not in _MODEL_TYPES:
        shown_key = "architectures" if names and names[0] not in PAGES else "model_type"
        raise fields.unsupported(shown_key, f"supported are {supported}")
    if not names:
        return _MODEL_TYPES[kind] if kind else fields.missing("architectures")
    if len(names) != 1 or names[0] not in PAGES:
        raise fields.unsupported("architectures", f"supported are {supported}")
    if kind and _MODEL_TYPES[kind] != PAGES[names[0]]:
        raise ModelFileError(fields.path, f"architectures={shown(names)} contradicts model_type={kind!r}")
    return PAGES[names[0]]


def _refuse_what_is_not_supported(fields: Fields, page: str, context: int) -> None:
    for key, neutral in _REFUSED.items():
        if not is_neutral(fields.get(key), *neutral):
            raise fields.unsupported(key)
    for key, value in fields.values.items():
        named = any(mark in key for mark in _SUSPICIOUS) and key not in _REFUSED and key not in _READ_ELSEWHERE
        if named and not is_neutral(value, 0, 1.0):
            raise UnsupportedModelError(f"{fields.path}: {key!r:.80}={shown(value)} is not supported")
    if fields.text("hidden_act", "silu") not in ("silu", "swish"):
        raise fields.unsupported("hidden_act", "only silu is")
    kinds = fields.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list):
            raise fields.damaged("layer_types", "a list of names")
        if any(kind != "full_attention" for kind in kinds):
            raise fields.unsupported("layer_types", "only full_attention is")
    _check_window(fields, page, context)


def _check_window(fields: Fields, page: str, context: int) -> None:
    """Qwen slides only when use_sliding_window says so. Where the key is absent, Mistral and Qwen mean 4096."""
    if page != "llama" and not fields.boolean("use_sliding_window", False):
        return
    absent = 4096 if page != "llama" or _is_mistral(fields) else None
    window = fields.values.get("sliding_window", absent)
    if window is None:
        return
    if type(window) is not int or window < 1:
        raise fields.damaged("sliding_window", "an integer from 1, or null")
    if window < context:
        why = f"only a window of at least the context, {context}, is"
        raise UnsupportedModelError(f"{fields.path}: sliding_window={window} is not supported: {why}")


def _rope(fields: Fields, head_dim: int, context: int) -> Rope:
    """Old style: rope_theta beside rope_scaling; since transformers 5 all of it in rope_parameters."""
    source = "rope_scaling" if fields.mapping("rope_scaling") else "rope_parameters"
    values = fields.mapping(source)
    if fields.mapping("rope_scaling") and fields.mapping("rope_parameters") not in ({}, values):
        raise ModelFileError(fields.path, "rope_scaling and rope_parameters contradict each other")
    scaling = Fields(fields.path, values)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "none":
        kind = "default"
    if not isinstance(kind, str) or kind not in _ROPE_KEYS:
        why = f"supported are {', '.join(_ROPE_KEYS)}"
        raise UnsupportedModelError(f"{fields.path}: {source} of type {shown(kind)} is not supported: {why}")
    for key, value in values.items():
        if key not in _ROPE_COMMON + _ROPE_KEYS[kind] and not is_neutral(value):
            raise UnsupportedModelError(
                f"{fields.path}: {source}.{key[:80]!r}={shown(value)} is not supported for {kind}"
            )
    if not is_neutral(scaling.get("partial_rotary_factor"), 1.0):
        raise scaling.unsupported("partial_rotary_factor", "only 1.0 is")
    theta = scaling.real("rope_theta", 0.0, 1e15, fields.real("rope_theta", 0.0, 1e15, 10_000.0))
    if kind == "default":
        return Rope(theta, head_dim)
    factor = scaling.real("factor", 0.0, 1e6)
    if kind == "linear":
        return Rope(theta, head_dim, "linear", factor)
    low = scaling.real("low_freq_factor", 0.0, 1e6)
    high = scaling.real("high_freq_factor", low, 1e6)
    original = scaling.integer("original_max_position_embeddings", 1, limits.MAX_CONTEXT, context)
    return Rope(theta, head_dim, "llama3", factor, low, high, original)
