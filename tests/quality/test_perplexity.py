from __future__ import annotations

import numpy as np
import pytest

from octavo.models.registry import build_program
from octavo.weights.checkpoint import load_checkpoint
from octavo.weights.dequantise import decode
from octavo.weights.sources import resolve_model
from tests.quality.encode import ENCODERS
from tests.quality.perplexity import BASELINE_BOUND, INT8_KV_BOUND, QUANTISED_BOUND, golden, native_perplexity, percent


@pytest.mark.model
def test_quantised_arithmetic_costs_less_than_one_percent_of_perplexity_and_int8_kv_little_more() -> None:
    token_ids, transformers = golden()
    checkpoint = load_checkpoint(resolve_model("smollm2"))
    program = build_program(checkpoint.config)
    baseline = native_perplexity(program, checkpoint.tensors, token_ids, weights="f32", kv_dtype="f32")
    assert abs(percent(baseline, transformers)) <= BASELINE_BOUND
    served = native_perplexity(program, checkpoint.tensors, token_ids)
    assert abs(percent(served, baseline)) <= QUANTISED_BOUND
    with_int8 = native_perplexity(program, checkpoint.tensors, token_ids, kv_dtype="int8")
    assert 0 < abs(percent(with_int8, served)) <= INT8_KV_BOUND


@pytest.mark.parametrize(("encoding", "steps"), [("q5_1", 31), ("q5_k", 31), ("q6_k", 62)])
def test_encoders_of_the_quality_table_round_to_the_nearest_step(encoding: str, steps: int) -> None:
    block, encode = ENCODERS[encoding]
    values = np.random.default_rng(5).standard_normal((3, 2 * block)).astype(np.float32)
    values[1, :32] = 0
    values[2, 32:64] *= 0.01
    decoded = decode(encoding, encode(values)).reshape(values.shape)
    group = 16 if encoding == "q6_k" else 32
    spread = np.abs(values).reshape(-1, group).max(axis=1) * 2
    error = np.abs(decoded - values).reshape(-1, group).max(axis=1)
    largest = np.abs(values).max()
    assert (error <= 0.75 * spread / steps + 0.02 * largest).all()
    assert (decoded[1, :32] == 0).all()
