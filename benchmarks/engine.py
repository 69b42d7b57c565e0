"""What the engine itself costs, on smollm2: start-up, sampling, Python, KV waste. `python -m benchmarks.engine`.

Variants are measured in turn in one loop, so that a machine that slows down slows all of them; figures are medians.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np

from octavo import _native
from octavo.engine.core import Engine, EngineConfig
from octavo.engine.llm import LLM
from octavo.executor.interface import Batch, SamplingRows, StepResult
from octavo.params import SamplingParams
from octavo.sampling import SamplerState, build_rows, resolve

BATCH, CONTEXT, ROUNDS = 32, 128, 40

SAMPLING = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8, seed=1),
    "temperature + top_p": SamplingParams(temperature=0.8, top_p=0.95, seed=1),
    "temperature + top_k 50 + top_p": SamplingParams(temperature=0.8, top_k=50, top_p=0.95, seed=1),
    "… + top_p + penalties": SamplingParams(
        temperature=0.8, top_p=0.95, seed=1, repetition_penalty=1.1, frequency_penalty=0.2, presence_penalty=0.2
    ),
    "… + top_k 50 + top_p + penalties": SamplingParams(
        temperature=0.8,
        top_k=50,
        top_p=0.95,
        seed=1,
        repetition_penalty=1.1,
        frequency_penalty=0.2,
        presence_penalty=0.2,
    ),
    "greedy + 5 logprobs": SamplingParams(temperature=0.0, logprobs=5),
}


def main() -> None:
    print(f"start: model ready after {_ready_seconds():.2f} s of a new process (median of 5, warm file cache)")
    with LLM("smollm2") as llm:
        print(f"  {llm.info()['kernels']} kernels, {llm.info()['threads']} threads")
        _sampling(llm)
        for size in (1, BATCH):
            for streams in (False, True):
                _python(llm, size, streams)
    print(f"peak RSS {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")


def _ready_seconds() -> float:
    code = "from octavo import LLM; LLM('smollm2', kv_memory='1GiB')"
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def _sampling(llm: LLM) -> None:
    """The sampler's share of a decode step of 32 sequences at 128 tokens of context, on that step's own logits.

    The sampler is timed by itself, on one thread, and divided by the step's threads, which share the rows out. Measured
    as a difference between steps it would drown in their noise.
    """
    executor: Any = llm._executor
    text = "The history of the printing press is the history of cheaper books, and of readers who wanted them. " * 8
    ids = llm.tokenizer.encode(text)[:CONTEXT]
    per_sequence = CONTEXT // 16 + 1
    greedy = _rows(llm, SAMPLING["greedy"], ids, BATCH)
    for s in range(BATCH):
        executor.step(_batch([ids], 0, s * per_sequence, per_sequence), _rows(llm, SAMPLING["greedy"], ids, 1))
    batch = _batch([[i] for i in ids[:BATCH]], CONTEXT, 0, per_sequence)
    logits = executor.logits(batch, greedy)
    rows = {name: _rows(llm, params, ids, BATCH) for name, params in SAMPLING.items()}
    variants: dict[str, Callable[[], Any]] = {name: lambda r=r: _native.sample(logits, r) for name, r in rows.items()}
    seconds = _in_turn({"step": lambda: executor.step(batch, greedy), **variants})
    step = seconds.pop("step") - seconds["greedy"] / executor.threads
    print(f"decode step of {BATCH} sequences, context {CONTEXT}, without sampling: {step * 1e3:.1f} ms")
    for name, value in seconds.items():
        mine = value / executor.threads
        print(f"  sampling, {name}: {mine * 1e3:.2f} ms, {mine / step:.1%} of the step")


def _rows(llm: LLM, params: SamplingParams, ids: Sequence[int], count: int) -> Any:
    resolved = resolve(
        params,
        prompt_len=len(ids),
        vocab_size=llm._executor.vocab_size,
        context_len=8192,
        eos_ids=frozenset(),
        encode=list,
    )
    states = [SamplerState(resolved, ids, n) for n in range(count)]
    for state in states:
        for token in ids:
            state.append(token)
    edits = [state.edits() if state.edits_logits else None for state in states]
    positions = [2 * len(ids)] * count
    return build_rows([state.scalars for state in states], positions, edits, llm._executor.vocab_size)


def _batch(tokens: Sequence[Sequence[int]], start: int, first_block: int, per_sequence: int) -> Batch:
    count = len(tokens[0])
    blocks = np.arange(first_block, first_block + per_sequence * len(tokens), dtype=np.int32)
    zero = [(b, -1, 0) for b in blocks.tolist()] if start == 0 else []
    return Batch(
        token_ids=np.array(tokens, dtype=np.int32).reshape(-1),
        positions=np.tile(np.arange(start, start + count, dtype=np.int64), len(tokens)),
        sequence_rows=np.arange(len(tokens) + 1, dtype=np.int32) * count,
        block_tables=blocks,
        block_offsets=np.arange(len(tokens) + 1, dtype=np.int32) * per_sequence,
        logit_rows=np.arange(1, len(tokens) + 1, dtype=np.int32) * count - 1,
        block_ops=np.array(zero, dtype=np.int32).reshape(-1, 3),
    )


def _in_turn(variants: dict[str, Callable[[], Any]]) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(ROUNDS):
        for name, run in variants.items():
            begin = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in seconds.items()}


class _Timed:
    """An executor that knows how long its last step took: CPU seconds of the calling thread, and seconds."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self.cpu = self.wall = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def step(self, batch: Batch, sampling: SamplingRows) -> StepResult:
        wall, cpu = time.perf_counter(), time.thread_time()
        result: StepResult = self._executor.step(batch, sampling)
        self.cpu, self.wall = time.thread_time() - cpu, time.perf_counter() - wall
        return result


def _python(llm: LLM, size: int, streams: bool) -> None:
    """What a decode step costs outside the executor: scheduling, arrays, folding tokens in.

    Time is that of a step between two of the model's, which leave nothing of Python in the processor's caches. Calls
    (of Python functions and of C's) and bytecodes are exact: they do not move with the machine.
    """
    executor = _Timed(llm._executor)
    engine = Engine(executor, llm.tokenizer, frozenset(), EngineConfig(max_model_len=1024))
    params = SamplingParams(max_tokens=ROUNDS + 100, temperature=0.8, top_p=0.95, seed=1)
    updates: SimpleQueue[Any] = SimpleQueue()
    for i in range(size):
        prompt = [(7 * i + j) % 40_000 + 100 for j in range(64)]
        engine.add(engine.prepare(f"{i}", prompt, params, updates.put, streams=streams))
    while engine.scheduler.num_decoding < size:
        engine.step()
    outside, walls = [], []
    for _ in range(ROUNDS):
        begin = time.thread_time()
        engine.step()
        outside.append(time.thread_time() - begin - executor.cpu)
        walls.append(executor.wall)
    engine.executor = llm._executor
    calls, bytecodes = _counts(engine)
    mine, native = statistics.median(outside), statistics.median(walls)
    print(
        f"batch {size}, top-p, {'streamed' if streams else 'generate'}: {mine * 1e3:.3f} ms a step outside the "
        f"executor, {mine / (mine + native):.1%} of the step; {calls:.0f} calls, {bytecodes:.0f} bytecodes"
    )


def _counts(engine: Engine, steps: int = 16) -> tuple[float, float]:
    """Calls and bytecodes a step; 16 steps, so that each sequence takes a new block once."""
    calls = bytecodes = 0

    def on_call(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    def on_bytecode(frame: Any, event: str, argument: Any) -> Any:
        nonlocal bytecodes
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        bytecodes += event == "opcode"
        return on_bytecode

    sys.setprofile(on_call)
    for _ in range(steps):
        engine.step()
    sys.setprofile(None)
    sys.settrace(on_bytecode)
    for _ in range(steps):
        engine.step()
    sys.settrace(None)
    return calls / steps, bytecodes / steps


if __name__ == "__main__":
    main()
