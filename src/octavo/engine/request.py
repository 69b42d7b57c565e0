"""A request while it lives: everything but its tokens is a fold over them, rebuilt by the same code after a cut."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from octavo.errors import OctavoError, RequestFailedError
from octavo.grammar import Constraint, Grammar
from octavo.outputs import CompletionOutput, Logprob, RequestOutput, TextDelta, Timings
from octavo.params import SamplingParams
from octavo.sampling import ResolvedParams, SamplerState, StopChecker
from octavo.scheduler.sequence import Sequence
from octavo.tokenizer import IncrementalDetokenizer, Tokenizer

log = logging.getLogger("octavo")

Logprobs = dict[int, Logprob]
Sink = Callable[[TextDelta | RequestOutput], None]


@dataclass(frozen=True, slots=True)
class Drawn:
    """One token as the executor drew it; `logprobs` when the request asked for them."""

    token_id: int
    logprob: float | None = None
    logprobs: Logprobs | None = None


class Generation:
    """One of a request's n outputs. `streams`: its text is wanted token by token, not only at the end.

    With slots, and what each token needs in one object: in the step loop every object touched is a cache miss.
    """

    __slots__ = (
        *("sequence", "index", "sampler", "streams", "num_logprobs", "finish_reason", "stop_reason"),
        *("_resolved", "_detokenizer", "_stops", "_text", "_token_ids", "_logprobs", "_cumulative_logprob"),
        *("_reads_late", "_num_read", "_end_ids", "_end"),
    )

    def __init__(
        self,
        sequence: Sequence,
        index: int,
        prompt_ids: list[int],
        resolved: ResolvedParams,
        tokenizer: Tokenizer,
        streams: bool = True,
        grammar: Grammar | None = None,
    ) -> None:
        self.sequence = sequence
        self.index = index
        self.sampler = SamplerState(resolved, prompt_ids, index, None if grammar is None else Constraint(grammar))
        self.streams = streams
        self.num_logprobs = resolved.logprobs
        self._resolved = resolved
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, resolved.skip_special_tokens, at_start=False, shown_ids=resolved.shown_special_ids
        )
        self._stops = StopChecker(resolved)
        self._text: list[str] = []
        # The prompt's, then the output's; those from `_end` on are foreseen: sure to come, but not accepted yet.
        self._token_ids = sequence.token_ids
        self._end = len(self._token_ids)
        self._logprobs: list[Logprobs] | None = [] if resolved.logprobs is not None else None
        self._cumulative_logprob = 0.0
        # Text that nobody waits for, and that can't hold a stop string, is made when a token may end the output.
        self._reads_late = not streams and not resolved.stop
        self._num_read = len(self._token_ids)  # tokens whose text is made, or need not be
        self._end_ids = resolved.eos_ids | resolved.stop_token_ids
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def num_tokens(self) -> int:
        return self._end - self.sequence.prompt_len

    @property
    def foreseen(self) -> range:
        """Positions in the sequence of tokens that are sure to come, and wait for their logprobs."""
        return range(self._end, len(self._token_ids))

    def foresee(self, token_id: int) -> None:
        """Appends a token to the sequence, and to what decides on the next one."""
        self._token_ids.append(token_id)
        if self.sampler.edits_logits:
            self.sampler.append(token_id)

    def accept(self, token_id: int, logprob: float | None = None, logprobs: Logprobs | None = None) -> str:
        """Makes one token part of the output: the next one foreseen, or else a new one.

        Returns the text it makes final. Sets finish_reason when it ends the output.
        """
        if self._end == len(self._token_ids):
            self.foresee(token_id)
        self._end += 1
        complete = self.sampler.constraint is not None and self._end == len(self._token_ids) and self.sampler.complete
        if self._logprobs is not None:
            self._logprobs.append(logprobs or {})
            self._cumulative_logprob += logprob or 0.0
        if self._reads_late and token_id not in self._end_ids and self._end < self.sequence.max_total and not complete:
            return ""
        self._catch_up(self._end - 1)
        return self._read(token_id, complete)

    def _catch_up(self, end: int) -> None:
        """Makes the text of the tokens before `end` not read yet: all of it is shown, as none could end the output."""
        unread = self._token_ids[self._num_read : end]
        if unread:
            self._num_read = end
            self._stops.pass_over(len(unread))
            self._text.append(self._detokenizer.push_all(unread))

    def _read(self, token_id: int, complete: bool) -> str:
        self._num_read += 1
        delta = "" if self._stops.silences(token_id) else self._detokenizer.push(token_id)
        text, reason, stop = self._stops.push(token_id, delta, complete)
        if reason is not None:
            if not isinstance(stop, str):  # behind a stop string nothing is shown
                text, found = self._with_last_bytes(text)
                if found is not None:
                    reason, stop = "stop", found
            self.finish_reason, self.stop_reason = reason, stop
        self._text.append(text)
        return text

    def _with_last_bytes(self, text: str) -> tuple[str, str | None]:
        """The end of the text with what the detokenizer held back, bytes that now become no character.

        They too may complete a stop string, which then begins in `text`: it was held back for it.
        """
        whole = text + self._detokenizer.flush()
        found: tuple[int, int, str] | None = None
        for stop in self._resolved.stop:
            start = whole.find(stop, max(0, len(text) - len(stop) + 1))
            if start >= 0:
                end = start + len(stop)
                found = min(found or (end, start, stop), (end, start, stop))  # the first to end, the longest of those
        if found is None:
            return whole, None
        end, start, stop = found
        return whole[: end if self._resolved.include_stop_str_in_output else start], stop

    def output(self) -> CompletionOutput:
        self._catch_up(self._end)
        return CompletionOutput(
            index=self.index,
            text="".join(self._text),
            token_ids=self._token_ids[self.sequence.prompt_len : self._end],
            cumulative_logprob=self._cumulative_logprob if self._logprobs is not None else None,
            logprobs=None if self._logprobs is None else list(self._logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


class Request:
    """One request and its n generations.

    `sink` gets the RequestOutput at the end, and before it, if it `streams`, a TextDelta for each token.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        resolved: ResolvedParams,
        sink: Sink,
        streams: bool = True,
        grammar: Grammar | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.resolved = resolved
        self.streams = streams
        self.grammar = grammar
        self.generations: list[Generation] = []
        self.scorer: Generation | None = None  # the generation whose prefill gives the prompt logprobs
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

    def score(self, position: int, logprobs: Logprobs) -> None:
        """The logprobs of the prompt token at `position`."""
        assert self.prompt_logprobs is not None
        assert self.scorer is not None
        self.prompt_logprobs[position] = logprobs
        if position == len(self.prompt_token_ids) - 1:
            self.scorer.sequence.cache_limit = None  # all there: a preemption need not compute them again

    @property
    def num_output_tokens(self) -> int:
        """So far, of all its outputs. May be asked from any thread."""
        return sum(generation.num_tokens for generation in self.generations)

    def emit(self, generation: Generation, text: str, token_id: int, logprobs: Logprobs | None) -> None:
        self._sink(
            TextDelta(
                request_id=self.request_id,
                index=generation.index,
                text=text,
                token_ids=[token_id],
                logprobs=None if logprobs is None else [logprobs],
                finish_reason=generation.finish_reason,
                stop_reason=generation.stop_reason,
            )
        )

    def complete(self) -> None:
        """Hands the final output over; call once, when nothing of the request runs any more."""
        try:
            output = self.output()
        except Exception as error:  # an end must come, or its listener waits for ever
            log.exception("request %s has no output", self.request_id)
            output = self.refused(RequestFailedError(f"{type(error).__name__} while the output was made"))
        try:
            self._sink(output)
        except Exception:  # the listener is broken, the engine is not
            log.exception("the end of request %s could not be delivered", self.request_id)

    def refused(self, error: OctavoError) -> RequestOutput:
        """What stands for a request that gave nothing but an error."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[],
            finished=True,
            error=error,
        )

    def output(self) -> RequestOutput:
        cached = self.generations[0].sequence.num_cached if self.generations else 0
        ended = time.monotonic() if self.finished else None
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=None if self.prompt_logprobs is None else list(self.prompt_logprobs),
            outputs=[generation.output() for generation in self.generations],
            finished=self.finished,
            seed=self.resolved.seed,
            num_cached_tokens=min(cached, len(self.prompt_token_ids)),
            timings=Timings(self.arrival, self.first_scheduled, self.first_token, ended),
            error=self.error,
        )
