"""The requests of a benchmark: their lengths, and files that are, or are not, as they should be."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.bench.datasets import (
    BenchRequest,
    file_requests,
    long_tailed_lengths,
    random_requests,
    sharegpt_like_requests,
)
from octavo.errors import DatasetError, InvalidParameterError, OctavoError


def test_random_requests_have_the_lengths_and_the_shared_prefix() -> None:
    requests = random_requests(20, 100, input_len=30, output_len=10, range_ratio=0.5, prefix_len=7, seed=3)
    prefix = requests[0].prompt_token_ids[:7]
    assert all(request.prompt_token_ids[:7] == prefix for request in requests)
    assert {len(request.prompt_token_ids) - 7 for request in requests} <= set(range(15, 46))
    assert len({len(request.prompt_token_ids) for request in requests}) > 3
    assert all(5 <= request.output_len <= 15 for request in requests)
    assert all(0 <= token < 100 for request in requests for token in request.prompt_token_ids)
    assert requests == random_requests(20, 100, input_len=30, output_len=10, range_ratio=0.5, prefix_len=7, seed=3)
    assert requests != random_requests(20, 100, input_len=30, output_len=10, range_ratio=0.5, prefix_len=7, seed=4)
    exact = random_requests(3, 100, input_len=30, output_len=10)
    assert {(len(request.prompt_token_ids), request.output_len) for request in exact} == {(30, 10)}


@pytest.mark.parametrize(
    "bad",
    [
        {"input_len": 0},
        {"output_len": 0},
        {"prefix_len": -1},
        {"range_ratio": 1.0},
        {"range_ratio": -0.1},
        {"count": 0},
    ],
)
def test_random_requests_that_cannot_be_are_refused(bad: dict[str, Any]) -> None:
    given = {"count": 2, "vocab_size": 10, "input_len": 4, "output_len": 4, **bad}
    with pytest.raises(InvalidParameterError):
        random_requests(**given)


def test_sharegpt_like_lengths_have_their_means_and_a_long_tail() -> None:
    requests = sharegpt_like_requests(500, 100)
    inputs = [len(request.prompt_token_ids) for request in requests]
    outputs = [request.output_len for request in requests]
    assert sum(inputs) / 500 == pytest.approx(161, abs=2)
    assert sum(outputs) / 500 == pytest.approx(338, abs=2)
    assert max(outputs) == 1024
    assert np.median(inputs) < 0.75 * np.mean(inputs)
    assert min(long_tailed_lengths(50, 20, 1024, random.Random(1))) >= 1


def words(text: str) -> list[int]:
    return list(range(len(text.split())))


def write(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def turns(*values: str) -> dict[str, Any]:
    return {"id": "x", "conversations": [{"from": "human", "value": value} for value in values]}


def test_sharegpt_asks_the_first_turn_and_takes_the_seconds_length(tmp_path: Path) -> None:
    data = [turns("a b c d e", "1 2 3 4 5 6", "more"), turns("alone a b c"), turns("too short", "1 2 3 4")]
    data.append(turns("a b c d", "short"))
    path = write(tmp_path / "data.json", data)
    requests, passed_over = file_requests(path, words, count=10, max_model_len=100)
    assert requests == [BenchRequest([0, 1, 2, 3, 4], 6)]
    assert passed_over == 2
    given, _ = file_requests(path, words, count=10, max_model_len=100, output_len=9)
    assert sorted((len(request.prompt_token_ids), request.output_len) for request in given) == [(4, 9), (5, 9)]


def test_json_lines_have_a_prompt_and_perhaps_a_length(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", '{"prompt": "a b c d", "output_len": 7}\n\n{"prompt": "e f g h i"}\n')
    requests, _ = file_requests(path, words, count=10, max_model_len=200)
    assert sorted((len(request.prompt_token_ids), request.output_len) for request in requests) == [(4, 7), (5, 128)]
    requests, passed_over = file_requests(path, words, count=10, max_model_len=20)
    assert ([request.output_len for request in requests], passed_over) == ([7], 1)


def test_a_seed_draws_which_prompts_are_taken(tmp_path: Path) -> None:
    path = write(tmp_path / "d", "\n".join(json.dumps({"prompt": "a b c d", "output_len": n}) for n in range(1, 50)))
    first = file_requests(path, words, count=5, max_model_len=200, seed=1)
    assert first == file_requests(path, words, count=5, max_model_len=200, seed=1)
    assert first != file_requests(path, words, count=5, max_model_len=200, seed=2)
    assert len(first[0]) == 5


@pytest.mark.parametrize(
    ("content", "where"),
    [
        ("", "holds no prompt"),
        ("[]", "holds no prompt"),
        ("[1]", "entry 0"),
        ('[{"conversations": [{"value": "a b c d"}, {"value": 3}]}]', "entry 0"),
        ('[{"conversations": {}}]', "entry 0"),
        ("[", "not valid JSON"),
        ('{"prompt": "a b c d"}\n{"prompt": 5}', "line 2"),
        ('{"prompt": "a b c d"}\n\n{"prompt"', "line 3"),
        ('{"text": "a"}', "line 1"),
        ('{"prompt": "a b c d", "output_len": 0}', "output_len"),
        ('{"prompt": "a b c d", "output_len": true}', "output_len"),
        ('{"prompt": "a b c d", "output_len": ' + "9" * 5000 + "}", "line 1"),
        ("[" * 100_000, "the file"),
        ("plain text", "line 1"),
        ('{"prompt": "a b"}', "too short or too long"),
    ],
)
def test_a_bad_dataset_is_refused_with_the_place(tmp_path: Path, content: str, where: str) -> None:
    with pytest.raises(DatasetError, match=where):
        file_requests(write(tmp_path / "data", content), words, count=3, max_model_len=1000)


def test_what_is_no_readable_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "latin").write_bytes(b'{"prompt": "caf\xe9 b c d"}')
    os.mkfifo(tmp_path / "pipe")
    for name, problem in (
        ("latin", "UTF-8"),
        ("pipe", "regular file"),
        ("none", "cannot be read"),
        ("", "cannot be read"),
    ):
        with pytest.raises(DatasetError, match=problem):
            file_requests(tmp_path / name, words, count=3, max_model_len=1000)
    monkeypatch.setattr("octavo.bench.datasets.MAX_DATASET_BYTES", 10)
    with pytest.raises(DatasetError, match="at most 10"):
        file_requests(write(tmp_path / "long", '{"prompt": "a b c d"}'), words, count=3, max_model_len=1000)


def test_dataset_errors_are_octavos() -> None:
    error = DatasetError("file", "line 3", "is bad")
    assert isinstance(error, OctavoError)
    assert str(error) == "file: line 3 is bad"
