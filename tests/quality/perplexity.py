"""Perplexity of the default model on tests/quality/text.txt: what quantised arithmetic and requantising cost.

    python -m tests.quality.perplexity [--requantise]

The baseline is float arithmetic (weights="f32", f32 KV) on the same dequantised weights, itself checked against
transformers (the number kept by tests/parity/make_golden.py). Fails when a bound of docs/quality.md is exceeded.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from octavo.executor.interface import Executor
from octavo.executor.native import NativeExecutor
from octavo.limits import BLOCK_TOKENS
from octavo.models.registry import build_program
from octavo.program.program import Program
from octavo.weights.checkpoint import load_checkpoint
from octavo.weights.dequantise import decode
from octavo.weights.sources import resolve_model
from octavo.weights.tensor import Tensor
from tests.quality.encode import ENCODERS
from tests.support.batches import batch_of, sampling_rows

GOLDEN = Path(__file__).parent.parent / "parity" / "golden" / "smollm2.npz"
ROWS = 250  # of a step
BASELINE_BOUND, QUANTISED_BOUND, INT8_KV_BOUND, REQUANTISED_BOUND = 0.1, 1.0, 0.3, 0.5  # percent


def perplexity(executor: Executor, token_ids: np.ndarray) -> float:
    """exp of the mean negative log-probability of each token after the first, as one sequence, chunk by chunk."""
    table = range(-(-len(token_ids) // BLOCK_TOKENS))
    total = 0.0
    for start in range(0, len(token_ids) - 1, ROWS):
        targets = token_ids[start + 1 : start + 1 + ROWS]
        tokens = token_ids[start : start + len(targets)]
        result = executor.step(batch_of([(tokens, start, table)]), sampling_rows(len(tokens), targets=targets))
        if 0 in result.ok:
            raise ValueError(f"a row from position {start} on is not finite")
        total -= sum(result.logprobs)
    return math.exp(total / (len(token_ids) - 1))


def native_perplexity(
    program: Program, tensors: Mapping[str, Tensor], token_ids: np.ndarray, weights: str = "auto", kv_dtype: str = "f16"
) -> float:
    blocks = -(-len(token_ids) // BLOCK_TOKENS)
    executor = NativeExecutor(program, tensors, weights=weights, kv_dtype=kv_dtype, num_blocks=blocks)
    try:
        return perplexity(executor, token_ids)
    finally:
        executor.close()


def golden() -> tuple[np.ndarray, float]:
    """(the text's first 4,000 token ids, transformers' perplexity of them)."""
    with np.load(GOLDEN) as file:
        return file["text_ids"], float(file["perplexity"])


def reencoded(tensor: Tensor, encoding: str) -> tuple[Tensor, Tensor]:
    """A matrix encoded anew: (its values, its values after the packing as q8), both float32 tensors.

    Rows are padded with zeros to whole blocks and cut again: a group of 32 never mixes both.
    """
    from octavo import _native

    rows, columns = tensor.shape
    block, encode = ENCODERS[encoding]
    padded = -(-columns // block) * block
    values = np.zeros((rows, padded), dtype=np.float32)
    values[:, :columns] = decode(tensor.encoding, tensor.data).reshape(rows, columns)
    data = encode(values)
    decoded = decode(encoding, data).reshape(rows, padded)[:, :columns]
    packed = _native.pack([(data.reshape(-1), encoding, rows, padded, None)], "q8").unpack()[:, :columns]

    def as_f32(array: np.ndarray) -> Tensor:
        return replace(tensor, encoding="f32", data=np.ascontiguousarray(array).reshape(-1).view(np.uint8))

    return as_f32(decoded), as_f32(packed)


def percent(value: float, baseline: float) -> float:
    return 100 * (value / baseline - 1)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Perplexity of smollm2, float and quantised.")
    parser.add_argument("--requantise", action="store_true", help="also what Q5_1, Q5_K and Q6_K lose as q8 (minutes)")
    options = parser.parse_args(arguments)
    token_ids, expected = golden()
    checkpoint = load_checkpoint(resolve_model("smollm2"))
    program, tensors = build_program(checkpoint.config), checkpoint.tensors
    failed = False

    def report(what: str, value: float, against: float, bound: float) -> None:
        nonlocal failed
        loss = percent(value, against)
        # A gain is no loss, but the baseline must agree both ways.
        bad = abs(loss) > bound if bound == BASELINE_BOUND else not loss <= bound
        failed |= bad
        print(f"{what:<48} {value:9.4f}  {loss:+.3f} %  (bound {bound} %){'  FAILED' if bad else ''}", flush=True)

    print(f"{len(token_ids)} tokens\n{'transformers, float32':<48} {expected:9.4f}", flush=True)
    baseline = native_perplexity(program, tensors, token_ids, "f32", "f32")
    report("float weights and KV, against transformers", baseline, expected, BASELINE_BOUND)
    served = native_perplexity(program, tensors, token_ids)
    report("as served (q4/q8, fp16 KV), against float", served, baseline, QUANTISED_BOUND)
    int8 = native_perplexity(program, tensors, token_ids, kv_dtype="int8")
    report("with int8 KV, against fp16 KV", int8, served, INT8_KV_BOUND)
    int8_alone = native_perplexity(program, tensors, token_ids, "f32", "int8")
    report("float weights, int8 KV, against float", int8_alone, baseline, INT8_KV_BOUND)
    for encoding in ENCODERS if options.requantise else ():
        original, requantised = dict(tensors), dict(tensors)
        for name, tensor in tensors.items():
            if len(tensor.shape) == 2:
                original[name], requantised[name] = reencoded(tensor, encoding)
        before = native_perplexity(program, original, token_ids, "f32", "f32")
        print(f"{f'{encoding}, float arithmetic':<48} {before:9.4f}", flush=True)
        after = native_perplexity(program, requantised, token_ids, "f32", "f32")
        report(f"{encoding} packed as q8, float arithmetic", after, before, REQUANTISED_BOUND)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
