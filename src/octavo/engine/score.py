"""The log-probabilities of given continuations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from typing import Any, Protocol

from octavo.engine.prompts import read_prompt
from octavo.errors import InvalidParameterError
from octavo.outputs import RequestOutput
from octavo.params import SamplingParams
from octavo.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Score:
    """A continuation's tokens, and the logprob of each given the prompt and those before it.

    num_cached_tokens: of the prompt's, those found in the prefix cache.
    """

    token_ids: list[int]
    logprobs: list[float]
    num_cached_tokens: int = 0

    @property
    def logprob(self) -> float:
        """Of the whole continuation."""
        return fsum(self.logprobs)


class Generates(Protocol):
    """What this needs of an LLM."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    def generate(self, prompts: Any, sampling_params: Any, *, use_tqdm: bool) -> list[RequestOutput]: ...


def score(llm: Generates, prompt: Any, continuations: Any) -> list[Score]:
    """See LLM.score."""
    before = _ids(llm, "prompt", prompt, special=True)
    if isinstance(continuations, str) or not isinstance(continuations, Sequence):
        raise InvalidParameterError("continuations", continuations, "a list of texts or of lists of token ids")
    behind = [_ids(llm, f"continuations[{i}]", each, special=False) for i, each in enumerate(continuations)]
    return score_pairs(llm, [(before, ids) for ids in behind])


def score_pairs(llm: Generates, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Score]:
    """(prompt, continuation) as token ids, all in one batch; none of them is empty."""
    if not pairs:
        return []
    outputs = llm.generate(
        [[*before, *behind] for before, behind in pairs],
        [score_params(len(before)) for before, _ in pairs],
        use_tqdm=False,
    )
    scores = []
    for (before, behind), output in zip(pairs, outputs):
        if output.error is not None:
            raise output.error
        found = continuation_logprobs(output.prompt_logprobs or [], len(before), behind)
        scores.append(Score(list(behind), found, output.num_cached_tokens))
    return scores


def score_params(start: int, *, priority: int = 0, cache_salt: str | None = None) -> SamplingParams:
    """For a prompt of `start` tokens with a continuation behind it."""
    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=0,
        prompt_logprobs_start=start,
        priority=priority,
        cache_salt=cache_salt,
    )


class HasLogprob(Protocol):
    @property
    def logprob(self) -> float: ...


def continuation_logprobs(
    entries: Sequence[Mapping[int, HasLogprob] | None], start: int, behind: Sequence[int]
) -> list[float]:
    """From prompt logprobs, of the tokens `behind` the first `start`."""
    found = []
    for position, token_id in enumerate(behind, start):
        entry = entries[position]
        assert entry is not None
        found.append(entry[token_id].logprob)
    return found


def _ids(llm: Generates, name: str, given: Any, *, special: bool) -> list[int]:
    text, ids = read_prompt(given)
    if text is not None:
        ids = llm.tokenizer.encode(text, add_special_tokens=special)
    if not ids:
        raise InvalidParameterError(name, given, "at least one token")
    return ids
