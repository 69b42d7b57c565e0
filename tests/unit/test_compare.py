"""The arithmetic of the comparison with peers, and what it asks of them. The peers themselves are not needed."""

from __future__ import annotations

import io
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.compare import report, rounds, targets, workloads
from benchmarks.compare.contenders import Contender
from benchmarks.compare.figures import Figure, Key, best, figure, ratio, table
from benchmarks.peers import protocol, random_models
from benchmarks.peers.process import Worker, WorkerError

from octavo.weights.dequantise import dequantise
from octavo.weights.gguf import read_gguf

RATES = {
    Key("w", "Octavo"): [100.0, 50.0, 90.0],
    Key("w", "llama.cpp Q4_1"): [20.0, 10.0, 30.0],
    Key("w", "OpenVINO Q8_0"): [40.0, 5.0, 31.0],
}


def test_a_ratio_is_taken_within_each_round_before_the_median() -> None:
    assert ratio(RATES, "w", "Octavo", "llama.cpp Q4_1") == Figure(5.0, 3.0, 5.0)
    assert ratio(RATES, "w", "Octavo", "OpenVINO Q8_0") == Figure(90 / 31, 2.5, 10.0)


def test_a_ratio_of_unequal_rounds_is_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        ratio({**RATES, Key("w", "x"): [1.0]}, "w", "Octavo", "x")


def test_the_best_peer_has_the_highest_median_of_those_measured() -> None:
    assert best(RATES, "w", ["llama.cpp Q4_1", "OpenVINO Q8_0", "not measured"]) == "OpenVINO Q8_0"


def test_figures_are_median_least_and_most() -> None:
    assert figure([3.0, 1.0, 2.0, 10.0]) == Figure(2.5, 1.0, 10.0)
    assert str(figure([1234.4, 12.34, 1.234])) == "12.3 (1.23 – 1,234)"


def test_a_cell_cannot_break_the_table() -> None:
    assert table(("a", "b"), [["x|y", "z"]]) == "| a | b |\n| --- | --- |\n| x/y | z |\n"


def test_requests_have_the_lengths_of_conversations_every_time() -> None:
    load = workloads.sharegpt_like()
    assert load == workloads.sharegpt_like() == workloads.REQUESTS
    assert len(load.prompts) == len(load.outputs) == 64
    assert statistics.mean(load.prompts) == pytest.approx(161, abs=1)
    assert statistics.mean(load.outputs) == pytest.approx(338, abs=1)
    assert max(load.prompts) <= 1024
    assert max(load.outputs) == 1024
    assert statistics.median(load.outputs) < 0.8 * statistics.mean(load.outputs), "long-tailed"


def test_a_sample_of_the_requests_has_their_mean_lengths_and_changes_with_the_round() -> None:
    samples = [workloads.sample(workloads.REQUESTS, 4, round) for round in range(1, 6)]
    for each in samples:
        assert statistics.mean(each.prompts) == pytest.approx(161, rel=0.1)
        assert statistics.mean(each.outputs) == pytest.approx(338, rel=0.1)
    assert len({each.outputs for each in samples}) == 5
    assert samples[0] == workloads.sample(workloads.REQUESTS, 4, 1)


def test_generate_gets_new_prompts_each_round_and_decode_the_same() -> None:
    for load in workloads.ALL:
        (first, lengths), (second, _) = load.requests(1), load.requests(2)
        assert (first == second) == (load.op == "decode")
        assert load.requests(1) == (first, lengths)
        assert [len(prompt) for prompt in first] == list(load.prompts)
        assert lengths == list(load.outputs)


def test_rates_count_what_the_workload_says() -> None:
    assert workloads.PREFILL.rate({"seconds": 2.0, "tokens": 1}) == 256
    assert workloads.BATCH_8.rate({"seconds": 2.0, "tokens": 504}) == 252
    assert workloads.BATCH_8.tokens == 8 * 63
    assert workloads.REQUESTS.tokens == sum(workloads.REQUESTS.outputs)


def test_settings_are_tried_on_a_smaller_workload_of_the_same_shape() -> None:
    for load in workloads.ALL:
        small = load.smaller()
        assert (small.op, small.name) == (load.op, load.name)
        assert small.tokens <= load.tokens
        if load.op == "decode":
            assert small.requests(0)[0] == load.requests(0)[0], "what is prefilled then can be kept"


def test_the_same_file_and_the_two_fastest_others_are_measured() -> None:
    names = {"llama.cpp Q4_1": (4, 5), "llama.cpp F16": (16, 99), "a Q4_0": (4, 7), "b Q8_0": (8, 9), "c Q8_0": (8, 6)}
    everyone = [Contender(name, "none", bits, ({},)) for name, (bits, _) in names.items()]
    tried = {name: {"rate": float(rate)} for name, (_, rate) in names.items()}
    assert rounds.rivals(tried, everyone, ["llama.cpp Q4_1"], 2) == ["llama.cpp Q4_1", "b Q8_0", "a Q4_0"]


def _results() -> dict[str, Any]:
    load = workloads.BATCH_1.name
    rates = {"Octavo": [200.0, 210.0], "llama.cpp Q4_1": [90.0, 110.0], "OpenVINO Q8_0": [125.0, 100.0]}
    about = {"version": "octavo 1", "layer_macs": 10**8, "head_macs": 10**7, "weight_bytes": 10**8}
    session = rounds.Session(
        targets.SMOLLM2,
        "python -m benchmarks.compare",
        tried={load: {"llama.cpp F16": {"process": 0, "options": {}, "rate": 40.0, "text": "fast | odd"}}},
        rates={load: rates},
        busy={load: {who: [2.0, 2.0] for who in rates}},
        about={"Octavo": {**about, "kv_token_bytes": 20_000}, "llama.cpp Q4_1": {"version": "llama.cpp 2"}},
        agreement={"llama.cpp Q4_1": 0.9},
        roofline=[{"integer_gmacs": 1000.0, "read_gbs": 40.0, "kernels": "avx2"}] * 2,
        extra={"ttft cold / hit": [14.0, 18.0]},
        refusals={"OpenVINO Q4_0": "not read"},
    )
    return {
        "date": "1 May 2030",
        "machine": {"CPU": "one"},
        "load": 0.1,
        "rounds": 2,
        "threads": 2,
        "sessions": [json.loads(json.dumps(session.__dict__))],
    }


def test_targets_are_judged_by_the_median_ratio() -> None:
    same, peer = targets.verdicts(_results()["sessions"])
    assert (same.against, peer.against) == ("llama.cpp Q4_1", "OpenVINO Q8_0")
    assert same.measured.median == pytest.approx((200 / 90 + 210 / 110) / 2)
    assert same.met
    assert peer.measured.median == pytest.approx((200 / 125 + 210 / 100) / 2)
    assert peer.met
    assert peer.target.factor == 1.7


def test_a_target_that_is_missed_says_so() -> None:
    results = _results()
    results["sessions"][0]["rates"][workloads.BATCH_1.name]["Octavo"] = [100.0, 100.0]
    assert [verdict.met for verdict in targets.verdicts(results["sessions"])] == [False, False]
    assert report.render(results).count("**no**") == 2


def test_the_report_holds_targets_ranges_settings_and_refusals() -> None:
    text = report.render(_results())
    assert "| smollm2 | decode, batch 1 | llama.cpp Q4_1 | ≥ 2× (stretch 2.5×) | 2.07× (1.91 – 2.22) | yes |" in text
    assert "16.00× (14.00 – 18.00) | yes |" in text
    assert "| decode, batch 1 | llama.cpp F16 | 40.0 | fast / odd |" in text
    assert "OpenVINO Q4_0 could not take part: not read" in text
    assert "llama.cpp Q4_1 90%" in text


def test_results_of_other_models_can_be_kept() -> None:
    from benchmarks.compare.__main__ import _keep

    earlier = {"sessions": [{"name": "smollm2"}, {"name": "qwen2.5-0.5b"}], "start": {"ready": 1}}
    results: dict[str, Any] = {"sessions": []}
    _keep(earlier, ["qwen2.5-0.5b"], results)
    assert results == {"sessions": [{"name": "smollm2"}], "start": {"ready": 1}}
    results = {"sessions": []}
    _keep(earlier, ["smollm2"], results)
    assert results == {"sessions": [{"name": "qwen2.5-0.5b"}]}


def test_the_roofline_counts_weights_once_a_step_and_macs_of_every_token() -> None:
    (session,) = _results()["sessions"]
    gmacs, share, gbs, read_share = targets.roofline_shares(session, workloads.BATCH_1)
    assert gmacs.median == pytest.approx(205 * 0.11, rel=0.01)
    assert share.median == pytest.approx(gmacs.median / 1000)
    assert gbs is not None
    assert read_share is not None
    assert gbs.median == pytest.approx(205 * (0.1 + (128 + 64) * 20e-6), rel=0.01)
    assert read_share.median == pytest.approx(gbs.median / 40)


class _Echo:
    """Answers with as many tokens as asked for, but one less for a prompt that starts with 13."""

    def about(self) -> dict[str, Any]:
        return {"version": "echo"}

    def generate(self, prompts: list[list[int]], lengths: list[int], options: dict[str, Any]) -> protocol.Run:
        if options.get("fail"):
            raise ValueError("as asked")
        return protocol.Stopwatch().run([[7] * (n - (p[0] == 13)) for p, n in zip(prompts, lengths)])

    decode = generate


def test_a_worker_answers_in_order_and_reports_a_failure(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    asked = [{}, {"op": "decode", "prompts": [[1], [2]], "lengths": [2, 3], "options": {}}]
    asked.append({"op": "generate", "prompts": [[1]], "lengths": [1], "options": {"fail": True}})
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(json.dumps(each) + "\n" for each in asked)))
    answers = _served(capfd)
    assert answers[0]["version"] == "echo"
    assert (answers[1]["outputs"], answers[1]["tokens"]) == ([[7, 7], [7, 7, 7]], 5)
    assert answers[1]["seconds"] > 0
    assert answers[1]["peak_rss"] > answers[1]["rss"] // 2 > 0
    assert answers[2]["error"] == "ValueError: as asked"


def _served(capfd: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    stdout = os.dup(1)
    try:
        protocol.serve(lambda _: _Echo())
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
    return [json.loads(line) for line in capfd.readouterr().out.splitlines()]


def test_an_engine_that_stops_early_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from tests.unit import test_compare as t; t.protocol.serve(lambda _: t._Echo())"
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{code}'\n")
    python.chmod(0o755)
    ballast = bytearray(b"x") * (600 << 20)
    with Worker(python, "echo", {}, tmp_path / "log") as worker:
        assert worker.about["peak_rss"] < len(ballast), "the parent's memory is not the worker's"
        del ballast
        assert worker.run("generate", [[1]], [3], {})["outputs"] == [[7, 7, 7]]
        with pytest.raises(WorkerError, match=r"generated \[2\] tokens, asked for \[3\]"):
            worker.run("generate", [[13]], [3], {})
        with pytest.raises(WorkerError, match="as asked"):
            worker.run("generate", [[1]], [3], {"fail": True})


def test_a_worker_that_cannot_start_says_where_to_look(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="no_such_engine ended with status 1; see log"):
        Worker(Path(sys.executable), "no_such_engine", {}, tmp_path / "log")
    assert "no_such_engine" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("layers", ["Q4_1", "Q8_0"])
def test_random_models_hold_the_weights_they_were_drawn_as(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: str
) -> None:
    monkeypatch.setattr(random_models, "VOCABULARY", 320)
    shape = random_models.Shape(hidden=64, intermediate=96, layers=1, heads=2, kv_heads=1)
    random_models.write_gguf(tmp_path / "m.gguf", "m", shape, layers)
    tensors = read_gguf(tmp_path / "m.gguf").tensors
    rng = np.random.default_rng(0)
    for weight in random_models.weights(shape):
        expected = random_models.values(weight, rng)
        got = dequantise(tensors[weight.gguf])
        assert got.shape == expected.shape
        steps = 1 if len(weight.shape) == 1 else 15 if tensors[weight.gguf].encoding == "q4_1" else 254
        assert np.abs(got - expected).max() <= np.ptp(expected) / steps
