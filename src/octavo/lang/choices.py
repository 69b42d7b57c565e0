"""How `select` picks a choice from the log-probabilities of the choices' tokens."""

from __future__ import annotations

from dataclasses import dataclass
from math import fsum


@dataclass(frozen=True, slots=True)
class Scored:
    """One choice: its token ids, the logprob of each given the prompt, and without the prompt where that was asked."""

    token_ids: list[int]
    logprobs: list[float]
    unconditional: list[float] | None = None

    @property
    def mean(self) -> float:
        return fsum(self.logprobs) / len(self.logprobs)

    @property
    def gain(self) -> float:
        """Mean of how much likelier the prompt makes each token."""
        assert self.unconditional is not None
        gains = [given - alone for given, alone in zip(self.logprobs, self.unconditional)]
        return fsum(gains) / len(gains)


def pick(method: str, scored: list[Scored]) -> int:
    """The index of the choice; of equals the first.

    token_length_normalized: the best mean logprob. greedy_token_selection: token by token, those stay that have the
    best one at that place; a choice that has ended stands there with its mean. unconditional_likelihood_normalized:
    the best gain over the choice without the prompt, which takes out how common it is by itself.
    """
    if method == "greedy_token_selection":
        return _greedy(scored)
    values = [each.gain if method == "unconditional_likelihood_normalized" else each.mean for each in scored]
    return values.index(max(values))


def _greedy(scored: list[Scored]) -> int:
    remaining = list(range(len(scored)))
    for position in range(max(len(each.logprobs) for each in scored)):
        values = [_at(scored[i], position) for i in remaining]
        best = max(values)
        remaining = [i for i, value in zip(remaining, values) if value == best]
        if len(remaining) == 1:
            break
    return remaining[0]


def _at(scored: Scored, position: int) -> float:
    return scored.logprobs[position] if position < len(scored.logprobs) else scored.mean
