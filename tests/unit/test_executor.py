"""The native executor at its border, and the bits of a step under every option that must not change them."""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
import threading
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo import _native
from octavo.errors import EngineClosedError, InvalidParameterError
from octavo.executor.interface import Batch
from octavo.executor.native import KV_DTYPES, NativeExecutor, kv_block_bytes
from octavo.models.registry import build_program
from octavo.weights.checkpoint import Checkpoint, load_checkpoint

from ..support.batches import batch_of, no_edits, prompt_batch, sampling_rows

GOLDEN = Path(__file__).parent.parent / "parity" / "golden"
PROMPT = [(31 * i * i + 7 * i + 5) % 120 for i in range(70)]


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def checkpoint(request: pytest.FixtureRequest) -> Checkpoint:
    return load_checkpoint(GOLDEN / request.param)


def make(checkpoint: Checkpoint, **options: Any) -> NativeExecutor:
    options = {"num_blocks": 16, "weights": "q8", "threads": 2, **options}
    return NativeExecutor(build_program(checkpoint.config), checkpoint.tensors, **options)


def logits(executor: NativeExecutor) -> np.ndarray:
    return executor.logits(prompt_batch(PROMPT), sampling_rows(len(PROMPT)))


@pytest.mark.parametrize("weights", ["f32", "q8", "q4"])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_kernels_threads_and_fusion_give_equal_bits(checkpoint: Checkpoint, weights: str, kv_dtype: str) -> None:
    expected = logits(make(checkpoint, weights=weights, kv_dtype=kv_dtype, kernels="scalar", threads=1, fusion=False))
    assert np.isfinite(expected).all()
    assert np.abs(expected).max() > 0.1
    for kernels, threads, fusion in itertools.product(_native.kernel_names(), (1, 2, 4), (True, False)):
        if kernels.startswith("faulty"):
            continue
        got = logits(
            make(checkpoint, weights=weights, kv_dtype=kv_dtype, kernels=kernels, threads=threads, fusion=fusion)
        )
        assert got.tobytes() == expected.tobytes(), (kernels, threads, fusion)


@pytest.mark.parametrize("kv_dtype", ["f16", "int8"])
def test_decode_row_by_row_gives_the_bits_of_one_prefill(checkpoint: Checkpoint, kv_dtype: str) -> None:
    expected = logits(make(checkpoint, kv_dtype=kv_dtype))
    executor = make(checkpoint, kv_dtype=kv_dtype)
    for i, token in enumerate(PROMPT):
        row = executor.logits(batch_of([([token], i, range(i // 16 + 1))]), sampling_rows(1))
        assert row.tobytes() == expected[i].tobytes(), f"token {i}"


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_block_full_of_nan_does_not_reach_its_next_owner(checkpoint: Checkpoint, kv_dtype: str) -> None:
    expected = logits(make(checkpoint, kv_dtype=kv_dtype))
    executor = make(checkpoint, kv_dtype=kv_dtype)
    rubbish = b"\xff" * len(executor.export_block(0))  # NaN in every float format, so in the scales of int8 too
    for block in range(executor.num_blocks):
        executor.import_block(block, rubbish)
    assert logits(executor).tobytes() == expected.tobytes()

    unzeroed = dataclasses.replace(prompt_batch(PROMPT), block_ops=np.zeros((0, 3), dtype=np.int32))
    for block in range(executor.num_blocks):
        executor.import_block(block, rubbish)
    result = executor.step(unzeroed, sampling_rows(len(PROMPT)))
    assert 0 in result.finite, "without zeroing the NaN must be seen: else this test proves nothing"


def test_a_shared_prefix_gives_the_bits_of_copies(checkpoint: Checkpoint) -> None:
    def decode(executor: NativeExecutor, tables: list[list[int]]) -> bytes:
        executor.step(prompt_batch(PROMPT[:64]), sampling_rows(64))
        for block in (4, 5, 6, 7):
            executor.import_block(block, executor.export_block(block - 4))
        batch = batch_of([([token], 64, table) for token, table in zip((7, 8, 9), tables)])
        return executor.logits(batch, sampling_rows(3)).tobytes()

    shared = [[0, 1, 2, 3, 10], [0, 1, 2, 3, 11], [0, 1, 2, 3, 12]]
    copies = [[0, 1, 2, 3, 10], [4, 5, 6, 7, 11], [0, 5, 2, 7, 12]]
    expected = decode(make(checkpoint), copies)
    for cascade in (True, False):
        for threads in (1, 2, 4):
            assert decode(make(checkpoint, cascade=cascade, threads=threads), shared) == expected, (cascade, threads)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_copied_prefix_gives_the_bits_of_a_computed_one(checkpoint: Checkpoint, kv_dtype: str) -> None:
    expected = logits(make(checkpoint, kv_dtype=kv_dtype))
    executor = make(checkpoint, kv_dtype=kv_dtype)
    executor.step(prompt_batch(PROMPT[:37]), sampling_rows(37))
    tail = batch_of([(PROMPT[37:], 37, [0, 1, 9, 10, 11])], block_ops=[(9, 2, 5), (10, -1, 0), (11, -1, 0)])
    got = executor.logits(tail, sampling_rows(len(PROMPT) - 37))
    assert got.tobytes() == expected[37:].tobytes()


def test_an_exported_block_gives_the_same_bits_in_another_executor(checkpoint: Checkpoint) -> None:
    expected = logits(make(checkpoint))
    first, second = make(checkpoint), make(checkpoint)
    first.step(prompt_batch(PROMPT[:32]), sampling_rows(32))
    for source, target in ((0, 5), (1, 3)):
        second.import_block(target, first.export_block(source))
    rest = batch_of([(PROMPT[32:], 32, [5, 3, 0, 1, 2])], block_ops=[(0, -1, 0), (1, -1, 0), (2, -1, 0)])
    assert second.logits(rest, sampling_rows(len(PROMPT) - 32)).tobytes() == expected[32:].tobytes()


@pytest.mark.parametrize(("kv_dtype", "element_bytes"), [("f16", 2), ("f32", 4), ("int8", 1)])
def test_block_size_is_as_documented(checkpoint: Checkpoint, kv_dtype: str, element_bytes: int) -> None:
    executor = make(checkpoint, kv_dtype=kv_dtype)
    program = executor.program
    vectors = program.layers * 2 * program.kv_heads * 16
    scales = 4 * vectors if kv_dtype == "int8" else 0
    assert kv_block_bytes(program, kv_dtype) == vectors * program.head_dim * element_bytes + scales
    assert len(executor.export_block(0)) == kv_block_bytes(program, kv_dtype)
    with pytest.raises(ValueError, match="another size"):
        executor.import_block(0, b"short")
    with pytest.raises(IndexError):
        executor.export_block(16)


def test_more_logit_rows_than_are_held_at_once(checkpoint: Checkpoint) -> None:
    many = [(7 * i) % 120 for i in range(150)]
    executor = make(checkpoint)
    result = executor.step(prompt_batch(many), sampling_rows(150, targets=[*many[1:], 0]))
    assert 0 not in result.ok
    alone = make(checkpoint)
    for i in (0, 63, 64, 65, 128, 149):
        batch = batch_of([(many[: i + 1], 0, range(i // 16 + 1))], logit_rows=[i])
        assert alone.step(batch, sampling_rows(1, targets=[[*many[1:], 0][i]])).logprobs[0] == result.logprobs[i]


def I32(values: list[object]) -> np.ndarray:
    return np.array(values, np.int32)


BAD = {
    "a token id outside the vocabulary": {"token_ids": np.full(70, 100_000, dtype=np.int32)},
    "a negative token": {"token_ids": np.full(70, -1, dtype=np.int32)},
    "positions with a hole": {"positions": np.arange(70, dtype=np.int64) * 2},
    "a negative position": {"positions": np.arange(-1, 69, dtype=np.int64)},
    "a position beyond the table": {"positions": np.arange(16, 86, dtype=np.int64)},
    "a block table that is too short": {"block_tables": I32([0]), "block_offsets": I32([0, 1])},
    "an unknown block": {"block_tables": I32([0, 1, 2, 3, 16])},
    "sequence rows that miss some": {"sequence_rows": I32([0, 69])},
    "sequence rows that go back": {"sequence_rows": I32([0, 71, 70]), "block_offsets": I32([0, 5, 5])},
    "offsets beyond the tables": {"block_offsets": I32([0, 6])},
    "a logit row outside": {"logit_rows": I32([70])},
    "logit rows out of order": {"logit_rows": I32([3, 2])},
    "a block operation on an unknown block": {"block_ops": I32([[16, -1, 0]])},
    "a copy of too many tokens": {"block_ops": I32([[1, 0, 17]])},
    "a copy onto itself": {"block_ops": I32([[1, 1, 3]])},
    "one position too few": {"positions": np.arange(69, dtype=np.int64)},
    "ids of the wrong type": {"token_ids": np.zeros(70, dtype=np.int64)},
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_a_malformed_batch_is_refused_and_harms_nothing(what: str) -> None:
    checkpoint = load_checkpoint(GOLDEN / "llama")
    executor = make(checkpoint)
    expected = logits(executor)
    batch: Batch = dataclasses.replace(prompt_batch(PROMPT), **BAD[what])
    with pytest.raises((ValueError, TypeError)):
        executor.step(batch, sampling_rows(len(batch.logit_rows)))
    assert logits(executor).tobytes() == expected.tobytes()


def odd(array: np.ndarray) -> np.ndarray:
    """The same values at an address that is no multiple of the element's size."""
    view = np.frombuffer(bytearray(array.nbytes + 1), dtype=array.dtype, offset=1)
    view[:] = array.reshape(-1)
    return view.reshape(array.shape)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Batch)])
def test_an_array_of_the_batch_at_an_odd_address_is_refused(field: str) -> None:
    executor = make(load_checkpoint(GOLDEN / "llama"))
    batch = prompt_batch(PROMPT)
    with pytest.raises(ValueError, match="odd address"):
        executor.step(dataclasses.replace(batch, **{field: odd(getattr(batch, field))}), sampling_rows(len(PROMPT)))


def test_sampling_arrays_may_be_made_anew_at_each_reading_but_not_lie_at_odd_addresses() -> None:
    checkpoint = load_checkpoint(GOLDEN / "llama")
    edits = no_edits(len(PROMPT))
    rows = dataclasses.replace(sampling_rows(len(PROMPT)), edits=edits)
    batch = prompt_batch(PROMPT)

    class Fleeting:
        def __init__(self, fields: object) -> None:
            self._fields = fields

        def __getattr__(self, name: str) -> object:
            value = getattr(self._fields, name)
            return Fleeting(value) if name == "edits" else np.array(value) if name != "scalars" else bytearray(value)

    executor = make(checkpoint)
    expected = executor.logits(batch, rows)
    assert executor.logits(batch, Fleeting(rows)).tobytes() == expected.tobytes()  # type: ignore[arg-type]
    for name in ("position", "mask_index", "banned_offsets", "bias_offsets", "seen_offsets"):
        if name == "position":
            bad = dataclasses.replace(rows, position=odd(np.asarray(rows.position)))
        else:
            bad = dataclasses.replace(rows, edits=dataclasses.replace(edits, **{name: odd(getattr(edits, name))}))
        with pytest.raises(ValueError, match=f"{name}.*odd address"):
            executor.step(batch, bad)


def test_a_step_takes_plain_and_numpy_arrays_alike_and_gives_the_same_bits() -> None:
    executor = make(load_checkpoint(GOLDEN / "llama"))
    batch, rows = prompt_batch(PROMPT), sampling_rows(len(PROMPT), num_logprobs=3)
    plain = {
        field.name: array("q" if field.name == "positions" else "i", getattr(batch, field.name).tolist())
        for field in dataclasses.fields(Batch)
        if field.name != "block_ops"
    }
    expected = executor.step(batch, rows)
    assert executor.step(dataclasses.replace(batch, **plain), rows) == expected
    assert [len(top) for top in expected.top_ids] == [3] * len(PROMPT)


def test_a_plan_refuses_a_weight_that_is_none_and_a_bias_of_another_size() -> None:
    weight = _native.pack([(np.zeros(64, dtype=np.uint8), "f32", 4, 4, None)], "f32")
    plan = _native.Plan()
    with pytest.raises(ValueError, match="None"):
        plan.linear(0, -1, [(None, np.zeros(4, dtype=np.float32), 1)])
    with pytest.raises(TypeError):
        plan.embed(None, 0)
    for size in (0, 3, 5, 16):
        with pytest.raises(ValueError, match="bias"):
            plan.linear(0, -1, [(weight, np.zeros(size, dtype=np.float32), 1)])


def test_threads_that_share_an_executor_take_turns_and_close_waits_for_them() -> None:
    executor = make(load_checkpoint(GOLDEN / "llama"))
    expected = logits(executor).tobytes()
    wrong: list[object] = []
    started = threading.Barrier(4)

    def work(until_closed: bool) -> None:
        started.wait()
        try:
            for _ in range(1_000_000 if until_closed else 20):
                if logits(executor).tobytes() != expected:
                    wrong.append("other bits")
        except EngineClosedError:
            if not until_closed:
                wrong.append("closed")

    for until_closed in (False, True):
        threads = [threading.Thread(target=work, args=(until_closed,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        started.wait()
        if until_closed:
            executor.close()
        for thread in threads:
            thread.join()
    assert not wrong


REFUSE_THREADS = """
import resource, sys
from pathlib import Path
from octavo.executor.native import NativeExecutor
from octavo.models.registry import build_program
from octavo.weights.checkpoint import load_checkpoint
checkpoint = load_checkpoint(Path(sys.argv[1]))
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (100 << 20), -1))  # a few stacks fit, 256 do not
try:
    NativeExecutor(build_program(checkpoint.config), checkpoint.tensors, num_blocks=4, weights="q8", threads=256)
except ValueError as error:
    print(error)
"""


def test_threads_that_the_system_refuses_are_an_error_not_an_abort() -> None:
    command = [sys.executable, "-c", REFUSE_THREADS, str(GOLDEN / "llama")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, "256 threads" in done.stdout) == (0, True), done.stderr


def test_options_out_of_range_are_refused_by_name() -> None:
    checkpoint = load_checkpoint(GOLDEN / "llama")
    for field, value in {"kv_dtype": "f8", "threads": 0, "kernels": "sse9", "max_rows": 0, "weights": "q3"}.items():
        with pytest.raises(InvalidParameterError, match=field):
            make(checkpoint, **{field: value})


def test_use_after_close_and_after_fork_raises() -> None:
    executor = make(load_checkpoint(GOLDEN / "llama"))
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            logits(executor)
            os.write(write, b"ran")
        except EngineClosedError:
            os.write(write, b"refused")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 16) == b"refused"
    os.close(read)
    os.close(write)
    executor.close()
    executor.close()
    with pytest.raises(EngineClosedError, match="closed"):
        logits(executor)
