"""The short form of the exactness suite; `make exact` runs the long one."""

from __future__ import annotations

import pytest

from . import scenarios
from .cases import constrained_cases, model_cases, sharing_cases, text_ids, tiny_cases
from .faults import FAULTS, suite_fails_on
from .machine import Case, Model, Trace
from .models import as_bf16, smollm2, tiny

TINY = [
    ("llama", "f32", "f16"),
    ("llama", "f32", "f32"),
    ("llama+bf16", "f32", "f16"),
    ("llama", "q8", "f16"),
    ("mistral", "q4", "f16"),
    ("qwen2", "f32", "f16"),
    ("qwen3", "q8", "f32"),
    ("llama", "q4", "int8"),
]

World = tuple[Model, list[Case], dict[str, Trace]]


@pytest.fixture(scope="module")
def real() -> World:
    model = smollm2()
    cases = model_cases(model.tokenizer, 6, short_form=True)
    return model, cases, scenarios.reference(model, cases)


@pytest.fixture(scope="module", params=TINY, ids="-".join)
def small(request: pytest.FixtureRequest) -> World:
    name, weights, kv_dtype = request.param
    model = tiny(name.removesuffix("+bf16"), weights=weights, kv_dtype=kv_dtype)
    if name.endswith("+bf16"):
        model = as_bf16(model)
    cases = tiny_cases(model.checkpoint.config.vocab_size, 8)
    return model, cases, scenarios.reference(model, cases)


def test_tiny_model_gives_the_same_bits_whatever_happens(small: World) -> None:
    model, cases, expected = small
    scenarios.in_random_batches(model, cases, expected, seeds=(0, 1))
    for size in (1, 7, 16, 17, 64):
        scenarios.with_chunks(model, cases, expected, size)
    scenarios.with_prefix_hits(model, cases, expected, (0, 1, 15, 16, 17, None))
    scenarios.preempted_at_every_step(model, cases, expected, flush=False)
    scenarios.preempted_at_every_step(model, cases, expected, flush=True)
    scenarios.squeezed_by_a_tiny_pool(model, cases, 13)
    for threads in (1, 2, 4):
        scenarios.with_options(model, cases, expected, threads=threads)
    scenarios.with_options(model, cases, expected, fusion=False)
    for name in scenarios.other_kernels():
        scenarios.with_options(model, cases, expected, kernels=name)
    ids = [(7919 * (i + 3) + i * i) % (model.checkpoint.config.vocab_size - 4) + 2 for i in range(500)]
    for threads in (1, 2):
        scenarios.sharing_a_prefix(model, sharing_cases(ids, 80, 12, 8), 80, threads=threads)
    scenarios.cut_at_every_token(model, cases, expected)
    scenarios.cancelled_neighbours(model, cases, expected)
    scenarios.on_blocks_full_of_nan(model, cases, expected)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_output_under_a_grammar_has_the_same_bits_whatever_happens(name: str) -> None:
    model = tiny(name)
    cases = constrained_cases([case.prompt for case in tiny_cases(model.checkpoint.config.vocab_size, 8)[2:6]])
    expected = scenarios.reference(model, cases)
    scenarios.with_jump_forward_off(model, cases, expected)
    scenarios.in_random_batches(model, cases, expected, seeds=(0, 1))
    for size in (1, 7, 16):
        scenarios.with_chunks(model, cases, expected, size)
    scenarios.with_prefix_hits(model, cases, expected, (0, 1, 15, 16, None))
    scenarios.preempted_at_every_step(model, cases, expected, flush=False)
    scenarios.preempted_at_every_step(model, cases, expected, flush=True)
    scenarios.with_options(model, cases, expected, threads=2)
    scenarios.cut_at_every_token(model, cases, expected)
    scenarios.cancelled_neighbours(model, cases, expected)


@pytest.mark.model
class TestRealModel:
    def test_in_random_batches(self, real: World) -> None:
        scenarios.in_random_batches(*real, seeds=(0,))

    @pytest.mark.parametrize("size", [7, 17])
    def test_in_chunks(self, real: World, size: int) -> None:
        scenarios.with_chunks(*real, size)

    def test_after_prefix_hits(self, real: World) -> None:
        model, cases, expected = real
        scenarios.with_prefix_hits(model, [c for c in cases if len(c.prompt) < 1000], expected, (15, 16, 17, None))

    @pytest.mark.parametrize("flush", [False, True], ids=["kept", "flushed"])
    def test_preempted_at_every_step(self, real: World, flush: bool) -> None:
        model, cases, expected = real
        scenarios.preempted_at_every_step(model, [c for c in cases if len(c.prompt) < 1000], expected, flush=flush)

    def test_on_other_threads(self, real: World) -> None:
        scenarios.with_options(*real, threads=1)

    def test_without_fusion(self, real: World) -> None:
        scenarios.with_options(*real, fusion=False)

    def test_sharing_a_prefix(self, real: World) -> None:
        model = real[0]
        scenarios.sharing_a_prefix(model, sharing_cases(text_ids(model.tokenizer), 1040, 7, 6), 1040)

    @pytest.mark.parametrize("name", scenarios.other_kernels())
    def test_on_other_kernels(self, real: World, name: str) -> None:
        model, cases, expected = real
        few = [case for case in cases if name != "scalar" or len(case.prompt) < 60]
        scenarios.with_options(model, few, expected, kernels=name)

    def test_continued_after_a_cut(self, real: World) -> None:
        model, cases, expected = real
        scenarios.cut_at_every_token(model, [c for c in cases if len(c.prompt) < 1000], expected)

    def test_under_a_grammar(self, real: World) -> None:
        model, cases, _ = real
        constrained = constrained_cases([cases[0].prompt])
        expected = scenarios.reference(model, constrained)
        scenarios.with_jump_forward_off(model, constrained, expected)
        scenarios.in_random_batches(model, constrained, expected, seeds=(3,))
        scenarios.cut_at_every_token(model, constrained[1:2], expected)

    def test_in_a_new_process(self, real: World) -> None:
        scenarios.in_a_new_process(["--print", "--short", "--tokens", "6"], real[2])

    @pytest.mark.parametrize("fault", FAULTS)
    def test_the_suite_fails_on_a_broken_variant(self, fault: str) -> None:
        suite_fails_on(fault)
