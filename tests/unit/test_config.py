"""config.json and GGUF metadata → ModelConfig: what is read, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.errors import ModelFileError, UnsupportedModelError
from octavo.models.config import ModelConfig
from octavo.program.program import Rope
from octavo.weights.checkpoint import load_checkpoint
from octavo.weights.gguf import read_gguf
from octavo.weights.gguf_config import parse_gguf_config
from octavo.weights.hf_config import parse_hf_config
from tests.support.gguf_writer import gguf_bytes
from tests.support.tiny_files import GGUF_METADATA, HEAD_DIM, HF_CONFIG, gguf_tensors, hf_weights

PATH = Path("config.json")


def parse(**changes: Any) -> ModelConfig:
    return parse_hf_config({**HF_CONFIG, **changes}, PATH)


def parse_gguf(tmp_path: Path, changes: dict[str, Any] | None = None, extra: list[Any] | None = None) -> ModelConfig:
    merged = {**GGUF_METADATA, **(changes or {})}
    kept = {key: value for key, value in merged.items() if value is not None}
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(kept, gguf_tensors(hf_weights()) + (extra or [])))
    return parse_gguf_config(read_gguf(tmp_path / "m.gguf"))


def test_the_same_model_gives_the_same_config_from_both_formats(tmp_path: Path) -> None:
    ours, theirs = parse(), parse_gguf(tmp_path)
    assert ours.norm_eps == 1e-5
    assert theirs.norm_eps == float(np.float32(1e-5))  # GGUF keeps it in 32 bits
    for field in ModelConfig.__dataclass_fields__:
        if field != "norm_eps":
            assert getattr(ours, field) == getattr(theirs, field), field


@pytest.mark.parametrize(
    ("architecture", "page", "biases"),
    [
        ("LlamaForCausalLM", "llama", (False, False, False)),
        ("MistralForCausalLM", "llama", (False, False, False)),
        ("Qwen2ForCausalLM", "qwen2", (True, False, False)),
        ("Qwen3ForCausalLM", "qwen3", (False, False, False)),
    ],
)
def test_architectures_and_their_biases(architecture: str, page: str, biases: tuple[bool, ...]) -> None:
    config = parse(architectures=[architecture], model_type=None, head_dim=8, sliding_window=None)
    assert config.architecture == page
    assert (config.attention_bias, config.output_bias, config.mlp_bias) == biases


def test_biases_of_llama_and_qwen3_come_from_the_config() -> None:
    llama = parse(attention_bias=True, mlp_bias=True)
    assert (llama.attention_bias, llama.output_bias, llama.mlp_bias) == (True, True, True)
    qwen3 = parse(architectures=["Qwen3ForCausalLM"], model_type="qwen3", attention_bias=True)
    assert (qwen3.attention_bias, qwen3.output_bias, qwen3.mlp_bias) == (True, True, False)
    assert qwen3.head_dim == 128  # Qwen3's own default, not hidden / heads


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def test_rope_in_the_old_and_the_new_style() -> None:
    plain = Rope(10000.0, HEAD_DIM)
    assert parse().rope == plain
    assert parse(rope_scaling=None).rope == plain
    assert parse(rope_scaling={"type": "default"}).rope == plain
    assert parse(rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 5e5}).rope.theta == 5e5
    assert parse(rope_scaling={"type": "linear", "factor": 2}).rope == Rope(10000.0, HEAD_DIM, "linear", 2.0)
    llama3 = Rope(500.0, HEAD_DIM, "llama3", 8.0, 1.0, 4.0, 32)
    assert parse(rope_theta=500.0, rope_scaling=LLAMA3).rope == llama3
    assert parse(rope_theta=None, rope_parameters={**LLAMA3, "rope_theta": 500.0}).rope == llama3


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, "GPT2LMHeadModel"),
    ({"architectures": ["LlamaForCausalLM"], "model_type": "smollm3"}, "model_type='smollm3'"),
    ({"architectures": ["LlamaForCausalLM", "Other"]}, "architectures"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ({"sliding_window": 64}, "sliding_window=64"),
    ({"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 127}, "sliding_window=127"),
    (
        {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "max_position_embeddings": 32768},
        "sliding_window=4096",  # what Mistral means when the key is absent
    ),
    (
        {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 9},
        "sliding_window=9",
    ),
    ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ({"attention_multiplier": 0.5}, "attention_multiplier"),
    ({"query_pre_attn_scalar": 256}, "query_pre_attn_scalar"),
    ({"logits_scaling": 8.0}, "logits_scaling"),
    ({"residual_multiplier": 0.22}, "residual_multiplier"),
    ({"embedding_multiplier": 12.0}, "embedding_multiplier"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ({"num_experts": 8}, "num_experts"),
    ({"num_local_experts": 8}, "num_local_experts"),
    ({"no_rope_layers": [1, 0]}, "no_rope_layers"),
    ({"brand_new_softcap": 2.0}, "brand_new_softcap"),
    ({"num_shared_experts_per_tok": 2}, "num_shared_experts_per_tok"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling of type 'yarn'"),
    ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_scaling of type 'dynamic'"),
    ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters of type 'longrope'"),
    ({"rope_parameters": {"rope_type": "default", "mrope_section": [1, 2]}}, "mrope_section"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_would_change_the_result_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        parse(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 128, "architectures": ["MistralForCausalLM"], "model_type": "mistral"},
        {
            "sliding_window": 4,
            "use_sliding_window": False,
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
        },
        {"num_experts": 0, "residual_multiplier": 1.0, "quantization_config": None, "attn_logit_softcapping": None},
        {"layer_types": ["full_attention", "full_attention"]},
        {"partial_rotary_factor": 1.0},
        {"_name_or_path": "x", "transformers_version": "5.0", "pretraining_tp": 2, "attention_dropout": 0.1},
    ],
)
def test_what_does_not_change_the_result_is_let_through(changes: dict[str, Any]) -> None:
    plain = parse(
        **{key: changes[key] for key in ("architectures", "model_type") if key in changes}, sliding_window=None
    )
    assert parse(**changes) == plain


BAD_VALUES: list[tuple[str, Any]] = [
    ("num_hidden_layers", 0),
    ("num_hidden_layers", 1 << 40),
    ("num_hidden_layers", 2.5),
    ("num_hidden_layers", True),
    ("num_hidden_layers", None),
    ("hidden_size", -32),
    ("hidden_size", "32"),
    ("vocab_size", 1 << 30),
    ("num_attention_heads", 5),
    ("num_key_value_heads", 3),
    ("num_key_value_heads", 8),
    ("head_dim", 7),
    ("intermediate_size", []),
    ("rms_norm_eps", 0),
    ("rms_norm_eps", float("nan")),
    ("rope_theta", -1.0),
    ("rope_scaling", [1]),
    ("rope_scaling", {"type": "linear"}),
    ("rope_scaling", {"type": "linear", "factor": 0}),
    ("rope_scaling", {**LLAMA3, "high_freq_factor": 1.0}),
    ("max_position_embeddings", 0),
    ("tie_word_embeddings", "yes"),
    ("architectures", "LlamaForCausalLM"),
    ("architectures", [3]),
    ("hidden_act", 3),
    ("layer_types", "full_attention"),
    ("sliding_window", "wide"),
]


@pytest.mark.parametrize(("key", "value"), BAD_VALUES)
def test_a_value_out_of_bounds_is_a_model_file_error(key: str, value: Any) -> None:
    with pytest.raises(ModelFileError):
        parse(**{key: value})


def test_architectures_must_not_contradict_the_model_type() -> None:
    with pytest.raises(ModelFileError, match="contradicts"):
        parse(architectures=["LlamaForCausalLM"], model_type="qwen2")


def test_gguf_rope_scaling(tmp_path: Path) -> None:
    linear = Rope(10000.0, HEAD_DIM, "linear", 4.0)
    assert parse_gguf(tmp_path, {"llama.rope.scaling.factor": 4.0}).rope == linear
    assert parse_gguf(tmp_path, {"llama.rope.scale_linear": 4.0}).rope == linear
    both = {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}
    assert parse_gguf(tmp_path, both).rope == Rope(10000.0, HEAD_DIM)
    factors = np.array([1, 1, 2.5, 8], np.float32)
    extra = [("rope_freqs.weight", "F32", (4,), factors.tobytes())]
    assert parse_gguf(tmp_path, None, extra).rope == Rope(10000.0, HEAD_DIM, "factors", factors=(1, 1, 2.5, 8))
    with pytest.raises(UnsupportedModelError, match="together with linear"):
        parse_gguf(tmp_path, {"llama.rope.scaling.factor": 4.0}, extra)
    for bad in ([1, 1, 0, 1], [1, 1, np.nan, 1], [1, 1, 1]):
        raw = np.array(bad, np.float32)
        with pytest.raises(ModelFileError, match=r"rope_freqs\.weight"):
            parse_gguf(tmp_path, None, [("rope_freqs.weight", "F32", (len(bad),), raw.tobytes())])


GGUF_REFUSED: list[tuple[str, Any]] = [
    ("general.architecture", "gemma3"),
    ("llama.attention.sliding_window", 64),
    ("llama.expert_count", 8),
    ("llama.logit_scale", 0.5),
    ("llama.attn_logit_softcapping", 50.0),
    ("llama.final_logit_softcapping", 30.0),
    ("llama.rope.scaling.type", "yarn"),
    ("llama.rope.scaling.attn_factor", 1.5),
    ("llama.rope.dimension_count", 4),
    ("llama.rope.dimension_sections", np.array([1, 2], np.int32)),
    ("llama.attention.scale", 0.1),
    ("llama.attention.causal", False),
    ("llama.attention.value_length", 16),
    ("llama.something_new", 3),
]


@pytest.mark.parametrize(("key", "value"), GGUF_REFUSED)
def test_gguf_keys_that_would_change_the_result_are_refused_by_name(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=key.replace(".", r"\.")):
        parse_gguf(tmp_path, {key: value})


def test_gguf_keys_that_say_nothing_are_let_through(tmp_path: Path) -> None:
    neutral = {
        "llama.expert_count": 0,
        "llama.expert_used_count": 0,
        "llama.logit_scale": 1.0,
        "llama.attention.sliding_window": 128,
        "llama.vocab_size": 40,
        "llama.attention.key_length": 8,
        "llama.rope.scaling.attn_factor": 1.0,
    }
    assert parse_gguf(tmp_path, neutral) == parse_gguf(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("general.architecture", None),
        ("general.architecture", 3),
        ("llama.block_count", None),
        ("llama.block_count", 1 << 20),
        ("llama.embedding_length", 0),
        ("llama.attention.head_count", np.array([4, 4], np.int32)),
        ("llama.attention.head_count_kv", 3),
        ("llama.attention.layer_norm_rms_epsilon", float("nan")),
        ("llama.attention.layer_norm_rms_epsilon", None),
        ("llama.rope.freq_base", 0.0),
        ("llama.rope.scaling.factor", -0.5),
        ("llama.attention.causal", 1),
        ("llama.attention.key_length", 7),
    ],
)
def test_gguf_values_out_of_bounds_are_a_model_file_error(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(ModelFileError):
        parse_gguf(tmp_path, {key: value})


@pytest.mark.parametrize("name", ["blk.0.attn_q_norm.weight", "blk.0.ffn_gate_exps.weight", "blk.7.attn_q.weight"])
def test_a_gguf_tensor_nobody_reads_is_refused_by_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(GGUF_METADATA, [*gguf_tensors(hf_weights()), (name, "F32", (8,), bytes(32))]))
    with pytest.raises(UnsupportedModelError, match=r"attn_q|self_attn\.q_|ffn_gate_exps"):
        load_checkpoint(path)


def test_a_lone_gguf_bias_is_not_ignored(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    bias = ("blk.0.attn_q.bias", "F32", (32,), bytes(128))
    path.write_bytes(gguf_bytes(GGUF_METADATA, [*gguf_tensors(hf_weights()), bias]))
    with pytest.raises(ModelFileError, match=r"lacks tensor 'model\.layers\.0\.self_attn\.k_proj\.bias'"):
        load_checkpoint(path)
