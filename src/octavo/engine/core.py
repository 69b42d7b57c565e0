"""The step loop: admits requests, asks the scheduler for a plan, has the executor run it, folds the tokens in.

One thread owns an Engine. An exception that belongs to one request ends that request; its neighbours go on.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence as SequenceOf
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

from octavo.engine.batch import build_batch
from octavo.engine.request import Drawn, Generation, Logprobs, Request
from octavo.errors import CapacityError, InvalidParameterError, OctavoError, RequestFailedError
from octavo.executor.interface import Executor, StepResult
from octavo.kv.blocks import BlockPool
from octavo.kv.tree import PrefixTree
from octavo.limits import MAX_BATCH_SEQUENCES
from octavo.outputs import Logprob, RequestOutput, TextDelta
from octavo.params import SamplingParams
from octavo.sampling import RowEntry, build_rows, resolve
from octavo.scheduler.budget import TokenBudget
from octavo.scheduler.plan import StepPlan
from octavo.scheduler.scheduler import Scheduler, SchedulerConfig
from octavo.scheduler.sequence import Sequence
from octavo.tokenizer import Tokenizer

log = logging.getLogger("octavo")

Sink = Callable[[TextDelta | RequestOutput], None]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """max_model_len: tokens a sequence may have in all. inter_token_target: seconds between tokens of a stream that
    prompts may take up. chunk_size: a fixed cap on prompt tokens of one sequence in one step (None: the budget's)."""

    max_model_len: int
    max_num_seqs: int = MAX_BATCH_SEQUENCES
    max_rows: int = 512
    policy: str = "fcfs"
    inter_token_target: float = 0.1
    chunk_size: int | None = None


class Engine:
    """Runs requests over an executor. Not thread-safe: see EngineLoop."""

    def __init__(
        self, executor: Executor, tokenizer: Tokenizer, eos_token_ids: frozenset[int], config: EngineConfig
    ) -> None:
        self.executor = executor
        self.tokenizer = tokenizer
        self.config = config
        self._eos_token_ids = eos_token_ids
        pool = BlockPool(executor.num_blocks)
        self.tree = PrefixTree(pool)
        self.scheduler = Scheduler(
            pool,
            self.tree,
            SchedulerConfig(
                policy=config.policy,
                max_sequences=config.max_num_seqs,
                max_rows=config.max_rows,
                chunk_size=config.chunk_size,
            ),
        )
        self.budget = TokenBudget(config.inter_token_target, min_rows=min(32, config.max_rows), max_rows=config.max_rows)
        self._requests: dict[str, Request] = {}
        self._owner: dict[int, tuple[Request, Generation]] = {}  # by sequence id
        self._sequence_ids = count()
        self._steps = 0
        self._step_seconds: deque[float] = deque(maxlen=1024)
        self._executor_seconds: deque[float] = deque(maxlen=1024)

    # Requests in

    def add(self, request: Request, emitted: SequenceOf[SequenceOf[Drawn]] = ()) -> None:
        """Takes a prepared request in; raises CapacityError, and changes nothing, when it can never fit.

        `emitted`: what each of the n outputs already has (a request continued after a crash or a move).
        """
        if request.request_id in self._requests:
            raise InvalidParameterError("request_id", request.request_id, "an id that no running request has")
        for index in range(request.params.n):
            self._generation(request, index, emitted[index] if index < len(emitted) else ())
        waiting = [generation for generation in request.generations if not generation.finished]
        added: list[Sequence] = []
        try:
            for generation in waiting:
                self.scheduler.add(generation.sequence)
                added.append(generation.sequence)
        except CapacityError:
            for sequence in added:
                self.scheduler.cancel(sequence)
            raise
        self._requests[request.request_id] = request
        for generation in waiting:
            self._owner[generation.sequence.id] = (request, generation)
        if not waiting:
            self._complete(request)

    def prepare(
        self, request_id: str, prompt_token_ids: SequenceOf[int], params: SamplingParams, sink: Sink, *, prompt: str | None = None
    ) -> Request:
        """Validates; every frontend's requests pass here. Touches no state and may run on any thread."""
        ids = list(prompt_token_ids)
        if params.truncate_prompt_tokens is not None:
            ids = ids[-params.truncate_prompt_tokens :]
        if not ids:
            raise InvalidParameterError("prompt", prompt if prompt is not None else ids, "at least one token")
        width = self.executor.vocab_size
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < width:
                raise InvalidParameterError("prompt_token_ids", token_id, f"token ids from 0 to {width - 1}")
        resolved = resolve(
            params,
            prompt_len=len(ids),
            vocab_size=width,
            context_len=self.config.max_model_len,
            eos_ids=self._eos_token_ids,
            encode=self._encode_word,
        )
        return Request(request_id, prompt, ids, params, resolved, sink)

    def _encode_word(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _generation(self, request: Request, index: int, emitted: SequenceOf[Drawn]) -> None:
        resolved, ids = request.resolved, request.prompt_token_ids
        cache_limit = None
        if index == 0 and resolved.prompt_logprobs is not None:
            cache_limit = max(resolved.prompt_logprobs_start - 1, 0)
        number = next(self._sequence_ids)
        sequence = Sequence(
            id=number,
            arrival=number,
            token_ids=ids + [drawn.token_id for drawn in emitted],
            prompt_len=len(ids),
            max_total=len(ids) + resolved.max_tokens,
            priority=request.params.priority,
            salt=request.params.cache_salt or "",
            cache_limit=cache_limit,
        )
        generation = Generation(sequence, index, ids, resolved, self.tokenizer)
        request.generations.append(generation)
        for drawn in emitted:
            generation.accept(drawn)

    def cancel(self, request_id: str) -> bool:
        """Ends a request now; its blocks are free when this returns. False when there is no such request."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._end(request, "abort", None)
        return True

    def cancel_all(self) -> None:
        for request_id in list(self._requests):
            self.cancel(request_id)

    def has_work(self) -> bool:
        return bool(self._owner)

    # Steps

    def step(self) -> bool:
        """Runs one step; False when there was nothing to do."""
        begin = time.perf_counter()
        plan = self.scheduler.plan(self.budget.rows(self._decoding()))
        if plan is None:
            return False
        logit_rows, entries, uses = self._logit_rows(plan)
        batch = build_batch(plan, logit_rows)
        sampling = build_rows(entries, self.executor.vocab_size)
        before = time.perf_counter()
        try:
            result = self.executor.step(batch, sampling)
        except Exception as error:  # the executor checks its input: this is a bug or a lost resource, not one request's fault
            log.exception("a step failed; its %d requests are ended", len(plan.sequences))
            self._fail_step(plan, error)
            return True
        after = time.perf_counter()
        self.budget.observe(len(batch.token_ids), after - before)
        self._fold(plan, result, uses, batch.sequence_rows.tolist())
        self._steps += 1
        self._executor_seconds.append(after - before)
        self._step_seconds.append(time.perf_counter() - begin)
        return True

    def _decoding(self) -> bool:
        """Whether a stream is under way that a large step would stall."""
        return any(sequence.num_computed >= sequence.prefill_end for sequence in self.scheduler.running)

    def _logit_rows(self, plan: StepPlan) -> tuple[list[int], list[RowEntry], list[tuple[int, int]]]:
        """Rows whose logits are wanted, how to sample each, and its use: (chunk index, prompt position or -1)."""
        rows: list[int] = []
        entries: list[RowEntry] = []
        uses: list[tuple[int, int]] = []
        row = 0
        for i, chunk in enumerate(plan.sequences):
            request, generation = self._owner[chunk.sequence.id]
            if request.first_scheduled is None:
                request.first_scheduled = time.monotonic()
            if generation.index == 0 and request.prompt_logprobs is not None:
                for position in request.wanted_prompt_rows(chunk.start, chunk.count):
                    rows.append(row + position - chunk.start)
                    entries.append(generation.sampler.prompt_row(request.prompt_token_ids[position + 1]))
                    uses.append((i, position + 1))
            if chunk.samples:
                rows.append(row + chunk.count - 1)
                entries.append(generation.sampler.row(chunk.start + chunk.count))
                uses.append((i, -1))
            row += chunk.count
        return rows, entries, uses

    def _fold(self, plan: StepPlan, result: StepResult, uses: list[tuple[int, int]], row_of: list[int]) -> None:
        finite = result.finite
        bad: set[int] = set()
        if not finite.all():
            bad.update(i for i in range(len(plan.sequences)) if not finite[row_of[i] : row_of[i + 1]].all())
        ok = result.ok.tolist()
        bad.update(i for (i, _), row_ok in zip(uses, ok) if not row_ok)
        self.scheduler.commit(plan, [plan.sequences[i].sequence for i in bad])
        for i in bad:
            owner = self._owner.get(plan.sequences[i].sequence.id)
            if owner is not None:
                error = RequestFailedError("the model produced a NaN or an infinity, or no token was left to draw from")
                self._end(owner[0], "error", error)

        ids, logprobs = result.ids.tolist(), result.logprobs.tolist()
        now = time.monotonic()
        for r, (i, prompt_position) in enumerate(uses):
            owner = self._owner.get(plan.sequences[i].sequence.id)
            if owner is None:  # ended above, together with another output of the same request
                continue
            request, generation = owner
            try:
                if prompt_position >= 0:
                    assert request.prompt_logprobs is not None
                    wanted = request.resolved.prompt_logprobs or 0
                    request.prompt_logprobs[prompt_position] = self._logprobs(result, r, ids[r], logprobs[r], wanted)
                    if prompt_position == len(request.prompt_token_ids) - 1:
                        generation.sequence.cache_limit = None  # all there: a preemption need not compute them again
                    continue
                if request.first_token is None:
                    request.first_token = now
                drawn = Drawn(ids[r])
                if request.resolved.logprobs is not None:
                    drawn = Drawn(ids[r], logprobs[r], self._logprobs(result, r, ids[r], logprobs[r], request.resolved.logprobs))
                self._accept(request, generation, drawn)
            except Exception as error:
                log.exception("request %s failed", request.request_id)
                self._end(request, "error", _as_octavo(error))

    def _accept(self, request: Request, generation: Generation, drawn: Drawn) -> None:
        generation.sequence.append(drawn.token_id)
        text = generation.accept(drawn)
        request.emit(generation, text, drawn)
        if generation.finished:
            self.scheduler.finish(generation.sequence)
            del self._owner[generation.sequence.id]
            if request.finished:
                self._complete(request)

    def _logprobs(self, result: StepResult, row: int, token_id: int, logprob: float, wanted: int) -> Logprobs:
        """The chosen token and the `wanted` most likely, best first."""
        found = {token_id: Logprob(logprob, int(result.ranks[row]), self.tokenizer.token_text(token_id))}
        for rank, (other, value) in enumerate(zip(result.top_ids[row, :wanted].tolist(), result.top_logprobs[row, :wanted].tolist()), 1):
            if other != token_id:
                found[other] = Logprob(value, rank, self.tokenizer.token_text(other))
        return found

    # Requests out

    def _end(self, request: Request, reason: str, error: OctavoError | None) -> None:
        for generation in request.generations:
            if not generation.finished:
                generation.finish_reason = reason
                if error is None:
                    self.scheduler.cancel(generation.sequence)
                else:
                    self.scheduler.finish(generation.sequence, cache=False)
                self._owner.pop(generation.sequence.id, None)
        request.error = error
        self._complete(request)

    def _complete(self, request: Request) -> None:
        self._requests.pop(request.request_id, None)
        request.complete()

    def _fail_step(self, plan: StepPlan, error: Exception) -> None:
        self.scheduler.commit(plan, [chunk.sequence for chunk in plan.sequences])
        for chunk in plan.sequences:
            owner = self._owner.get(chunk.sequence.id)
            if owner is not None:
                self._end(owner[0], "error", _as_octavo(error))

    def flush_cache(self) -> int:
        """Drops every cached block that no running request uses; returns how many."""
        return self.tree.flush()

    def stats(self) -> dict[str, Any]:
        """Counters and gauges; times in seconds, over the last 1,024 steps."""
        return {
            **asdict(self.scheduler.stats()),
            "requests": len(self._requests),
            "steps": self._steps,
            "step_seconds": _summary(self._step_seconds),
            "executor_seconds": _summary(self._executor_seconds),
            "token_budget": self.budget.rows(self._decoding()),
        }


def _as_octavo(error: Exception) -> OctavoError:
    return error if isinstance(error, OctavoError) else RequestFailedError(f"{type(error).__name__} while the request ran")


def _summary(seconds: deque[float]) -> dict[str, float]:
    if not seconds:
        return {"mean": 0.0, "p50": 0.0, "p99": 0.0, "last": 0.0}
    ordered = sorted(seconds)
    return {
        "mean": sum(ordered) / len(ordered),
        "p50": ordered[len(ordered) // 2],
        "p99": ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)],
        "last": seconds[-1],
    }
