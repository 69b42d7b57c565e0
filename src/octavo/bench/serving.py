"""Runs requests through an `LLM` and says what came of it, beside what the hardware could have done."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

from octavo.bench.datasets import BenchRequest
from octavo.bench.roofline import Roofline
from octavo.bench.statistics import summary
from octavo.errors import EngineClosedError
from octavo.params import SamplingParams

if TYPE_CHECKING:
    from octavo.engine.llm import LLM
    from octavo.outputs import RequestOutput

_SAMPLING_SECONDS = 0.2
_COUNTERS = ("steps", "computed_tokens", "prefix_hit_tokens", "preemptions", "evictions")


class KVWatch:
    """Looks at the KV memory now and then while requests run; its peak and its mean waste are those of the looks."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="octavo-bench-kv", daemon=True)
        self._blocks_total = 0
        self._used: list[int] = []
        self._waste: list[float] = []

    def __enter__(self) -> KVWatch:
        self._look()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    def result(self) -> dict[str, Any]:
        return {
            "blocks_total": self._blocks_total,
            "peak_blocks_used": max(self._used),
            "peak_share": max(self._used) / max(self._blocks_total, 1),
            "mean_waste_percent": sum(self._waste) / len(self._waste),
        }

    def _watch(self) -> None:
        while not self._done.wait(_SAMPLING_SECONDS):
            try:
                self._look()
            except EngineClosedError:
                return

    def _look(self) -> None:
        stats = self._llm.stats()
        self._blocks_total = stats["blocks_total"]
        self._used.append(stats["blocks_used"])
        self._waste.append(stats["waste_percent"])


@dataclass(slots=True)
class Run:
    """One call of generate over all requests. counters: what the engine counted meanwhile."""

    outputs: list[RequestOutput]
    seconds: float
    counters: dict[str, int]
    kv: dict[str, Any] = field(default_factory=dict)

    @property
    def finished(self) -> list[RequestOutput]:
        return [output for output in self.outputs if output.error is None]

    @property
    def prompt_tokens(self) -> int:
        return sum(len(output.prompt_token_ids) for output in self.finished)

    @property
    def output_tokens(self) -> int:
        return sum(len(completion.token_ids) for output in self.finished for completion in output.outputs)

    def latencies(self) -> list[float]:
        return [output.timings.latency or 0.0 for output in self.finished if output.timings is not None]

    def first_tokens(self) -> list[float]:
        return [output.timings.ttft or 0.0 for output in self.finished if output.timings is not None]

    def inter_token(self) -> list[float]:
        """Seconds a token after the first, of each request with more than one; with n outputs, of the longest."""
        times = []
        for output in self.finished:
            more = max(len(completion.token_ids) for completion in output.outputs) - 1
            timings = output.timings
            if more > 0 and timings is not None and timings.first_token is not None and timings.finished is not None:
                times.append((timings.finished - timings.first_token) / more)
        return times


def run_requests(llm: LLM, requests: Sequence[BenchRequest], params: SamplingParams, *, progress: bool = False) -> Run:
    """Submits all requests at once; each makes exactly its output_len tokens. A single failed one is no error here;
    the error is raised when all fail."""
    from dataclasses import replace

    prompts = [request.prompt_token_ids for request in requests]
    every = [replace(params, max_tokens=request.output_len, ignore_eos=True) for request in requests]
    before = llm.stats()
    with KVWatch(llm) as kv:
        begin = time.perf_counter()
        outputs = llm.generate(prompts, every, use_tqdm=progress)
        seconds = time.perf_counter() - begin
    after = llm.stats()
    run = Run(outputs, seconds, {name: after[name] - before[name] for name in _COUNTERS}, kv.result())
    if not run.finished:
        raise next(output.error for output in outputs if output.error is not None)
    return run


def least_seconds(run: Run, info: dict[str, Any], roofline: Roofline) -> float:
    """The time below which the hardware can't do the run's matrix work, whoever writes the kernels.

    Each computed token is multiplied by every matrix, each output token by the head, and each attends to what is
    before it; each step reads every weight once, each output token the KV of its sequence.
    """
    sizes = info["weights"]
    quantised = 2 * sum(size for format, size in sizes.items() if format.startswith("q")) >= sum(sizes.values())
    matrices = run.counters["computed_tokens"] * info["macs_per_token"] + run.output_tokens * info["macs_per_logits"]
    pairs = kv_tokens = 0.0
    for output in run.finished:
        for i, completion in enumerate(output.outputs):
            prompt, made = len(output.prompt_token_ids), len(completion.token_ids)
            new = prompt - output.num_cached_tokens if i == 0 else 0
            pairs += new * (prompt - new / 2) + made * (prompt + made / 2)
            kv_tokens += made * (prompt + made / 2)
    attention = 2.0 * pairs * info["layers"] * info["heads"] * info["head_dim"]
    compute = roofline.least_seconds(matrices, 0, quantised=quantised)
    compute += roofline.least_seconds(attention, 0, quantised=False)
    read = run.counters["steps"] * info["weight_bytes"] + kv_tokens * info["block_bytes"] / 16
    return max(compute, roofline.least_seconds(0, read))


def described(info: dict[str, Any]) -> dict[str, Any]:
    """The facts of the engine that a result depends on."""
    names = ("model", "weights", "weight_bytes", "kv_dtype", "max_model_len", "threads", "kernels", "arithmetic")
    return {name: info[name] for name in names}


def times(run: Run) -> dict[str, Any]:
    return {
        "latency_seconds": summary(run.latencies()),
        "ttft_seconds": summary(run.first_tokens()),
        "inter_token_seconds": summary(run.inter_token()),
    }
