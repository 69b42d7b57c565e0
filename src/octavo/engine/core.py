"""The step loop: admits requests, asks the scheduler for a plan, has the executor run it, folds the tokens in.

One thread owns an Engine. An exception that belongs to one request ends that request; its neighbours go on. One that
belongs to a step ends the requests in that step, or passes to a supervisor. Any other is a broken promise of our own,
and passes to the caller.
"""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

from octavo.engine.batch import DRAW, LogitRows, build_batch
from octavo.engine.request import Drawn, Generation, Logprobs, Request, Sink
from octavo.engine.rows import choose_rows, find_bad_rows
from octavo.engine.step_times import StepTimes
from octavo.errors import CapacityError, EngineClosedError, InvalidParameterError, OctavoError, RequestFailedError
from octavo.executor.interface import Executor, StepResult
from octavo.executor.threads import default_threads
from octavo.grammar import GrammarCompiler, MaskBuffer
from octavo.grammar.vocabulary import Vocabulary
from octavo.kv.blocks import BlockPool
from octavo.kv.tree import PrefixTree
from octavo.limits import MAX_BATCH_SEQUENCES
from octavo.outputs import Logprob
from octavo.params import SamplingParams
from octavo.sampling import resolve
from octavo.scheduler.budget import TokenBudget
from octavo.scheduler.plan import StepPlan
from octavo.scheduler.scheduler import Scheduler, SchedulerConfig
from octavo.scheduler.sequence import Sequence
from octavo.tokenizer import Tokenizer

log = logging.getLogger("octavo")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """max_model_len: tokens a sequence may have in all. inter_token_target: seconds between tokens of a stream that
    prompts may take up. chunk_size: a fixed cap on prompt tokens of one sequence in one step (None: the budget's).
    jump_forward: tokens that a grammar forces are appended at once, not drawn one a step; the answer is the same.
    enable_prefix_caching: False: no sequence finds what another one computed; the answer is the same."""

    max_model_len: int
    max_num_seqs: int = MAX_BATCH_SEQUENCES
    max_rows: int = 512
    policy: str = "fcfs"
    inter_token_target: float = 0.1
    chunk_size: int | None = None
    jump_forward: bool = True
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        most = min(MAX_BATCH_SEQUENCES, self.max_rows)
        if type(self.max_num_seqs) is not int or not 1 <= self.max_num_seqs <= most:
            raise InvalidParameterError("max_num_seqs", self.max_num_seqs, f"an integer from 1 to {most}")
        if self.chunk_size is not None and (type(self.chunk_size) is not int or self.chunk_size < 1):
            raise InvalidParameterError("chunk_size", self.chunk_size, "an integer of at least 1, or None")
        if type(self.inter_token_target) not in (int, float) or not self.inter_token_target > 0:
            raise InvalidParameterError("inter_token_target", self.inter_token_target, "seconds, more than 0")
        for name in ("jump_forward", "enable_prefix_caching"):
            if type(getattr(self, name)) is not bool:
                raise InvalidParameterError(name, getattr(self, name), "True or False")


class Engine:
    """Runs requests over an executor. Not thread-safe: see EngineLoop."""

    def __init__(
        self, executor: Executor, tokenizer: Tokenizer, eos_token_ids: frozenset[int], config: EngineConfig
    ) -> None:
        self.executor = executor
        self.tokenizer = tokenizer
        self.config = config
        self._eos_token_ids = eos_token_ids
        self._vocab_size = executor.vocab_size
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
        self.budget = TokenBudget(config.inter_token_target, min(32, config.max_rows), config.max_rows)
        self._requests: dict[str, Request] = {}
        self._owner: dict[int, tuple[Request, Generation]] = {}  # by sequence id: what is waiting or running
        self._sequence_ids = count()
        self._steps = 0
        self._times = StepTimes()
        self.grammars = GrammarCompiler(lambda: Vocabulary(tokenizer, executor.vocab_size, eos_token_ids))
        self._masks = MaskBuffer(executor.vocab_size, default_threads())
        self.jump_forward_tokens = 0  # tokens appended without a draw
        # For an engine under supervision: its end, and a replay one by one, tell whose fault a failed step was.
        self.raises_step_errors = False

    # Requests in

    def prepare(
        self,
        request_id: str,
        prompt_token_ids: Iterable[int],
        params: SamplingParams,
        sink: Sink,
        *,
        prompt: str | None = None,
        streams: bool = True,
    ) -> Request:
        """Validates; every frontend's requests pass here. Touches no state and may run on any thread.

        `streams`: the sink wants a TextDelta for each token, not only the RequestOutput at the end.
        """
        width = self._vocab_size
        ids = list(prompt_token_ids)
        if params.truncate_prompt_tokens is not None:
            ids = ids[-params.truncate_prompt_tokens :]
        if not ids:
            raise InvalidParameterError("prompt", ids if prompt is None else prompt, "at least one token")
        ids = _checked_ids("prompt_token_ids", ids, width)
        resolved = resolve(
            params,
            prompt_len=len(ids),
            vocab_size=width,
            context_len=self.config.max_model_len,
            eos_ids=self._eos_token_ids,
            encode=lambda text: self.tokenizer.encode(text, add_special_tokens=False),
        )
        grammar = None if params.structured is None else self.grammars.compile(params.structured)
        return Request(request_id, prompt, ids, params, resolved, sink, streams, grammar)

    def add(self, request: Request, emitted: SequenceOf[SequenceOf[Drawn]] = ()) -> None:
        """Takes a prepared request in; when it raises, nothing has changed. CapacityError: it can never fit.

        `emitted`: what each of the n outputs already has (a request continued after a crash or a move).
        """
        if request.request_id in self._requests:
            raise InvalidParameterError("request_id", request.request_id, "an id that no running request has")
        if len(emitted) > request.params.n:
            raise InvalidParameterError("emitted", len(emitted), f"tokens for at most n={request.params.n} outputs")
        generations = [
            self._generation(request, index, emitted[index] if index < len(emitted) else ())
            for index in range(request.params.n)
        ]
        waiting = [generation for generation in generations if not generation.finished]
        scorer = waiting[0] if waiting and request.wanted_prompt_rows(0, len(request.prompt_token_ids)) else None
        if scorer is not None:
            scorer.sequence.cache_limit = max(request.resolved.prompt_logprobs_start - 1, 0)
        added: list[Sequence] = []
        try:
            for generation in waiting:
                self.scheduler.add(generation.sequence)
                added.append(generation.sequence)
        except CapacityError:
            for sequence in added:
                self.scheduler.cancel(sequence)
            raise
        request.generations, request.scorer = generations, scorer
        self._requests[request.request_id] = request
        for generation in waiting:
            self._owner[generation.sequence.id] = (request, generation)
        if not waiting:
            self._complete(request)

    def _generation(self, request: Request, index: int, emitted: SequenceOf[Drawn]) -> Generation:
        resolved, ids = request.resolved, request.prompt_token_ids
        emitted_ids = _checked_ids("emitted", [drawn.token_id for drawn in emitted], self._vocab_size)
        number = next(self._sequence_ids)
        salt = request.params.cache_salt or ""
        if not self.config.enable_prefix_caching:
            salt = f"{salt}\0{number}"  # its own blocks are still there for it after a preemption
        sequence = Sequence(
            id=number,
            arrival=number,
            token_ids=list(ids),
            prompt_len=len(ids),
            max_total=len(ids) + resolved.max_tokens,
            priority=request.params.priority,
            salt=salt,
        )
        generation = Generation(sequence, index, ids, resolved, self.tokenizer, request.streams, request.grammar)
        for token_id, drawn in zip(emitted_ids, emitted):
            if generation.finished:
                raise InvalidParameterError("emitted", len(emitted), "no token behind the one that ends the output")
            generation.accept(token_id, drawn.logprob, drawn.logprobs)
        return generation

    def cancel(self, request_id: str) -> bool:
        """Ends a request now; its blocks are free when this returns. False when there is no such request."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._end(request, "abort", None)
        return True

    def find(self, request_id: str) -> Request | None:
        """The request, until it is over."""
        return self._requests.get(request_id)

    def has_work(self) -> bool:
        return bool(self._owner)

    # Steps

    def step(self) -> bool:
        """Runs one step; False when there was nothing to do."""
        if not self._owner:
            return False
        begin = time.perf_counter()
        plan = self.scheduler.plan(0 if self.scheduler.only_decodes() else self._token_budget())
        if plan is None:
            raise RuntimeError(f"{len(self._owner)} sequences wait and none can run")
        errors: dict[int, Exception] = {}  # by chunk
        wanted = choose_rows(plan, self._owner, self._masks, errors)
        try:
            sampling = wanted.sampling(self._vocab_size, errors)
            batch = build_batch(plan, wanted.rows)
            before = time.perf_counter()
            result = self.executor.step(batch, sampling)
            after = time.perf_counter()
        except Exception as error:  # it checks its input: a bug or a lost resource, no single request's fault
            if self.raises_step_errors:
                raise
            log.exception("a step failed; its requests are ended")
            self._fail(plan, dict.fromkeys(range(len(plan.sequences)), error) | errors)
            return True
        self.budget.observe(plan.rows, after - before)
        if 0 in result.finite or 0 in result.ok:
            find_bad_rows(plan, result, wanted, errors)
        if errors:
            self._fail(plan, errors)
        else:
            self.scheduler.commit(plan)
        self._fold(plan, result, wanted)
        self._steps += 1
        self._times.seconds.append((time.perf_counter() - begin, after - before))
        return True

    def _token_budget(self) -> int:
        """Streams under way are what a large step would stall."""
        return self.budget.rows(decoding=self.scheduler.num_decoding > 0)

    def _fail(self, plan: StepPlan, errors: dict[int, Exception]) -> None:
        """Counts the step's progress, except for the chunks in `errors`, whose requests are ended."""
        self.scheduler.commit(plan, [plan.sequences[i].sequence for i in errors])
        for i, error in errors.items():
            owner = self._owner.get(plan.sequences[i].sequence.id)
            if owner is not None:
                self._end(owner[0], "error", error)

    def _fold(self, plan: StepPlan, result: StepResult, wanted: LogitRows) -> None:
        now = time.monotonic()
        for row, (index, use) in enumerate(wanted.uses):
            chunk = plan.sequences[index]
            owner = self._owner.get(chunk.sequence.id)
            if owner is None:  # ended above, perhaps for another output of the same request
                continue
            request, generation = owner
            try:
                if DRAW < use < chunk.sequence.prompt_len:
                    request.score(use, self._logprobs(result, row, request.resolved.prompt_logprobs or 0))
                    continue
                if chunk.start < chunk.sequence.prefill_end and request.first_token is None:
                    request.first_token = now
                if use == DRAW and index in wanted.undrawable:
                    raise wanted.undrawable[index]
                self._accept(request, generation, result, row)
                if generation.finished or generation.sampler.constraint is None:
                    continue
                if use == DRAW and self.config.jump_forward:
                    self._jump(request, generation)
                if generation.num_logprobs is not None and not generation.finished:
                    # The row before the first token that waits for its logprobs must be computed, come what may.
                    foreseen = generation.foreseen
                    generation.sequence.cache_limit = foreseen.start - 1 if foreseen else None
            except RequestFailedError as error:
                self._end(request, "error", error)
            except Exception as error:
                log.exception("request %s failed", request.request_id)
                self._end(request, "error", error)

    def _accept(self, request: Request, generation: Generation, result: StepResult, row: int) -> None:
        token_id = result.ids[row]
        if not 0 <= token_id < self._vocab_size:
            raise ValueError(f"the executor drew token {token_id}")
        logprobs = None
        if generation.num_logprobs is not None:
            logprobs = self._logprobs(result, row, generation.num_logprobs)
        self._deliver(request, generation, token_id, result.logprobs[row], logprobs)

    def _jump(self, request: Request, generation: Generation) -> None:
        """Appends the tokens that the grammar forces next: they are computed together, and not drawn.

        Where logprobs are asked for they are foreseen only, and delivered with them.
        """
        sequence = generation.sequence
        before = len(sequence.token_ids)
        while not generation.finished and len(sequence.token_ids) < sequence.max_total:
            token_id = generation.sampler.forced()
            if token_id is None:
                break
            if generation.num_logprobs is None:
                self._deliver(request, generation, token_id, None, None)
            else:
                generation.foresee(token_id)
        jumped = len(sequence.token_ids) - before
        self.jump_forward_tokens += jumped
        if jumped and not generation.finished:
            self.scheduler.extend(sequence)

    def _deliver(
        self, request: Request, generation: Generation, token_id: int, logprob: float | None, logprobs: Logprobs | None
    ) -> None:
        text = generation.accept(token_id, logprob, logprobs)
        finished = generation.finish_reason is not None
        if finished:
            del self._owner[generation.sequence.id]  # first of all: what follows may fail
            self.scheduler.finish(generation.sequence)
        if generation.streams:
            request.emit(generation, text, token_id, logprobs)
        if finished and request.finished:
            self._complete(request)

    def _logprobs(self, result: StepResult, row: int, k: int) -> Logprobs:
        """The row's token itself, then the k most likely, best first."""
        token_id = result.ids[row]
        found = {token_id: Logprob(result.logprobs[row], result.ranks[row], self.tokenizer.token_text(token_id))}
        for rank, (other, value) in enumerate(zip(result.top_ids[row][:k], result.top_logprobs[row]), 1):
            if other != token_id:
                found[other] = Logprob(value, rank, self.tokenizer.token_text(other))
        return found

    # Requests out

    def _end(self, request: Request, reason: str, error: Exception | None) -> None:
        """Ends what still runs of a request. What it has computed stays in the cache unless it failed."""
        for generation in request.generations:
            if self._owner.pop(generation.sequence.id, None) is not None:
                generation.finish_reason = reason
                self.scheduler.finish(generation.sequence, cache=error is None)
        request.error = None if error is None else _as_octavo(error)
        self._complete(request)

    def _complete(self, request: Request) -> None:
        if self._requests.pop(request.request_id, None) is not None:
            request.complete()

    def close(self, error: EngineClosedError) -> None:
        """The end: whoever waits gets the error. Relies on nothing but the list of requests: all else may be broken."""
        requests = list(self._requests.values())
        self._requests.clear()
        self._owner.clear()
        for request in requests:
            for generation in request.generations:
                generation.finish_reason = generation.finish_reason or "abort"
            request.error = error
            request.complete()
        self.executor.close()

    # Numbers

    def flush_cache(self) -> int:
        """Drops every cached block that no running request uses; returns how many."""
        return self.scheduler.flush()

    def stats(self) -> dict[str, Any]:
        """Numbers now, and totals since the start. A block holds 16 tokens.

        blocks_free + blocks_cached + blocks_used = blocks_total: never used or given up; kept for later prompts, and
        evictable; in use by a running sequence. waste_percent: share of the used blocks that holds no token of its own.
        requests, running, waiting: requests in all, and sequences (n a request) that run or queue.
        prefix_hit_tokens: prompt tokens that the cache spared new sequences, copied_tokens of them by copying within a
        block; recompute_hit_tokens: the same for sequences that come back from a preemption. computed_tokens: tokens
        the model computed. preemptions, evictions, shared_blocks, prefix_waits, aged: see SchedulerStats.
        steps: steps run. step_seconds, executor_seconds, overhead_seconds (their difference): mean, p50, p99 and last
        of the last 1,024 steps. token_budget: rows the next step may have. jump_forward_tokens: tokens that a grammar
        forced and no step had to draw. grammars_compiled, also the refused ones; grammar_cache_hits;
        grammar_seconds: spent on compiling, on the threads of those who asked.
        """
        return {
            **asdict(self.scheduler.stats()),
            "requests": len(self._requests),
            "steps": self._steps,
            **self._times.summary(),
            "token_budget": self._token_budget(),
            "jump_forward_tokens": self.jump_forward_tokens,
            **self.grammars.stats(),
        }


def _checked_ids(name: str, ids: list[Any], width: int) -> list[int]:
    """Plain integers; NumPy's are welcome, booleans are not."""
    allowed = f"token ids from 0 to {width - 1}"
    checked = []
    for token_id in ids:
        try:
            number = -1 if isinstance(token_id, bool) else operator.index(token_id)
        except TypeError:
            number = -1
        if not 0 <= number < width:
            raise InvalidParameterError(name, token_id, allowed)
        checked.append(number)
    return checked


def _as_octavo(error: Exception) -> OctavoError:
    if isinstance(error, OctavoError):
        return error
    failed = RequestFailedError(f"{type(error).__name__} while the request ran")
    failed.__cause__ = error
    return failed
