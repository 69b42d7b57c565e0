from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from octavo.errors import InvalidParameterError
from octavo.executor.interface import Executor
from octavo.executor.reference import ReferenceExecutor
from octavo.models.config import ModelConfig
from octavo.models.registry import build_program
from octavo.program.graph import Graph
from octavo.program.program import Program, Rope
from tests.support.batches import batch_of, prompt_batch, sampling_rows

CONFIG = ModelConfig(
    architecture="qwen3",
    vocab_size=40,
    hidden_size=24,
    intermediate_size=20,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    norm_eps=1e-6,
    rope=Rope(theta=100.0, rotary_dim=8),
    context=256,
    tie_embeddings=True,
)
PROGRAM = build_program(CONFIG)
RNG = np.random.default_rng(0)
WEIGHTS = {name: RNG.standard_normal(shape) * 0.4 for name, shape in PROGRAM.weight_shapes().items()}
TOKENS = RNG.integers(0, 40, 45).tolist()


def executor(program: Program = PROGRAM, kv_dtype: str = "f64") -> ReferenceExecutor:
    return ReferenceExecutor(program, WEIGHTS, num_blocks=12, kv_dtype=kv_dtype)


def close(a: np.ndarray, b: np.ndarray) -> None:
    np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-11)


def test_it_is_an_executor() -> None:
    reference: Executor = executor()
    assert (reference.num_blocks, reference.vocab_size) == (12, 40)


def test_chunks_in_scattered_blocks_give_the_logits_of_one_pass() -> None:
    whole = executor().forward(TOKENS)
    chunked, table = executor(), [7, 2, 9]
    pieces = [chunked.logits(batch_of([(TOKENS[a:b], a, table)])) for a, b in ((0, 1), (1, 17), (17, 40), (40, 45))]
    close(np.concatenate(pieces), whole)


def test_a_sequence_in_a_batch_has_the_logits_it_has_alone() -> None:
    other = TOKENS[::-1]
    both = executor().logits(batch_of([(TOKENS, 0, [3, 1, 5]), (other, 0, [0, 8, 2])]))
    close(both, np.concatenate([executor().forward(TOKENS), executor().forward(other)]))


def test_only_the_wanted_rows_have_logits() -> None:
    logits = executor().logits(batch_of([(TOKENS, 0, [0, 1, 2])], logit_rows=[4, 44]))
    close(logits, executor().forward(TOKENS)[[4, 44]])


def test_a_copied_prefix_of_a_block_continues_like_the_original() -> None:
    reference = executor()
    reference.logits(batch_of([(TOKENS[:14], 0, [0])]))
    other = [*TOKENS[:9], 1, 2, 3]
    copied = reference.logits(batch_of([(other[9:], 9, [5])], block_ops=[(5, 0, 9)]))
    close(copied, executor().forward(other)[9:])


def test_the_next_owner_of_a_block_full_of_nan_is_not_affected() -> None:
    reference = executor()
    size = len(reference.export_block(0))
    reference.import_block(0, np.full(size // 8, np.nan).tobytes())
    close(reference.logits(prompt_batch(TOKENS[:5])), executor().forward(TOKENS[:5]))


def test_an_exported_block_continues_in_another_executor() -> None:
    first, second = executor(), executor()
    first.logits(batch_of([(TOKENS[:16], 0, [3])]))
    second.import_block(6, first.export_block(3))
    close(second.logits(batch_of([(TOKENS[16:20], 16, [6, 1])])), executor().forward(TOKENS[:20])[16:])
    with pytest.raises(InvalidParameterError, match="a block has"):
        second.import_block(6, b"short")


def test_kv_is_rounded_to_its_dtype() -> None:
    exact = executor().forward(TOKENS)
    errors = [np.abs(executor(kv_dtype=kv).forward(TOKENS) - exact).max() for kv in ("f32", "f16", "int8")]
    assert 0 < errors[0] < 1e-5 < errors[1] < errors[2] < 1


def test_a_window_sees_only_its_last_tokens_and_a_soft_cap_bounds_scores() -> None:
    def program(window: int = 0, soft_cap: float = 0.0) -> Program:
        g = Graph()
        x = g.embed("model.embed_tokens", 40, 24)
        q = g.linear(x, "model.layers.0.self_attn.q_proj", 32)
        k = g.linear(x, "model.layers.0.self_attn.k_proj", 16)
        v = g.linear(x, "model.layers.0.self_attn.v_proj", 16)
        a = g.attention(q, k, v, layer=0, heads=4, kv_heads=2, window=window, soft_cap=soft_cap)
        a = g.linear(a, "model.layers.0.self_attn.o_proj", 24)
        return g.output(g.linear(g.select(a), "model.embed_tokens", 40))

    plain, windowed = executor(program()).forward(TOKENS), executor(program(window=3)).forward(TOKENS)
    close(windowed[:3], plain[:3])
    close(windowed[-1], executor(program()).forward(TOKENS[-3:])[-1])  # without rope only the visible tokens matter
    uniform = executor(program(soft_cap=1e-9)).forward(TOKENS)  # every score is squeezed to 0: a plain mean of values
    w = WEIGHTS
    values = w["model.embed_tokens.weight"][TOKENS] @ w["model.layers.0.self_attn.v_proj.weight"].T
    mean = np.repeat(values.mean(axis=0).reshape(2, 8), 2, axis=0).reshape(-1)
    expected = w["model.embed_tokens.weight"] @ (w["model.layers.0.self_attn.o_proj.weight"] @ mean)
    np.testing.assert_allclose(uniform[-1], expected, rtol=1e-6, atol=1e-7)


def test_a_nan_flags_the_rows_that_see_it_and_no_other_sequence() -> None:
    weights = dict(WEIGHTS)
    table = WEIGHTS["model.embed_tokens.weight"].copy()
    table[7] = np.nan
    weights["model.embed_tokens.weight"] = table
    untied = build_program(replace(CONFIG, tie_embeddings=False))
    weights["lm_head.weight"] = WEIGHTS["model.embed_tokens.weight"]
    reference = ReferenceExecutor(untied, weights, num_blocks=4)
    result = reference.step(batch_of([([1, 7, 2], 0, [0]), ([1, 3, 2], 0, [1])]), sampling_rows(6))
    assert list(result.finite[1:]) == [0, 0, 1, 1, 1]  # row 0 shares a block with the NaN: 0 · NaN may reach it
    assert list(result.ok[1:]) == [0, 0, 1, 1, 1]
    assert result.ids[1] == -1
    assert result.ids[3] >= 0


def test_targets_report_their_logprob_and_rank_and_greedy_takes_the_best() -> None:
    logits = executor().forward(TOKENS[:4])
    greedy = executor().step(prompt_batch(TOKENS[:4]), sampling_rows(4, num_logprobs=3))
    assert greedy.ids == logits.argmax(axis=1).tolist()
    assert greedy.ranks == [1, 1, 1, 1]
    assert [top[0] for top in greedy.top_ids] == greedy.ids
    assert [top[0] for top in greedy.top_logprobs] == greedy.logprobs
    total = np.zeros(4)
    for target in range(40):
        result = executor().step(prompt_batch(TOKENS[:4]), sampling_rows(4, targets=[target] * 4))
        assert result.ids == [target] * 4
        assert result.ranks == (1 + (logits > logits[:, [target]]).sum(axis=1)).tolist()
        total += np.exp(result.logprobs)
    np.testing.assert_allclose(total, 1, rtol=1e-6)


def test_sampling_it_cannot_do_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match="temperature"):
        executor().step(prompt_batch(TOKENS[:2]), sampling_rows(2, temperature=0.7))


def test_a_weight_of_the_wrong_shape_is_refused_by_name() -> None:
    with pytest.raises(InvalidParameterError, match=r"model\.norm\.weight"):
        ReferenceExecutor(PROGRAM, {**WEIGHTS, "model.norm.weight": np.zeros(5)}, num_blocks=1)
