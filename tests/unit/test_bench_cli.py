"""`octavo bench`: its options reach the measurement, its results the table and the file, its mistakes the user."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from octavo import LLM
from octavo.bench import kernels
from octavo.bench.roofline import RooflineProbe
from octavo.bench.shapes import Matrix, Shapes
from octavo.cli import engine, options
from octavo.cli.main import app

TINY_BUFFER = 1 << 20
SMALL = Shapes("small", (Matrix("m", 48, 64, 3),), hidden=64, heads=4, kv_heads=2, head_dim=16, vocab_size=300)


def octavo(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments], prog_name="octavo")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little to read and little to multiply."""
    monkeypatch.setattr(RooflineProbe.__init__, "__defaults__", (None, "auto", TINY_BUFFER))
    monkeypatch.setattr(kernels, "WORKING_SET", 1 << 14)
    monkeypatch.setattr(kernels, "_ATTENTION", ((1, 1, 40), (1, 20, 20)))
    monkeypatch.setattr("octavo.bench.shapes.SMOLLM2", SMALL)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> list[options.EngineOptions]:
    """The commands get the shared engine; the options they asked for are listed."""
    asked: list[options.EngineOptions] = []

    def open_engine(given: options.EngineOptions) -> Any:
        asked.append(given)
        return nullcontext(llm)

    monkeypatch.setattr(engine, "open_engine", open_engine)
    return asked


def written(path: Path, name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    assert (result["bench"], result["schema"]) == (name, 1)
    assert {"cpu", "kernels", "octavo"} <= set(result["machine"])
    assert {"integer_gmacs", "float_gmacs", "read_gbs", "threads", "kernels"} <= set(result["roofline"])
    return result


# --- kernels ---


def test_kernels_prints_a_table_and_writes_the_same_numbers(tmp_path: Path) -> None:
    path = tmp_path / "k.json"
    chosen = ("--formats", "q4,f32", "--rows", "1,3", "--rounds", "1", "--threads", "1")
    result = octavo("kernels", *chosen, "--only", "linear,sampler", "--json", str(path))
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split()[:3] == ["KERNEL", "FORMAT", "ROWS"]
    found = written(path, "kernels")
    assert found["settings"] == {"rounds": 1, "threads": 1, "kernels": found["roofline"]["kernels"]}
    linear = [entry for entry in found["results"] if entry["part"] == "linear"]
    assert [(entry["format"], entry["rows"]) for entry in linear] == [("q4", 1), ("q4", 3), ("f32", 1), ("f32", 3)]
    assert {entry["part"] for entry in found["results"]} == {"linear", "sampler"}
    for entry, line in zip(found["results"], lines[1:]):
        assert line.startswith(entry["name"])
        assert entry["seconds"] is None or entry["seconds"] >= entry["best_seconds"] > 0
    assert "roofline of 1 thread" in lines[-1]


def test_kernels_of_a_model_have_its_shapes_and_formats(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "k.json"
    chosen = ("--only", "linear", "--rows", "1", "--rounds", "1", "--threads", "1", "--kernels", "scalar")
    result = octavo("kernels", "--model", str(folder), "--weights", "q8", *chosen, "--output-json", str(path))
    assert result.exit_code == 0, result.output
    found = written(path, "kernels")
    assert {entry["format"] for entry in found["results"]} == {"q8"}
    assert {entry["name"].split()[0] for entry in found["results"]} >= {"q+k+v", "gate+up", "down", "lm_head"}
    assert found["settings"]["kernels"] == "scalar"


@pytest.mark.parametrize(
    ("arguments", "problem", "code"),
    [
        (["--formats", "q3"], "formats", 1),
        (["--only", "everything"], "parts", 1),
        (["--only", ""], "parts", 1),
        (["--rows", "1,x"], "--rows", 2),
        (["--rows", "0"], "rows", 1),
        (["--rounds", "0"], "rounds", 1),
        (["--threads", "0"], "threads", 1),
        (["--kernels", "sse9"], "kernels", 1),
        (["--output-json", "/no/such/folder/k.json"], "--output-json", 2),
    ],
)
def test_kernels_refuses_what_it_cannot_measure(arguments: list[str], problem: str, code: int) -> None:
    result = octavo("kernels", *arguments)
    assert result.exit_code == code
    assert problem in result.stderr
    assert result.stdout == ""


# --- latency ---


def test_latency_measures_the_batch_it_was_asked_for(opened: list[options.EngineOptions], tmp_path: Path) -> None:
    path = tmp_path / "l.json"
    sizes = ("--input-len", "12", "--output-len", "4", "--batch-size", "3", "--num-iters", "2", "--n", "2")
    result = octavo("latency", *sizes, "--num-iters-warmup", "0", "--seed", "5", "--output-json", str(path))
    assert result.exit_code == 0, result.output
    found = written(path, "latency")
    assert found["settings"] == {
        "input_len": 12,
        "output_len": 4,
        "batch_size": 3,
        "n": 2,
        "num_iters_warmup": 0,
        "num_iters": 2,
        "temperature": 1.0,
        "seed": 5,
    }
    assert len(found["latencies"]) == 2
    assert found["failed_requests"] == 0
    for line in ("latency of a batch", "time to the first token", "output tokens/s", "roofline", "… would allow"):
        assert line in result.stdout


def test_every_engine_option_reaches_the_engine(opened: list[options.EngineOptions]) -> None:
    given = {
        "model": "m",
        "revision": "r",
        "weights": "q8",
        "kv_dtype": "f32",
        "kv_memory": "1GB",
        "max_model_len": 99,
        "threads": 3,
        "kernels": "scalar",
        "max_num_seqs": 7,
    }
    flags = [text for name, value in given.items() for text in ("--" + name.replace("_", "-"), str(value))]
    octavo("latency", *flags, "--input-len", "4", "--output-len", "2", "--num-iters", "1")
    octavo("throughput", *flags, "--input-len", "4", "--output-len", "2", "--num-prompts", "1")
    assert opened == [options.EngineOptions(**given)] * 2  # type: ignore[arg-type]


# --- throughput ---


def test_throughput_of_random_prompts(opened: list[options.EngineOptions], tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    sizes = ("--num-prompts", "5", "--input-len", "9", "--output-len", "3", "--prefix-len", "32")
    result = octavo("throughput", *sizes, "--output-json", str(path))
    assert result.exit_code == 0, result.output
    found = written(path, "throughput")
    assert (found["prompt_tokens"], found["output_tokens"]) == (5 * 41, 15)
    assert found["prefix_hit_tokens"] >= 4 * 32
    assert found["settings"]["dataset"] == "random"
    for line in ("requests/s", "output tokens/s", "total tokens/s", "prefix cache", "KV memory", "… would allow"):
        assert line in result.stdout


def test_throughput_of_a_file_says_what_it_passed_over(opened: list[options.EngineOptions], tmp_path: Path) -> None:
    data, path = tmp_path / "data.jsonl", tmp_path / "t.json"
    lines = [{"prompt": "a long enough prompt", "output_len": 3}, {"prompt": "x"}, {"prompt": "y" * 5000}]
    data.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    result = octavo("throughput", "--dataset-path", str(data), "--output-json", str(path))
    assert result.exit_code == 0, result.output
    found = written(path, "throughput")
    assert (found["finished_requests"], found["output_tokens"]) == (1, 3)
    assert found["settings"]["dataset"] == str(data)
    assert "2 entries" in result.stderr
    assert "fewer than --num-prompts 64" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "problem", "code"),
    [
        (["--dataset-name", "alpaca"], "--dataset-name", 2),
        (["--dataset-name", "sharegpt"], "--dataset-path", 2),
        (["--dataset", "x", "--input-len", "5"], "--input-len", 2),
        (["--dataset", "x", "--dataset-name", "sharegpt-like"], "either", 2),
        (["--dataset-name", "sharegpt-like", "--output-len", "5"], "lengths", 2),
        (["--dataset", "none.json"], "cannot be read", 1),
        (["--num-prompts", "0"], "num_prompts", 1),
        (["--random-range-ratio", "1"], "random_range_ratio", 1),
        (["--temperature", "-1"], "temperature", 1),
        (["--temperature", "0", "--n", "2"], "n=2", 1),
    ],
)
def test_throughput_refuses_what_it_cannot_run(
    opened: list[options.EngineOptions], arguments: list[str], problem: str, code: int
) -> None:
    result = octavo("throughput", *arguments)
    assert result.exit_code == code
    assert problem in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("option", "value", "name"),
    [
        ("--batch-size", "0", "batch_size=0"),
        ("--num-iters", "0", "num_iters=0"),
        ("--num-iters-warmup", "-1", "num_iters_warmup=-1"),
        ("--num-iters", "10001", "1 to 10000"),
    ],
)
def test_latency_refuses_what_it_cannot_run(
    opened: list[options.EngineOptions], option: str, value: str, name: str
) -> None:
    result = octavo("latency", option, value)
    assert result.exit_code == 1
    assert name in result.stderr
    assert result.stdout == ""


def test_throughput_says_that_a_request_did_not_fit(opened: list[options.EngineOptions], tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    result = octavo("throughput", "--dataset-name", "sharegpt-like", "--num-prompts", "2", "--output-json", str(path))
    assert result.exit_code == 0, result.output
    found = written(path, "throughput")
    assert (found["finished_requests"], found["failed_requests"]) == (1, 1)
    assert "requests that failed" in result.stdout
    assert found["first_error"] in result.stdout


# --- on a terminal ---


def test_a_terminal_gets_a_drawn_table_and_a_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.cli.terminal.is_terminal", lambda stream: True)
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich looks for itself
    chosen = ("--only", "linear", "--formats", "q4", "--rows", "1", "--rounds", "1", "--threads", "1")
    result = octavo("kernels", *chosen)
    assert result.exit_code == 0, result.output
    assert "m 48×64" in result.stdout
    assert "│" in result.stdout
    assert "Groups" in result.stderr
