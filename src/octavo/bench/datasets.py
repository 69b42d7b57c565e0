"""The requests of a benchmark: random tokens, lengths like ShareGPT's, or a file of conversations or prompts."""

from __future__ import annotations

import json
import math
import os
import random
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

from octavo.errors import DatasetError, InvalidParameterError
from octavo.limits import MAX_BENCH_PROMPTS, MAX_CONTEXT, MAX_DATASET_BYTES

Encode = Callable[[str], list[int]]
DEFAULT_OUTPUT_LEN = 128  # where neither the caller nor the file says
_SHORTEST = 4  # tokens; shorter prompts and answers of a file are passed over, as other benchmarks do

# ShareGPT's mean lengths as in the PagedAttention paper (arXiv 2309.06180, section 6.1), long-tailed: log-normal.
SHAREGPT_INPUT, SHAREGPT_OUTPUT, SHAREGPT_LONGEST = 161, 338, 1024


@dataclass(frozen=True, slots=True)
class BenchRequest:
    prompt_token_ids: list[int]
    output_len: int


def random_requests(
    count: int,
    vocab_size: int,
    *,
    input_len: int,
    output_len: int,
    range_ratio: float = 0.0,
    prefix_len: int = 0,
    seed: int = 0,
) -> list[BenchRequest]:
    """Random token ids. Lengths are uniform in len · (1 ± range_ratio); the prefix_len ids in front are shared."""
    _bounded("num_prompts", count, 1, MAX_BENCH_PROMPTS)
    _bounded("input_len", input_len, 1, MAX_CONTEXT)
    _bounded("output_len", output_len, 1, MAX_CONTEXT)
    _bounded("prefix_len", prefix_len, 0, MAX_CONTEXT)
    if not 0.0 <= range_ratio < 1.0:
        raise InvalidParameterError("random_range_ratio", range_ratio, "at least 0 and less than 1")
    rng = random.Random(seed)

    def drawn(length: int) -> int:
        return rng.randint(max(math.floor(length * (1 - range_ratio)), 1), math.ceil(length * (1 + range_ratio)))

    prefix = _ids(prefix_len, vocab_size, rng)
    return [BenchRequest(prefix + _ids(drawn(input_len), vocab_size, rng), drawn(output_len)) for _ in range(count)]


def sharegpt_like_requests(count: int, vocab_size: int, *, seed: int = 0) -> list[BenchRequest]:
    """Random token ids, as many as conversations have."""
    _bounded("num_prompts", count, 1, MAX_BENCH_PROMPTS)
    rng = random.Random(seed)
    inputs = long_tailed_lengths(count, SHAREGPT_INPUT, SHAREGPT_LONGEST, rng)
    outputs = long_tailed_lengths(count, SHAREGPT_OUTPUT, SHAREGPT_LONGEST, rng)
    return [BenchRequest(_ids(n, vocab_size, rng), m) for n, m in zip(inputs, outputs)]


def long_tailed_lengths(count: int, mean: float, longest: int, rng: random.Random) -> list[int]:
    """`count` log-normal lengths from 1 to `longest` whose mean is `mean` after the cut, in random order."""
    normal = [NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)]

    def cut(mu: float) -> list[int]:
        return [min(max(round(math.exp(mu + z)), 1), longest) for z in normal]

    low, high = 0.0, math.log(longest)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(cut(middle)) < mean * count else (low, middle)
    lengths = cut(high)
    rng.shuffle(lengths)
    return lengths


def file_requests(
    path: Path, encode: Encode, *, count: int, max_model_len: int, output_len: int | None = None, seed: int = 0
) -> tuple[list[BenchRequest], int]:
    """At most `count` requests of a file, in an order drawn by `seed`; and how many entries were passed over as too
    short or too long for the model. Raises DatasetError with the place of the first entry that is not as it should be.

    The file: ShareGPT's JSON, a list of {"conversations": [{"from": …, "value": …}, …]} whose first turn is asked and
    whose second one gives the output's length; or a line of JSON a prompt, {"prompt": …, "output_len": …}.
    output_len, when given, holds for all.
    """
    _bounded("num_prompts", count, 1, MAX_BENCH_PROMPTS)
    if output_len is not None:
        _bounded("output_len", output_len, 1, MAX_CONTEXT)
    text = _read(path)
    entries = list(_conversations(path, text) if text.lstrip()[:1] == "[" else _lines(path, text))
    if not entries:
        raise DatasetError(path, "the file", "holds no prompt; at least one is needed")
    random.Random(seed).shuffle(entries)
    requests: list[BenchRequest] = []
    passed_over = 0
    for prompt, answer in entries:
        if len(requests) == count:
            break
        ids = encode(prompt)
        length = output_len or (len(encode(answer)) if isinstance(answer, str) else answer) or DEFAULT_OUTPUT_LEN
        too_short = len(ids) < _SHORTEST or (isinstance(answer, str) and length < _SHORTEST)
        if too_short or len(ids) + length > max_model_len:
            passed_over += 1
        else:
            requests.append(BenchRequest(ids, length))
    if not requests:
        allowed = f"prompts of at least {_SHORTEST} tokens that fit {max_model_len} tokens with their output"
        raise DatasetError(path, f"all {passed_over} entries", f"are too short or too long; {allowed} are needed")
    return requests, passed_over


_Entry = tuple[str, str | int | None]  # the prompt; the answer whose length counts, the length, or neither


def _read(path: Path) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not make us wait for a writer
        with os.fdopen(fd, "rb") as file:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                raise DatasetError(path, "the path", "is not a regular file")
            if info.st_size > MAX_DATASET_BYTES:
                raise DatasetError(path, "the file", f"has {info.st_size} bytes; at most {MAX_DATASET_BYTES} may be")
            return file.read(info.st_size).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DatasetError(path, f"byte {error.start}", "is not UTF-8") from None
    except (OSError, ValueError) as error:
        if isinstance(error, DatasetError):
            raise
        raise DatasetError(path, "the file", f"cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _parsed(path: Path, where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DatasetError(path, where, f"is not valid JSON: {error.msg} at character {error.pos}") from None
    except (RecursionError, ValueError) as error:  # nested too deeply, or a number of too many digits
        raise DatasetError(path, where, f"is not JSON that can be read: {error}") from None


def _conversations(path: Path, text: str) -> Iterator[_Entry]:
    for i, entry in enumerate(_parsed(path, "the file", text)):
        turns = entry.get("conversations") if isinstance(entry, dict) else None
        if not isinstance(turns, list):
            raise DatasetError(path, f"entry {i}", 'is no object with a list "conversations"')
        texts: list[str] = []
        for turn in turns[:2]:
            value = turn.get("value") if isinstance(turn, dict) else None
            if not isinstance(value, str):
                raise DatasetError(path, f"entry {i}", 'has a turn without a text "value"')
            texts.append(value)
        if len(texts) == 2:
            yield texts[0], texts[1]


def _lines(path: Path, text: str) -> Iterator[_Entry]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"line {number}"
        entry = _parsed(path, where, line)
        prompt = entry.get("prompt") if isinstance(entry, dict) else None
        if not isinstance(prompt, str):
            raise DatasetError(path, where, 'is no object with a text "prompt"')
        length = entry.get("output_len")
        if length is not None and (type(length) is not int or not 1 <= length <= MAX_CONTEXT):
            raise DatasetError(path, where, f'has an "output_len" that is no integer from 1 to {MAX_CONTEXT}')
        yield prompt, length


def _ids(count: int, vocab_size: int, rng: random.Random) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(count)]


def _bounded(name: str, value: int, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise InvalidParameterError(name, value, f"an integer from {low} to {high}")
