"""What a user gets: names and meanings are vLLM's, with the seed, timings and an error beside them."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.errors import OctavoError


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability under the raw logits; rank 1 is the most likely."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's outputs.

    logprobs: for each token id, itself and the most likely ids; None unless asked for.
    finish_reason: "stop", "length", "abort", "error" or None while running. stop_reason: the stop string or stop token
    id that ended it; None for the model's end of sequence.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None

    def __repr__(self) -> str:
        return (
            f"CompletionOutput(index={self.index}, text={_short(self.text)}, tokens={len(self.token_ids)}, "
            f"finish_reason={self.finish_reason!r}, stop_reason={self.stop_reason!r})"
        )


@dataclass(slots=True)
class Timings:
    """Moments of a request in monotonic seconds; None when not reached."""

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None

    @property
    def queue_time(self) -> float | None:
        """Seconds from arrival until the request first ran."""
        return None if self.first_scheduled is None else self.first_scheduled - self.arrival

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def latency(self) -> float | None:
        """Seconds from arrival to the end."""
        return None if self.finished is None else self.finished - self.arrival


@dataclass(slots=True)
class RequestOutput:
    """A request with its outputs, in order of index.

    prompt: None when token ids were given. prompt_logprobs: an entry a prompt token, None for the first and for those
    not asked for. seed: what makes the same answer again. num_cached_tokens: prompt tokens found in the prefix cache.
    error: why the request was refused or failed; outputs then hold what there is.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    seed: int | None = None
    num_cached_tokens: int = 0
    timings: Timings | None = None
    error: OctavoError | None = None

    def __repr__(self) -> str:
        prompt = f"{len(self.prompt_token_ids)} tokens" if self.prompt is None else _short(self.prompt)
        error = "" if self.error is None else f", error={self.error!r}"
        return (
            f"RequestOutput(request_id={self.request_id!r}, prompt={prompt}, outputs={self.outputs!r}, "
            f"finished={self.finished}, seed={self.seed}, num_cached_tokens={self.num_cached_tokens}{error})"
        )


@dataclass(slots=True)
class TextDelta:
    """What one step adds to one output of a streamed request. Concatenated texts are the output's text."""

    request_id: str
    index: int
    text: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


def _short(text: str, most: int = 60) -> str:
    return repr(text) if len(text) <= most else repr(text[:most]) + "…"
