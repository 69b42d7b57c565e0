"""Lowering: what fusion folds, and that buffers are never shared by values alive at the same time."""

from __future__ import annotations

import pytest

from octavo.executor.lowering import Lowered, assign_buffers, lower
from octavo.models.config import ModelConfig
from octavo.models.registry import build_program
from octavo.program.program import Program, Rope


def program_for(architecture: str, *, tied: bool = True, intermediate: int = 96) -> Program:
    return build_program(
        ModelConfig(
            architecture=architecture, vocab_size=96, hidden_size=64, intermediate_size=intermediate, layers=2, heads=4,
            kv_heads=2, head_dim=16, norm_eps=1e-5, rope=Rope(10000.0, 16), context=128, tie_embeddings=tied,
            attention_bias=architecture == "qwen2",
        )
    )  # fmt: skip


def formats_of(program: Program, format: str) -> dict[str, str]:
    return {op.weights[0]: format for op in program.ops if op.kind in ("embed", "linear")}


def kinds(lowered: Lowered) -> list[str]:
    return [instruction.kind for instruction in lowered.instructions]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("format", ["q8", "f32"])
@pytest.mark.parametrize("fusion", [True, False])
def test_no_live_value_shares_its_buffer(architecture: str, format: str, fusion: bool) -> None:
    program = program_for(architecture)
    lowered = lower(program, formats_of(program, format), fusion=fusion)
    where, buffers = assign_buffers(lowered)
    holds: dict[int, int] = {}  # buffer → the value written to it last
    for instruction in lowered.instructions:
        for value in instruction.reads:
            assert holds[where[value]] == value, f"{instruction.kind} reads value {value}, which was overwritten"
        sharing = {where[value] for value in instruction.writes} & {where[value] for value in instruction.reads}
        assert sharing <= {where[value] for value in instruction.in_place}
        assert len({where[value] for value in instruction.writes}) == len(instruction.writes)
        for value in instruction.writes:
            assert buffers[where[value]] == (lowered.widths[value], value in lowered.quantised)
            holds[where[value]] = value
    assert holds[where[lowered.output]] == lowered.output


def test_without_fusion_every_operation_is_an_instruction() -> None:
    program = program_for("llama")
    lowered = kinds(lower(program, formats_of(program, "f32"), fusion=False))
    expected = [op.kind for op in program.ops] + ["kv_store"] * program.layers
    assert sorted(lowered) == sorted(expected)


def test_fusion_folds_what_it_says() -> None:
    program = program_for("llama")
    lowered = lower(program, formats_of(program, "q4"), fusion=True)
    per_layer = [
        "rms_norm",
        "linear",
        "rope_store",
        "attention",
        "quantise",
        "linear",
        "rms_norm",
        "linear",
        "quantise",
        "linear",
    ]
    assert kinds(lowered) == ["embed", *per_layer * 2, "select", "rms_norm", "linear"]
    linears = [instruction.args for instruction in lowered.instructions if instruction.kind == "linear"]
    assert [(args["epilogue"], len(args["parts"])) for args in linears[:4]] == [
        ("store", 3),
        ("add", 1),
        ("silu_mul", 1),
        ("add", 1),
    ]
    assert linears[2]["parts"][0][0].interleave


def test_gate_and_up_of_different_formats_are_not_interleaved() -> None:
    program = program_for("llama")
    formats = formats_of(program, "q4")
    formats["model.layers.0.mlp.up_proj.weight"] = "q8"
    lowered = lower(program, formats, fusion=True)
    assert kinds(lowered).count("silu_mul") == 1


def test_linears_with_different_kinds_of_input_are_not_grouped() -> None:
    program = program_for("llama")
    formats = formats_of(program, "q4")
    formats["model.layers.0.self_attn.v_proj.weight"] = "f32"
    lowered = lower(program, formats, fusion=True)
    first = [instruction for instruction in lowered.instructions if instruction.kind == "linear"][:2]
    assert [len(instruction.args["parts"]) for instruction in first] == [2, 1]
    assert first[1].reads[0] not in lowered.quantised


def test_gate_and_up_that_do_not_fill_panels_are_not_interleaved() -> None:
    program = program_for("llama", intermediate=84)
    assert kinds(lower(program, formats_of(program, "q8"), fusion=True)).count("silu_mul") == 2
