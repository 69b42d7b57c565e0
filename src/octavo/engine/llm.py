"""`LLM`: the engine in the caller's process."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from itertools import count
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

from octavo.engine.core import Engine
from octavo.engine.loop import EngineLoop
from octavo.engine.progress import Progress
from octavo.engine.prompts import Message, Prompt, is_conversation, listed_conversations, listed_prompts, read_prompt
from octavo.engine.request import Request
from octavo.engine.submission import Submission
from octavo.errors import InvalidParameterError, OctavoError
from octavo.limits import MAX_BATCH_SEQUENCES
from octavo.outputs import RequestOutput, TextDelta
from octavo.params import SamplingParams
from octavo.tokenizer import Tokenizer

if TYPE_CHECKING:
    from octavo.engine.score import Score

log = logging.getLogger("octavo")

T = TypeVar("T")
P = ParamSpec("P")
Update = tuple[int, TextDelta | RequestOutput]  # index of the prompt in its call


class LLM:
    """A model, ready to generate. Safe to use from several threads; their requests share batches.

    model: "smollm2", a .gguf file, a Hugging Face folder, "org/name" or "org/name:file.gguf".
    weights: "auto" (the file's own precision class; 16-bit floats become q8), "f32", "q8" or "q4".
    kv_dtype: "f16", "f32" or "int8" (half the memory of f16; docs/quality.md says what it costs).
    kv_memory: bytes or a text like "2GiB" (default: half of the free memory, taken lazily).
    max_model_len: longest prompt + output in tokens (default: the model's context).
    threads: default min(physical cores, cgroup quota).
    kernels: "auto" (the best this CPU has), "scalar", "avx2", "avx512", "amx".
    policy: "fcfs", "priority" (lower first) or "lpm" (longest cached prefix first).
    inter_token_target: seconds between two tokens of a running stream that other prompts' prefill may cause.
    jump_forward: tokens that a grammar forces are appended at once; off, each costs a step. The answer is the same.
    enable_prefix_caching: off, no request finds what another one computed. The answer is the same.

    Every method but close and info raises EngineClosedError once the LLM is closed, in a process forked from the
    LLM's, and after an internal error that ended the engine; so do calls that are waiting at that moment.
    """

    def __init__(
        self,
        model: str = "smollm2",
        *,
        revision: str | None = None,
        weights: str = "auto",
        kv_dtype: Literal["f16", "f32", "int8"] = "f16",
        kv_memory: int | str | None = None,
        max_model_len: int | None = None,
        threads: int | None = None,
        kernels: str = "auto",
        fusion: bool = True,
        cascade: bool = True,
        policy: str = "fcfs",
        max_num_seqs: int = MAX_BATCH_SEQUENCES,
        inter_token_target: float = 0.1,
        chunk_size: int | None = None,
        jump_forward: bool = True,
        enable_prefix_caching: bool = True,
    ) -> None:
        from octavo.engine.opening import open_engine

        opened = open_engine(
            model,
            revision=revision,
            weights=weights,
            kv_dtype=kv_dtype,
            kv_memory=kv_memory,
            max_model_len=max_model_len,
            threads=threads,
            kernels=kernels,
            fusion=fusion,
            cascade=cascade,
            policy=policy,
            max_num_seqs=max_num_seqs,
            inter_token_target=inter_token_target,
            chunk_size=chunk_size,
            jump_forward=jump_forward,
            enable_prefix_caching=enable_prefix_caching,
        )
        self._opened = opened
        self._model, self._executor, self._engine = opened.model, opened.executor, opened.engine
        self._ids = count()
        # The loop's thread knows nothing of the LLM, so that an LLM nobody holds is collected, and its engine with it.
        self._loop = EngineLoop(self._engine)
        weakref.finalize(self, self._loop.stop)
        log.info("%s", opened.memory.describe())

    @property
    def tokenizer(self) -> Tokenizer:
        return self._model.tokenizer

    def get_tokenizer(self) -> Tokenizer:
        return self._model.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What `sampling_params=None` means: our defaults with the model's own recommendations over them."""
        chosen: dict[str, Any] = {}
        for name, value in self._model.recommended_sampling.items():
            try:
                SamplingParams(**{name: value})  # type: ignore[arg-type]
                chosen[name] = value
            except InvalidParameterError as error:
                log.warning("the model recommends a sampling value out of range: %s", error)
        return SamplingParams(**chosen)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes each prompt (a text, a list of token ids, or {"prompt": …} / {"prompt_token_ids": …}).

        Returns one RequestOutput a prompt, in order. In a list of prompts an error of one is in its `error`; a single
        prompt raises it. Ctrl-C ends all requests of this call, frees their memory and raises KeyboardInterrupt.
        """
        self._loop.check()
        listed, single = listed_prompts(prompts)
        return self._run([_tried(self._encode, prompt) for prompt in listed], single, sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """Answers one conversation or a list of them, by the model's chat template; see generate."""
        self._loop.check()
        listed, single = listed_conversations(messages)
        encoded = [_tried(self._encode_chat, conversation, add_generation_prompt) for conversation in listed]
        return self._run(encoded, single, sampling_params, use_tqdm)

    def stream(
        self, prompt: Prompt | Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> Generator[TextDelta, None, None]:
        """Yields the text of one prompt or conversation as it is made.

        The request starts with the first delta that is asked for, and ends when the iterator is closed or forgotten.
        """
        self._loop.check()
        encoded = self._encode_chat(prompt, True) if is_conversation(prompt) else self._encode(prompt)
        updates: SimpleQueue[Update] = SimpleQueue()
        return self._deltas(self._prepare(0, encoded, self._params_for(1, sampling_params)[0], updates, True), updates)

    def submit(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, streams: bool = False
    ) -> Submission:
        """Starts one prompt and returns what waits for it and can cancel it. streams: its text is told as it comes.

        Raises what refuses the request.
        """
        self._loop.check()
        updates: SimpleQueue[Update] = SimpleQueue()
        request = self._prepare(0, self._encode(prompt), self._params_for(1, sampling_params)[0], updates, streams)
        self._loop.call(lambda engine: engine.add(request))
        return Submission(self._loop, request.request_id, updates)

    def score(self, prompt: Prompt, continuations: Sequence[Prompt]) -> list[Score]:
        """The log-probability of each token of each continuation (a text, or token ids) behind the prompt.

        All are scored in one batch; the prompt is computed once. What is scored is the prompt's token ids with the
        continuation's behind them, each encoded by itself: where a word crosses from one into the other, give ids.
        Raises InvalidParameterError for an empty prompt or continuation, CapacityError for what does not fit.
        """
        from octavo.engine.score import score

        self._loop.check()
        return score(self, prompt, continuations)

    def flush_cache(self) -> int:
        """Drops every cached prefix that no running request uses; returns the number of blocks freed."""
        return self._loop.call(lambda engine: engine.flush_cache())

    def stats(self) -> dict[str, Any]:
        """Blocks free, cached and used, waste, prefix-hit tokens, preemptions, queue, step times; see Engine.stats."""
        return self._loop.call(lambda engine: engine.stats())

    def info(self) -> dict[str, Any]:
        """What runs here: CPU, kernels, model facts, memory plan."""
        return self._opened.info()

    def close(self) -> None:
        """Ends running requests, whose callers get EngineClosedError, and frees weights and KV memory.

        More than once is fine.
        """
        self._loop.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # How a call runs

    def _encode(self, prompt: Any) -> _Encoded:
        text, ids = read_prompt(prompt)
        return text, ids if text is None else self.tokenizer.encode(text)

    def _encode_chat(self, conversation: Any, add_generation_prompt: bool) -> _Encoded:
        text = self.tokenizer.apply_chat_template(conversation, add_generation_prompt=add_generation_prompt)
        return text, self.tokenizer.encode(text, add_special_tokens=False)  # the template wrote them

    def _params_for(self, prompts: int, given: Any) -> list[SamplingParams]:
        if given is None:
            given = self.get_default_sampling_params()
        if isinstance(given, SamplingParams):
            return [given] * prompts
        if not isinstance(given, (list, tuple)) or not all(isinstance(item, SamplingParams) for item in given):
            raise InvalidParameterError("sampling_params", given, "SamplingParams, or a list of them")
        if len(given) != prompts:
            allowed = f"one for all prompts, or one for each of the {prompts}"
            raise InvalidParameterError("sampling_params", f"a list of {len(given)}", allowed)
        return list(given)

    def _prepare(
        self, i: int, encoded: _Encoded, params: SamplingParams, updates: SimpleQueue[Update], streams: bool
    ) -> Request:
        text, ids = encoded
        return self._engine.prepare(
            f"req-{next(self._ids)}",
            ids,
            params,
            lambda update: updates.put((i, update)),
            prompt=text,
            streams=streams,
        )

    def _run(
        self, encoded: list[_Encoded | OctavoError], single: bool, sampling_params: Any, use_tqdm: bool
    ) -> list[RequestOutput]:
        params = self._params_for(len(encoded), sampling_params)
        updates: SimpleQueue[Update] = SimpleQueue()
        outputs: dict[int, RequestOutput] = {}
        requests: dict[int, Request] = {}
        for i, prompt in enumerate(encoded):
            if isinstance(prompt, OctavoError):
                made: Request | OctavoError = prompt
            else:
                made = _tried(self._prepare, i, prompt, params[i], updates, False)
            if isinstance(made, Request):
                requests[i] = made
            else:
                outputs[i] = _refused(f"req-{next(self._ids)}", prompt, made)
        try:
            if requests:
                self._loop.call(lambda engine: _admit(engine, requests, updates))
            with Progress(len(encoded), enabled=use_tqdm) as progress:
                progress.finished(len(outputs))
                while len(outputs) < len(encoded):
                    found = _next_of(updates, progress.interval)
                    if found is not None:
                        i, update = found
                        assert isinstance(update, RequestOutput)
                        outputs[i] = update
                        progress.finished()
                    if progress.shown:
                        progress.tokens(sum(request.num_output_tokens for request in requests.values()))
        except BaseException:
            self._loop.post(lambda engine: [engine.cancel(request.request_id) for request in requests.values()])
            raise
        if single and outputs[0].error is not None:
            raise outputs[0].error
        return [outputs[i] for i in range(len(encoded))]

    def _deltas(self, request: Request, updates: SimpleQueue[Update]) -> Generator[TextDelta, None, None]:
        try:
            self._loop.call(lambda engine: engine.add(request))
            while True:
                self._loop.check_process()  # in a forked child nothing would ever come
                _, update = updates.get()
                if isinstance(update, RequestOutput):
                    if update.error is not None:
                        raise update.error
                    return
                yield update
        finally:
            # Not `call`: this may run in the garbage collector, on any thread.
            self._loop.post(lambda engine: engine.cancel(request.request_id))


_Encoded = tuple[str | None, list[Any]]  # text (None: ids were given) and token ids


def _tried(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | OctavoError:
    """What the function returns, or the OctavoError it raises, without the frames it came through."""
    try:
        return function(*args, **kwargs)
    except OctavoError as error:
        return error.with_traceback(None)


def _next_of(updates: SimpleQueue[Update], timeout: float | None) -> Update | None:
    """None when nothing came in time. Apart, because in CPython 3.11 a Ctrl-C that falls on the line of a nested `try:`
    passes the handlers around it."""
    try:
        return updates.get(timeout=timeout)
    except Empty:
        return None


def _admit(engine: Engine, requests: Mapping[int, Request], updates: SimpleQueue[Update]) -> None:
    for i, request in requests.items():
        try:
            engine.add(request)
        except OctavoError as error:
            updates.put((i, request.refused(error.with_traceback(None))))


def _refused(request_id: str, prompt: _Encoded | OctavoError, error: OctavoError) -> RequestOutput:
    text, ids = (None, []) if isinstance(prompt, OctavoError) else prompt
    return RequestOutput(
        request_id=request_id, prompt=text, prompt_token_ids=ids, outputs=[], finished=True, error=error
    )
