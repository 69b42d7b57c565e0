"""`LLM`: the engine in the caller's process."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Generator, Mapping, Sequence
from itertools import count
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, Union

from octavo.engine.core import Engine, EngineConfig
from octavo.engine.loader import LoadedModel, load_model
from octavo.engine.loop import EngineLoop
from octavo.engine.memory import plan_memory
from octavo.engine.progress import Progress
from octavo.engine.request import Request
from octavo.errors import EngineClosedError, InvalidParameterError, OctavoError
from octavo.limits import MAX_BATCH_SEQUENCES
from octavo.outputs import RequestOutput, TextDelta
from octavo.params import SamplingParams

if TYPE_CHECKING:
    from octavo.executor.native import NativeExecutor

log = logging.getLogger("octavo")

Message = Mapping[str, Any]
Prompt = Union[str, Sequence[int], Mapping[str, Any]]
Update = tuple[int, Union[TextDelta, RequestOutput]]


class LLM:
    """A model, ready to generate. Safe to use from several threads; their requests share batches.

    model: "smollm2", a .gguf file, a Hugging Face folder, "org/name" or "org/name:file.gguf".
    weights: "auto" (the file's own precision class; 16-bit floats become q8), "f32", "q8" or "q4".
    kv_dtype: "f16" or "f32". kv_memory: bytes or a text like "2GiB" (default: half of the free memory, taken lazily).
    max_model_len: longest prompt + output in tokens (default: the model's context).
    threads: default min(physical cores, cgroup quota). kernels: "auto", "avx2", "scalar".
    policy: "fcfs", "priority" (lower first) or "lpm" (longest cached prefix first).
    inter_token_target: seconds between two tokens of a running stream that other prompts' prefill may cause.
    """

    def __init__(
        self,
        model: str = "smollm2",
        *,
        revision: str | None = None,
        weights: str = "auto",
        kv_dtype: str = "f16",
        kv_memory: int | str | None = None,
        max_model_len: int | None = None,
        threads: int | None = None,
        kernels: str = "auto",
        fusion: bool = True,
        policy: str = "fcfs",
        max_num_seqs: int = MAX_BATCH_SEQUENCES,
        inter_token_target: float = 0.1,
        chunk_size: int | None = None,
    ) -> None:
        from octavo.executor.native import NativeExecutor, kv_block_bytes

        self._loop: EngineLoop | None = None
        self._model: LoadedModel = load_model(model, revision=revision)
        program = self._model.program
        self._memory = plan_memory(
            kv_block_bytes(program, kv_dtype),
            self._model.checkpoint.config.context,
            kv_memory=kv_memory,
            max_model_len=max_model_len,
        )
        self._executor = NativeExecutor(
            program,
            self._model.checkpoint.tensors,
            num_blocks=self._memory.num_blocks,
            weights=weights,
            kv_dtype=kv_dtype,
            threads=threads,
            kernels=kernels,
            fusion=fusion,
        )
        config = EngineConfig(
            max_model_len=self._memory.max_model_len,
            max_num_seqs=max_num_seqs,
            max_rows=self._executor.max_rows,
            policy=policy,
            inter_token_target=inter_token_target,
            chunk_size=chunk_size,
        )
        self._engine = Engine(self._executor, self._model.tokenizer, self._model.eos_token_ids, config)
        self._loop = EngineLoop(self._engine)
        # Runs when the LLM is collected and at interpreter exit; the loop's thread knows nothing of the LLM.
        self._shutdown = weakref.finalize(self, _shut_down, self._loop, self._executor)
        self._ids = count()
        self._pid = os.getpid()
        log.info("%s", self._memory.describe())

    @property
    def tokenizer(self) -> Any:
        return self._model.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What `sampling_params=None` means: our defaults with the model's own recommendations over them."""
        return SamplingParams(**self._model.checkpoint.generation_defaults)

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
        single = _is_single(prompts)
        many: list[Any] = [prompts] if single else list(prompts)  # type: ignore[arg-type]
        outputs = self._run([_prompt_of(prompt) for prompt in many], sampling_params, use_tqdm)
        if single and outputs[0].error is not None:
            raise outputs[0].error
        return outputs

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """Answers one conversation or a list of them, by the model's chat template; see generate."""
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations: list[Any] = [messages] if single else list(messages)
        prompts: list[Any] = []
        for conversation in conversations:
            try:
                prompts.append((None, self.tokenizer.encode_chat(conversation, add_generation_prompt=add_generation_prompt)))
            except OctavoError as error:
                prompts.append(error)
        outputs = self._run(prompts, sampling_params, use_tqdm)
        if single and outputs[0].error is not None:
            raise outputs[0].error
        return outputs

    def stream(self, prompt: Prompt | Sequence[Message], sampling_params: SamplingParams | None = None) -> Generator[TextDelta, None, None]:
        """Yields the text of one prompt or conversation as it is made; stop iterating to cancel the request."""
        if isinstance(prompt, Sequence) and not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping):
            text, ids = None, self.tokenizer.encode_chat(prompt)
        else:
            text, ids = self._encode(_prompt_of(prompt))
        updates: SimpleQueue[Update] = SimpleQueue()
        request = self._prepare(0, text, ids, sampling_params or self.get_default_sampling_params(), updates)
        loop = self._usable()
        loop.call(lambda engine: engine.add(request))
        try:
            while True:
                update = updates.get()[1]
                if isinstance(update, RequestOutput):
                    if update.error is not None:
                        raise update.error
                    return
                yield update
        finally:
            if not request.finished:
                loop.call(lambda engine: engine.cancel(request.request_id))

    def flush_cache(self) -> int:
        """Drops every cached prefix that no running request uses; returns the number of blocks freed."""
        return self._usable().call(lambda engine: engine.flush_cache())

    def stats(self) -> dict[str, Any]:
        """Blocks free, cached and used, waste, prefix-hit tokens, preemptions, queue, step times; see Engine.stats."""
        return self._usable().call(lambda engine: engine.stats())

    def info(self) -> dict[str, Any]:
        """What runs here: CPU, kernels, model facts, memory plan."""
        from octavo import _native

        config = self._model.checkpoint.config
        return {
            "model": self._model.name,
            "path": str(self._model.path),
            "architecture": config.architecture,
            "layers": config.layers,
            "hidden_size": config.hidden_size,
            "heads": config.heads,
            "kv_heads": config.kv_heads,
            "vocab_size": config.vocab_size,
            "context": config.context,
            "weights": dict(self._executor.weight_formats),
            "weight_bytes": self._executor.weight_bytes,
            "kv_dtype": self._executor.kv_dtype,
            "kv_memory": self._memory.describe(),
            "num_blocks": self._memory.num_blocks,
            "block_bytes": self._memory.block_bytes,
            "max_model_len": self._memory.max_model_len,
            "threads": self._executor.threads,
            "kernels": self._executor.kernels,
            "arithmetic": self._executor.arithmetic,
            "cpu": _native.cpu_features(),
        }

    def close(self) -> None:
        """Ends running requests as aborted and frees weights and KV memory. More than once is fine."""
        self._loop = None
        self._shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # How a call runs

    def _run(
        self, prompts: list[Any], sampling_params: SamplingParams | Sequence[SamplingParams] | None, use_tqdm: bool
    ) -> list[RequestOutput]:
        loop = self._usable()
        params = self._params_for(len(prompts), sampling_params)
        outputs: dict[int, RequestOutput] = {}
        updates: SimpleQueue[Update] = SimpleQueue()
        requests: dict[int, Request] = {}
        for i, prompt in enumerate(prompts):
            try:
                if isinstance(prompt, OctavoError):
                    raise prompt
                text, ids = self._encode(prompt)
                requests[i] = self._prepare(i, text, ids, params[i], updates)
            except OctavoError as error:
                outputs[i] = self._refused(prompt, error)

        def admit(engine: Engine) -> None:
            for i, request in requests.items():
                try:
                    engine.add(request)
                except OctavoError as error:
                    outputs[i] = self._refused((request.prompt, request.prompt_token_ids), error)

        try:
            loop.call(admit)
            with Progress(len(prompts), enabled=use_tqdm) as progress:
                while len(outputs) < len(prompts):
                    i, update = updates.get()
                    if isinstance(update, RequestOutput):
                        outputs[i] = update
                        progress.finished()
                    else:
                        progress.token()
        except BaseException:
            ids = [request.request_id for request in requests.values()]
            if self._loop is not None:
                loop.call(lambda engine: [engine.cancel(request_id) for request_id in ids])
            raise
        return [outputs[i] for i in range(len(prompts))]

    def _prepare(self, i: int, text: str | None, ids: list[int], params: SamplingParams, updates: SimpleQueue[Update]) -> Request:
        request_id = f"req-{next(self._ids)}"
        return self._engine.prepare(request_id, ids, params, lambda update: updates.put((i, update)), prompt=text)

    def _encode(self, prompt: tuple[str | None, list[int] | None]) -> tuple[str | None, list[int]]:
        text, ids = prompt
        return text, self.tokenizer.encode(text) if ids is None else ids

    def _refused(self, prompt: Any, error: OctavoError) -> RequestOutput:
        text, ids = prompt if isinstance(prompt, tuple) else (None, None)
        return RequestOutput(
            request_id=f"req-{next(self._ids)}", prompt=text, prompt_token_ids=ids or [], outputs=[], finished=True, error=error
        )

    def _params_for(self, prompts: int, given: SamplingParams | Sequence[SamplingParams] | None) -> list[SamplingParams]:
        if given is None:
            given = self.get_default_sampling_params()
        if isinstance(given, SamplingParams):
            return [given] * prompts
        if len(given) != prompts:
            raise InvalidParameterError("sampling_params", len(given), f"one for all prompts, or one for each of the {prompts}")
        return list(given)

    def _usable(self) -> EngineLoop:
        if self._loop is None:
            raise EngineClosedError("the engine is closed")
        if os.getpid() != self._pid:
            raise EngineClosedError("an engine can't be used after fork(): make a new one in the child process")
        return self._loop


def _shut_down(loop: EngineLoop, executor: NativeExecutor) -> None:
    loop.close()
    executor.close()


def _is_single(prompts: Any) -> bool:
    if isinstance(prompts, (str, Mapping)):
        return True
    return isinstance(prompts, Sequence) and len(prompts) > 0 and all(isinstance(item, int) for item in prompts)


def _prompt_of(prompt: Any) -> Any:
    """(text, None) or (None, token ids), or the error that says why it is neither."""
    if isinstance(prompt, Mapping):
        if "prompt_token_ids" in prompt:
            prompt = prompt["prompt_token_ids"]
        elif "prompt" in prompt:
            prompt = prompt["prompt"]
    if isinstance(prompt, str):
        return prompt, None
    if isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, Mapping)):
        return None, list(prompt)
    return InvalidParameterError("prompt", prompt, 'a text, a list of token ids, {"prompt": …} or {"prompt_token_ids": …}')
