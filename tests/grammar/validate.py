"""Outputs of a tiny model with random weights, the best adversary, under schemas; each is validated by `jsonschema`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from octavo.errors import InvalidParameterError
from octavo.limits import BLOCK_TOKENS
from octavo.params import SamplingParams
from tests.exact.machine import Model
from tests.grammar.random_schemas import SchemaMaker
from tests.support.engines import Inbox, engine_of, load_tiny

MAX_TOKENS = 240


def sampled(model: Model, jobs: Sequence[tuple[Any, int]], **options: Any) -> list[Any]:
    """For each (schema, seed) a RequestOutput, or the InvalidParameterError; all in batches, and twice, with
    jump-forward on and off, which must agree."""
    answers: dict[bool, list[Any]] = {}
    for jump in (True, False):
        inboxes: list[Any] = []
        with engine_of(model, num_blocks=32 * (MAX_TOKENS // BLOCK_TOKENS + 2), jump_forward=jump) as engine:
            for i, (schema, seed) in enumerate(jobs):
                inbox = Inbox()
                tight = seed % 2 == 0
                params = SamplingParams(
                    structured={"json": schema, "disable_any_whitespace": tight},
                    **{"max_tokens": MAX_TOKENS, "seed": seed, "temperature": 1.0, **options},
                )
                try:
                    engine.add(engine.prepare(f"s{i}", [5, 6, 7], params, inbox, streams=False))
                except InvalidParameterError as error:
                    inboxes.append(error)
                else:
                    inboxes.append(inbox)
            while engine.has_work():
                engine.step()
        answers[jump] = [each if isinstance(each, InvalidParameterError) else each.output for each in inboxes]
    for on, off in zip(answers[True], answers[False]):
        if not isinstance(on, InvalidParameterError):
            assert on.outputs[0].token_ids == off.outputs[0].token_ids
    return answers[True]


def check_random_schemas(model: Model, seeds: Sequence[int], outputs_each: int = 2) -> Counter[str]:
    """Every output is valid, or cut at max_tokens and marked. Returns how often each happened."""
    jobs = [(SchemaMaker(seed).schema(), 2 * seed + k) for seed in seeds for k in range(outputs_each)]
    found: Counter[str] = Counter()
    for (schema, seed), output in zip(jobs, sampled(model, jobs)):
        if isinstance(output, InvalidParameterError):
            found["refused"] += 1
            continue
        assert output.error is None, (schema, seed, output.error)
        completion = output.outputs[0]
        found[str(completion.finish_reason)] += 1
        if completion.finish_reason == "stop":
            check_value(schema, completion.text)
    return found


def check_value(schema: Any, text: str) -> None:
    """Formats included: those that `jsonschema` can check here."""
    validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    problems = [error.message for error in validator.iter_errors(json.loads(text))]
    assert problems == [], (schema, text, problems)


def main() -> None:
    """500 schemas, in groups that fit a batch."""
    import tempfile

    total: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        model = load_tiny(Path(folder))
        for first in range(0, 500, 50):
            total += check_random_schemas(model, range(first, first + 50))
    print(f"500 schemas: {dict(total)}; every output is valid, or was cut at {MAX_TOKENS} tokens")


if __name__ == "__main__":
    main()
