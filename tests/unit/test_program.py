from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from octavo.errors import UnsupportedModelError
from octavo.models.config import ModelConfig
from octavo.models.registry import build_program
from octavo.program.graph import Graph, Value
from octavo.program.program import Rope
from octavo.program.rope import scale_frequencies

CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=50,
    hidden_size=24,
    intermediate_size=40,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    norm_eps=1e-5,
    rope=Rope(theta=10000.0, rotary_dim=8),
    context=128,
    tie_embeddings=False,
)


def test_llama_page_reads_the_weights_of_the_checkpoint() -> None:
    program = build_program(CONFIG)
    shapes = program.weight_shapes()
    assert shapes["model.embed_tokens.weight"] == (50, 24)
    assert shapes["model.layers.1.self_attn.q_proj.weight"] == (32, 24)
    assert shapes["model.layers.1.self_attn.k_proj.weight"] == (16, 24)
    assert shapes["model.layers.0.self_attn.o_proj.weight"] == (24, 32)
    assert shapes["model.layers.0.mlp.down_proj.weight"] == (24, 40)
    assert shapes["model.norm.weight"] == (24,)
    assert shapes["lm_head.weight"] == (50, 24)
    assert len(shapes) == 3 + 2 * 9
    assert (program.layers, program.kv_heads, program.head_dim, program.vocab_size) == (2, 2, 8, 50)


def test_tied_embeddings_need_no_lm_head() -> None:
    shapes = build_program(replace(CONFIG, tie_embeddings=True)).weight_shapes()
    assert "lm_head.weight" not in shapes


def test_biases_are_where_each_architecture_has_them() -> None:
    def biases(**changes: object) -> set[str]:
        shapes = build_program(replace(CONFIG, **changes)).weight_shapes()  # type: ignore[arg-type]
        return {name.split(".")[-2] for name in shapes if name.endswith(".bias")}

    assert biases() == set()
    assert biases(architecture="qwen2") == {"q_proj", "k_proj", "v_proj"}
    assert biases(architecture="qwen3") == set()
    assert biases(attention_bias=True, output_bias=True) == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert biases(mlp_bias=True) == {"gate_proj", "up_proj", "down_proj"}


def test_qwen3_norms_each_head_before_rope() -> None:
    program = build_program(replace(CONFIG, architecture="qwen3"))
    assert program.weight_shapes()["model.layers.0.self_attn.q_norm.weight"] == (8,)
    layer = [op.kind for op in program.ops[1:10]]
    assert layer == ["rms_norm", *["linear"] * 3, "rms_norm", "rms_norm", "rope", "rope", "attention"]


def test_every_value_is_computed_before_it_is_used() -> None:
    for architecture in ("llama", "qwen2", "qwen3"):
        program = build_program(replace(CONFIG, architecture=architecture))
        known = {0}
        for op in program.ops:
            assert known.issuperset(op.inputs)
            assert op.output not in known
            known.add(op.output)
        assert known == set(range(len(program.widths)))
        assert program.output == program.ops[-1].output


def test_unknown_architecture_names_the_known_ones() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'mamba'.*llama, qwen2, qwen3"):
        build_program(replace(CONFIG, architecture="mamba"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_heads": 3}, "kv_heads=3 does not divide 4"),
        ({"kv_heads": 0}, "must be positive"),
        ({"layers": 0}, "at least one attention layer"),
        ({"vocab_size": 0}, "vocab_size=0 must be positive"),
        ({"norm_eps": 0.0}, "eps=0.0 must be positive"),
        ({"rope": Rope(theta=1e4, rotary_dim=10)}, "rotary_dim=10"),
        ({"rope": Rope(theta=1e4, rotary_dim=8, scaling="factors", factors=(1.0,))}, "1 factors for 4 frequencies"),
    ],
)
def test_inconsistent_config_is_refused_with_its_numbers(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        build_program(replace(CONFIG, **changes))  # type: ignore[arg-type]


def _add_of_two_widths(g: Graph, x: Value) -> None:
    g.add(x, g.linear(x, "w", 7))


def _attention_with_wrong_kv(g: Graph, x: Value) -> None:
    g.attention(x, g.linear(x, "k", 5), x, layer=0, heads=2, kv_heads=2)


def _layers_out_of_order(g: Graph, x: Value) -> None:
    g.attention(x, x, x, layer=1, heads=2, kv_heads=2)


def _selected_and_all_rows(g: Graph, x: Value) -> None:
    g.add(x, g.select(x))


def _rope_after_select(g: Graph, x: Value) -> None:
    g.rope(g.select(x), 2, Rope(1e4, 4))


def _logits_without_select(g: Graph, x: Value) -> None:
    g.output(g.linear(g.attention(x, x, x, layer=0, heads=2, kv_heads=2), "head", 10))


def _logits_of_wrong_width(g: Graph, x: Value) -> None:
    g.output(g.linear(g.select(g.attention(x, x, x, layer=0, heads=2, kv_heads=2)), "head", 11))


def _one_weight_in_two_shapes(g: Graph, x: Value) -> None:
    x = g.attention(x, x, x, layer=0, heads=2, kv_heads=2)
    g.linear(x, "head", 9)
    g.output(g.linear(g.select(x), "head", 10))


@pytest.mark.parametrize(
    ("page", "message"),
    [
        (_add_of_two_widths, "add: widths 8 and 7 differ"),
        (_attention_with_wrong_kv, "attention of layer 0: k and v have widths 5 and 8"),
        (_layers_out_of_order, "layer 0 is next"),
        (_selected_and_all_rows, "add: one input has all rows"),
        (_rope_after_select, "rope: needs all rows"),
        (_logits_without_select, "after select"),
        (_logits_of_wrong_width, "width 11, the vocabulary 10"),
        (_one_weight_in_two_shapes, r"head\.weight: used with shapes \(9, 8\) and \(10, 8\)"),
    ],
)
def test_wrong_page_fails_while_tracing(page: Callable[[Graph, Value], None], message: str) -> None:
    g = Graph()
    x = g.embed("embed", 10, 8)
    with pytest.raises(UnsupportedModelError, match=message):
        page(g, x)


def test_llama3_scaling_keeps_short_waves_divides_long_ones_and_blends_between() -> None:
    rope = Rope(5e5, 128, "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)
    turns = [5.0, 4.0, 2.5, 1.0, 0.5]  # within the original context
    frequencies = [t * 2 * math.pi / 8192 for t in turns]
    scaled = scale_frequencies(frequencies, rope)
    ratios = [s / f for s, f in zip(scaled, frequencies)]
    assert ratios == pytest.approx([1, 1, 0.5 + 0.5 / 8, 1 / 8, 1 / 8], rel=1e-12)


def test_linear_and_factors_scaling_divide() -> None:
    assert scale_frequencies([1.0, 0.5], Rope(1e4, 4, "linear", factor=4.0)) == [0.25, 0.125]
    assert scale_frequencies([1.0, 0.5], Rope(1e4, 4, "factors", factors=(2.0, 8.0))) == [0.5, 0.0625]
    assert scale_frequencies([1.0, 0.5], Rope(1e4, 4)) == [1.0, 0.5]


def test_unknown_rope_scaling_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="'yarn'"):
        scale_frequencies([1.0], Rope(1e4, 2, "yarn"))
