"""The same numbers as transformers, with f32 weights and f32 KV: each page, through safetensors and through GGUF.

The bound is 2e-5 of the logits' range. Golden files: make_golden.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from octavo.executor.native import NativeExecutor
from octavo.executor.reference import ReferenceExecutor
from octavo.models.registry import build_program
from octavo.weights.checkpoint import Checkpoint, load_checkpoint
from octavo.weights.dequantise import dequantise
from octavo.weights.sources import resolve_model
from tests.parity.tiny_models import MODELS
from tests.support.batches import prompt_batch, sampling_rows

GOLDEN = Path(__file__).parent / "golden"
BOUND = 2e-5


def error(logits: np.ndarray, golden: np.ndarray) -> float:
    """Largest difference, in parts of the golden logits' range."""
    return float(np.abs(logits - golden).max() / (golden.max() - golden.min()))


def reference_logits(checkpoint: Checkpoint, token_ids: np.ndarray) -> np.ndarray:
    program = build_program(checkpoint.config)
    weights = {name: dequantise(tensor) for name, tensor in checkpoint.tensors.items()}
    return ReferenceExecutor(program, weights, num_blocks=8).forward(token_ids.tolist())


def native_logits(checkpoint: Checkpoint, token_ids: np.ndarray) -> np.ndarray:
    program = build_program(checkpoint.config)
    executor = NativeExecutor(program, checkpoint.tensors, weights="f32", kv_dtype="f32", num_blocks=8, threads=2)
    try:
        return executor.logits(prompt_batch(token_ids.tolist()), sampling_rows(len(token_ids)))
    finally:
        executor.close()


@pytest.fixture(params=MODELS)
def folder(request: pytest.FixtureRequest) -> Path:
    return GOLDEN / request.param


@pytest.fixture(params=["safetensors", "gguf"])
def checkpoint(request: pytest.FixtureRequest, folder: Path) -> Checkpoint:
    return load_checkpoint(folder if request.param == "safetensors" else folder / "model.gguf")


@pytest.fixture
def golden(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """(token ids [64], transformers' logits [64, vocab])."""
    with np.load(folder / "golden.npz") as file:
        return file["token_ids"], file["logits"]


def test_reference_computes_the_logits_of_transformers(checkpoint: Checkpoint, golden: tuple[np.ndarray, ...]) -> None:
    token_ids, logits = golden
    assert len(token_ids) == 64
    assert error(reference_logits(checkpoint, token_ids), logits) <= BOUND


def test_native_computes_the_logits_of_reference_and_transformers(
    checkpoint: Checkpoint, golden: tuple[np.ndarray, ...]
) -> None:
    token_ids, logits = golden
    native = native_logits(checkpoint, token_ids)
    assert error(native, reference_logits(checkpoint, token_ids)) <= BOUND
    assert error(native, logits) <= BOUND


def test_both_files_of_a_model_hold_the_same_weights(folder: Path) -> None:
    a, b = load_checkpoint(folder), load_checkpoint(folder / "model.gguf")
    assert a.tensors.keys() == b.tensors.keys()
    for name, tensor in a.tensors.items():
        np.testing.assert_array_equal(dequantise(tensor), dequantise(b.tensors[name]), err_msg=name)


def test_a_checkpoint_holds_exactly_what_its_program_reads(checkpoint: Checkpoint) -> None:
    needed = build_program(checkpoint.config).weight_shapes()
    assert {name: tensor.shape for name, tensor in checkpoint.tensors.items()} == needed


@pytest.mark.model
def test_smollm2_has_the_logits_of_transformers_and_of_the_reference() -> None:
    checkpoint = load_checkpoint(resolve_model("smollm2"))
    with np.load(GOLDEN / "smollm2.npz") as file:
        golden = {name: file[name] for name in file.files}
    token_ids = golden["text_ids"][:64]
    span = float(golden["highest"].max() - golden["lowest"].min())
    native, reference = native_logits(checkpoint, token_ids), reference_logits(checkpoint, token_ids)
    assert np.abs(native - reference).max() <= BOUND * span
    for logits in (native, reference):
        assert np.abs(logits[:, golden["columns"]] - golden["logits"]).max() <= BOUND * span
        assert np.abs(logits.max(axis=1) - golden["highest"]).max() <= BOUND * span
        assert np.abs(logits.min(axis=1) - golden["lowest"]).max() <= BOUND * span
        np.testing.assert_array_equal(logits.argmax(axis=1), golden["best"])
