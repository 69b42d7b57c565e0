"""What `octavo bench` measures with: the roofline, kernels in the executor, runs through an LLM."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo import LLM, _native
from octavo.bench import kernels, programs
from octavo.bench.datasets import BenchRequest, random_requests
from octavo.bench.kernels import KernelBench
from octavo.bench.latency import latency
from octavo.bench.roofline import Roofline, RooflineProbe, measure
from octavo.bench.serving import least_seconds, run_requests
from octavo.bench.shapes import Matrix, Shapes, shapes_of
from octavo.bench.statistics import percentile, summary
from octavo.bench.throughput import throughput
from octavo.engine.loader import load_model
from octavo.errors import InvalidParameterError
from octavo.params import SamplingParams
from tests.support.llms import environment

TINY_BUFFER = 1 << 20


# --- statistics ---


def test_percentiles_are_numpys() -> None:
    values = [random.Random(1).random() for _ in range(37)]
    for percent in (0, 10, 50, 77.7, 99, 100):
        assert percentile(sorted(values), percent) == pytest.approx(float(np.percentile(values, percent)))
    found = summary(values)
    assert found is not None
    assert found["mean"] == pytest.approx(float(np.mean(values)))
    assert found["median"] == pytest.approx(float(np.median(values)))
    assert (found["min"], found["max"]) == (min(values), max(values))
    assert summary([]) is None


# --- roofline ---


@pytest.mark.parametrize("name", [name for name in _native.kernel_names() if not name.startswith("faulty-")])
def test_every_table_has_a_roofline(name: str) -> None:
    roofline = measure(1, name, TINY_BUFFER)
    assert min(roofline.integer_gmacs, roofline.float_gmacs, roofline.read_gbs) > 0.01
    assert (roofline.threads, roofline.kernels) == (1, name)


def test_a_wider_table_has_a_higher_ceiling() -> None:
    """The tables are listed from the slowest to the best, and so are what their instructions can do."""
    names = [name for name in _native.kernel_names() if not name.startswith("faulty-")]
    best = [max(_native.Ceilings(1, name, TINY_BUFFER).integer(1 << 16) for _ in range(10)) for name in names]
    assert best == sorted(best)


def test_the_least_time_is_the_longer_of_computing_and_reading() -> None:
    roofline = Roofline(integer_gmacs=100.0, float_gmacs=10.0, read_gbs=5.0, threads=1, kernels="x")
    assert roofline.least_seconds(1e9, 0) == pytest.approx(0.01)
    assert roofline.least_seconds(1e9, 0, quantised=False) == pytest.approx(0.1)
    assert roofline.least_seconds(1e9, 5e9) == pytest.approx(1.0)


@pytest.mark.parametrize("bad", [{"threads": 0}, {"threads": 257}, {"kernels": "sse9"}, {"buffer_bytes": 1000}])
def test_a_bad_probe_is_refused_by_name(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameterError, match=next(iter(bad))):
        RooflineProbe(**bad)


@pytest.mark.parametrize(
    "arguments", [(0, "scalar", 1 << 20), (1, "sse9", 1 << 20), (1, "scalar", 100), (1, "scalar", 1 << 50)]
)
def test_the_native_border_checks_what_it_gets(arguments: tuple[int, str, int]) -> None:
    with pytest.raises(ValueError, match=r"threads|kernels|buffer_bytes"):
        _native.Ceilings(*arguments)


def test_a_pass_of_no_rounds_or_of_odd_streams_is_refused() -> None:
    ceilings = _native.Ceilings(1, "scalar", TINY_BUFFER)
    for call in (lambda: ceilings.integer(0), lambda: ceilings.floats(-1), lambda: ceilings.read(3)):
        with pytest.raises(ValueError, match=r"rounds|streams"):
            call()


def test_a_buffer_the_system_refuses_is_a_memory_error() -> None:
    """In a process that may have 4 GB of addresses: a system that overcommits would else hand out what it lacks."""
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))\n"
        "from octavo import _native\n"
        "try: _native.Ceilings(1, 'scalar', 8 << 30).read(1)\n"
        "except MemoryError: print('refused')"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment())
    assert ran.stdout == "refused\n"


# --- kernels ---

SMALL = Shapes("small", (Matrix("m", 48, 64, 3),), hidden=64, heads=4, kv_heads=2, head_dim=16, vocab_size=300)


@pytest.mark.parametrize("format", kernels.FORMATS)
def test_a_random_matrix_is_packed_in_its_format_and_has_the_size_that_is_counted(format: str) -> None:
    bench = programs.linears(40, 64, format, 2)
    with kernels.Group() as group:
        executor = group.executor(bench, 1, RooflineProbe(1, "scalar", TINY_BUFFER))
        tensor = bench.tensors["matrix.0.weight"]
        packed = _native.pack([(tensor.data, tensor.encoding, 40, 64, None)], format)
        assert packed.nbytes == kernels.bytes_of(40, 64, format)
        assert executor.weight_formats[format] >= 2 * packed.nbytes
        assert np.isfinite(packed.unpack()).all()


def test_every_kernel_is_measured_and_its_numbers_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_ATTENTION", ((1, 1, 64), (2, 1, 40), (1, 20, 20)))
    monkeypatch.setattr(kernels, "WORKING_SET", 1 << 14)
    bench = KernelBench(SMALL, rows=(1, 5), rounds=2)
    probe = RooflineProbe(1, "auto", TINY_BUFFER)
    groups: list[int] = []
    results, rooflines = kernels.run(bench, probe, lambda found: groups.append(len(found)))
    assert len(groups) == len(rooflines) == kernels.group_count(bench)
    assert sum(groups) == len(results)
    linear = [result.kernel for result in results if result.kernel.part == "linear"]
    assert {(kernel.format, kernel.rows) for kernel in linear} == {(f, m) for f in kernels.FORMATS for m in (1, 5)}
    assert {result.kernel.part for result in results} == set(kernels.PARTS)
    for result in results:
        if result.seconds is None or result.best_seconds is None:  # so small that it may be lost in noise
            continue
        assert result.seconds >= result.best_seconds > 0
        if result.kernel.part == "linear":
            assert result.gmacs is not None
            assert result.gmacs * result.seconds * 1e9 == pytest.approx(48 * 64 * result.kernel.rows)
        if result.share is not None:
            assert result.share > 0
    best = kernels.best_of(rooflines)
    assert best.integer_gmacs == max(roofline.integer_gmacs for roofline in rooflines)


def test_attention_counts_what_its_queries_see() -> None:
    probe = RooflineProbe(1, "scalar", TINY_BUFFER)
    with kernels.attention_group(SMALL, "f32", [(2, 1, 40), (1, 20, 20)], probe, working_set=1) as group:
        decode, prefill = group.timed
        assert decode.macs == 2 * (2 * 40) * 4 * 16
        assert prefill.macs == 2 * sum(range(1, 21)) * 4 * 16
        assert decode.read_bytes == 2 * 48 * 2 * 2 * 16 * 4  # whole blocks, K and V
        (result, _) = group.measure(probe, 1)
        assert result.kernel == decode.kernel


def timed(macs: float) -> kernels.Timed:
    return kernels.Timed(kernels.Kernel("linear", "m", "q8", 1), int, int, calls=10, macs=macs, read_bytes=1e6)


def test_what_a_step_costs_without_its_kernels_is_subtracted() -> None:
    roofline = Roofline(integer_gmacs=10.0, float_gmacs=1.0, read_gbs=1.0, threads=1, kernels="x")
    result = kernels._result(timed(2e7), [0.031, 0.041, 0.051], [0.001, 0.002, 0.009], roofline)
    assert (result.seconds, result.best_seconds) == (pytest.approx(0.004), pytest.approx(0.003))
    assert (result.gmacs, result.gbs) == (pytest.approx(5.0), pytest.approx(0.25))
    assert result.share == pytest.approx(0.5)
    lost = kernels._result(timed(2e7), [0.001, 0.041], [0.001, 0.002], roofline)
    assert lost == kernels.KernelResult(lost.kernel)


@pytest.mark.parametrize(
    "bad",
    [
        {"parts": ["lineer"]},
        {"parts": []},
        {"formats": ["q3"]},
        {"rows": [0]},
        {"rows": []},
        {"rows": [4096]},
        {"rounds": 0},
    ],
)
def test_a_bench_that_cannot_be_is_refused_by_name(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameterError, match=next(iter(bad))):
        KernelBench(**bad)


def test_shapes_of_a_model_are_what_its_step_multiplies_by(folder: Path) -> None:
    model = load_model(str(folder))
    shapes = shapes_of("tiny", model.program, model.checkpoint.tensors, "q8")
    by_name = {matrix.name: matrix for matrix in shapes.matrices}
    config = model.checkpoint.config
    assert by_name["gate+up"].n == 2 * config.intermediate_size
    assert by_name["q+k+v"].n == (config.heads + 2 * config.kv_heads) * config.head_dim
    assert by_name["q+k+v"].count == config.layers
    assert by_name["lm_head"].n == config.vocab_size
    assert by_name["lm_head"].most_rows < by_name["down"].most_rows
    assert all(matrix.format == "q8" for matrix in shapes.matrices)
    body = sum(m.n * m.k * m.count for m in shapes.matrices if m.name != "lm_head")
    head = by_name["lm_head"].n * by_name["lm_head"].k
    assert model.program.macs() == (body, head)


# --- latency and throughput ---

SAMPLED = SamplingParams(seed=1)


@pytest.fixture
def small_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads a megabyte in place of half a gigabyte."""
    monkeypatch.setattr(RooflineProbe.__init__, "__defaults__", (None, "auto", TINY_BUFFER))


@pytest.mark.usefixtures("small_probe")
def test_latency_times_batches_of_equal_requests_from_a_cold_cache(llm: LLM) -> None:
    done: list[int] = []
    result = latency(
        llm, input_len=20, output_len=5, batch_size=3, num_iters=2, params=SAMPLED, done=lambda: done.append(1)
    )
    assert len(done) == 3
    assert len(result["latencies"]) == 2
    assert result["batch_seconds"]["min"] == min(result["latencies"])
    assert result["output_tokens_per_second"] == pytest.approx(15 / result["batch_seconds"]["median"])
    assert result["ttft_seconds"]["max"] <= result["batch_seconds"]["max"]
    assert 0 < result["inter_token_seconds"]["median"] < result["batch_seconds"]["max"]
    assert result["roofline"]["share"] > 0
    json.dumps(result, allow_nan=False)


@pytest.mark.usefixtures("small_probe")
def test_throughput_counts_tokens_hits_and_kv_memory(llm: LLM) -> None:
    requests = random_requests(6, 100, input_len=8, output_len=4, prefix_len=32)
    result = throughput(llm, requests, SamplingParams(n=2, seed=1))
    assert (result["finished_requests"], result["failed_requests"], result["first_error"]) == (6, 0, None)
    assert result["prompt_tokens"] == 6 * 40
    assert result["output_tokens"] == 6 * 2 * 4
    assert result["output_tokens_per_second"] == pytest.approx(48 / result["elapsed_seconds"])
    assert result["total_tokens_per_second"] == pytest.approx(288 / result["elapsed_seconds"])
    assert result["prefix_hit_tokens"] >= 5 * 32
    assert result["kv"]["blocks_total"] == llm.info()["num_blocks"]
    assert result["steps"] >= 4
    json.dumps(result, allow_nan=False)


def test_requests_that_fail_are_counted_and_all_failing_is_an_error(llm: LLM) -> None:
    good, bad = BenchRequest([5] * 4, 3), BenchRequest([10**6], 3)
    run = run_requests(llm, [good, bad], SAMPLED)
    assert (len(run.outputs), len(run.finished)) == (2, 1)
    with pytest.raises(InvalidParameterError):
        run_requests(llm, [bad], SAMPLED)


def test_the_least_time_of_a_run_counts_its_matrices_attention_and_reads(llm: LLM) -> None:
    run = run_requests(llm, [BenchRequest([5] * 10, 6)], SAMPLED)
    info = llm.info() | {"weights": {"q8": 10}}
    fast = Roofline(1e9, 1e9, 1e9, 1, "x")
    rows = 10 + 5  # the last token is drawn, not computed
    assert run.counters["computed_tokens"] == rows
    integer = least_seconds(run, info, Roofline(1.0, 1e12, 1e12, 1, "x"))
    assert integer == pytest.approx((rows * info["macs_per_token"] + 6 * info["macs_per_logits"]) / 1e9, rel=1e-3)
    attention = least_seconds(run, info, Roofline(1e12, 1.0, 1e12, 1, "x"))
    per_pair = 2 * info["layers"] * info["heads"] * info["head_dim"]
    pairs = sum(range(1, rows + 1))
    assert attention == pytest.approx(pairs * per_pair / 1e9, rel=0.2)
    reading = least_seconds(run, info, Roofline(1e12, 1e12, 1.0, 1, "x"))
    assert reading > run.counters["steps"] * info["weight_bytes"] / 1e9
    assert least_seconds(run, info, fast) < min(integer, attention, reading)
