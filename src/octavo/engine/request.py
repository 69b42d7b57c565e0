"""A request while it lives: everything but its tokens is a fold over them, rebuilt by the same code after a cut."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence as SequenceOf
from dataclasses import dataclass

from octavo.errors import OctavoError
from octavo.outputs import CompletionOutput, Logprob, RequestOutput, TextDelta, Timings
from octavo.params import SamplingParams
from octavo.sampling import ResolvedParams, SamplerState, StopChecker
from octavo.scheduler.sequence import Sequence
from octavo.tokenizer import IncrementalDetokenizer, Tokenizer

Logprobs = dict[int, Logprob]


@dataclass(frozen=True, slots=True)
class Drawn:
    """One token as the executor drew it; `logprobs` when the request asked for them."""

    token_id: int
    logprob: float | None = None
    logprobs: Logprobs | None = None


class Generation:
    """One of a request's n outputs."""

    def __init__(self, sequence: Sequence, index: int, prompt_ids: list[int], resolved: ResolvedParams, tokenizer: Tokenizer) -> None:
        self.sequence = sequence
        self.index = index
        self.sampler = SamplerState(resolved, prompt_ids, index)
        self._resolved = resolved
        self._detokenizer = IncrementalDetokenizer(tokenizer, resolved.skip_special_tokens, at_start=False)
        self._stops = StopChecker(resolved)
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[Logprobs] | None = [] if resolved.logprobs is not None else None
        self._cumulative_logprob = 0.0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def accept(self, drawn: Drawn) -> str:
        """Folds one token in; returns the text it makes final. Sets finish_reason when it ends the output."""
        token_id = drawn.token_id
        self._token_ids.append(token_id)
        self.sampler.append(token_id)
        if self._logprobs is not None:
            self._logprobs.append(drawn.logprobs or {})
            self._cumulative_logprob += drawn.logprob or 0.0
        delta = "" if self._stops.silences(token_id) else self._detokenizer.push(token_id)
        text, reason, stop = self._stops.push(token_id, delta)
        if reason is not None:
            self.finish_reason, self.stop_reason = reason, stop
            if not isinstance(stop, str):  # behind a stop string nothing is shown
                text += self._detokenizer.flush()
        self._text.append(text)
        return text

    def output(self) -> CompletionOutput:
        return CompletionOutput(
            index=self.index,
            text="".join(self._text),
            token_ids=list(self._token_ids),
            cumulative_logprob=self._cumulative_logprob if self._logprobs is not None else None,
            logprobs=None if self._logprobs is None else list(self._logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


class Request:
    """One request and its n generations. `sink` gets a TextDelta for each token and the RequestOutput at the end."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        resolved: ResolvedParams,
        sink: Callable[[TextDelta | RequestOutput], None],
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.resolved = resolved
        self.generations: list[Generation] = []
        self.arrival = time.monotonic()
        self.first_scheduled: float | None = None
        self.first_token: float | None = None
        self.error: OctavoError | None = None
        # The logprob of each prompt token given those before it; the first has none. None where not (yet) known.
        self.prompt_logprobs: list[Logprobs | None] | None = None
        if resolved.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * len(prompt_token_ids)
        self._sink = sink

    @property
    def finished(self) -> bool:
        return all(generation.finished for generation in self.generations)

    def wanted_prompt_rows(self, start: int, count: int) -> range:
        """Positions within [start, start + count) whose logits give a prompt logprob that is still missing."""
        if self.prompt_logprobs is None:
            return range(0)
        first = max(start, self.resolved.prompt_logprobs_start - 1, 0)
        last = min(start + count, len(self.prompt_token_ids) - 1)
        while first < last and self.prompt_logprobs[first + 1] is not None:
            first += 1
        return range(first, last)

    def emit(self, generation: Generation, text: str, drawn: Drawn) -> None:
        self._sink(
            TextDelta(
                request_id=self.request_id,
                index=generation.index,
                text=text,
                token_ids=[drawn.token_id],
                logprobs=None if drawn.logprobs is None else [drawn.logprobs],
                finish_reason=generation.finish_reason,
                stop_reason=generation.stop_reason,
            )
        )

    def complete(self) -> None:
        """Hands the final output over; call once, when nothing of the request runs any more."""
        self._sink(self.output())

    def output(self) -> RequestOutput:
        finished = self.finished
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=None if self.prompt_logprobs is None else list(self.prompt_logprobs),
            outputs=[generation.output() for generation in self.generations],
            finished=finished,
            seed=self.resolved.seed,
            num_cached_tokens=self.generations[0].sequence.num_cached if self.generations else 0,
            timings=Timings(self.arrival, self.first_scheduled, self.first_token, time.monotonic() if finished else None),
            error=self.error,
        )
