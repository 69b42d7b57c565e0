"""`octavo bench latency`: one batch of equal requests, again and again, from a cold prefix cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from octavo.bench.datasets import random_requests
from octavo.bench.roofline import RooflineProbe
from octavo.bench.serving import Run, described, least_seconds, run_requests
from octavo.bench.statistics import summary
from octavo.errors import InvalidParameterError
from octavo.limits import MAX_BENCH_PROMPTS
from octavo.params import SamplingParams

if TYPE_CHECKING:
    from octavo.engine.llm import LLM


def latency(
    llm: LLM,
    *,
    input_len: int = 128,
    output_len: int = 128,
    batch_size: int = 8,
    num_iters_warmup: int = 1,
    num_iters: int = 5,
    params: SamplingParams | None = None,
    seed: int = 0,
    done: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Times whole calls of `LLM.generate`; `done` is called after each. The result is described in docs/cli.md."""
    for name, value, low, high in (
        ("batch_size", batch_size, 1, MAX_BENCH_PROMPTS),
        ("num_iters", num_iters, 1, 10_000),
        ("num_iters_warmup", num_iters_warmup, 0, 10_000),
    ):
        if not low <= value <= high:
            raise InvalidParameterError(name, value, f"{low} to {high}")
    info = llm.info()
    params = params or SamplingParams()
    requests = random_requests(batch_size, info["vocab_size"], input_len=input_len, output_len=output_len, seed=seed)
    probe = RooflineProbe(info["threads"], info["kernels"])
    runs: list[Run] = []
    for i in range(num_iters_warmup + num_iters):
        llm.flush_cache()
        run = run_requests(llm, requests, params)
        if i >= num_iters_warmup:
            runs.append(run)
            probe.compute()
            probe.read()
        done()
    roofline = probe.result()
    seconds = summary([run.seconds for run in runs])
    assert seconds is not None
    tokens = runs[-1].output_tokens
    least = least_seconds(runs[-1], info, roofline)
    return {
        "settings": {
            "input_len": input_len,
            "output_len": output_len,
            "batch_size": batch_size,
            "n": params.n,
            "num_iters_warmup": num_iters_warmup,
            "num_iters": num_iters,
            "temperature": params.temperature,
            "seed": seed,
        },
        "engine": described(info),
        "failed_requests": sum(len(run.outputs) - len(run.finished) for run in runs),
        "batch_seconds": seconds,
        "latencies": [run.seconds for run in runs],
        "ttft_seconds": summary([value for run in runs for value in run.first_tokens()]),
        "inter_token_seconds": summary([value for run in runs for value in run.inter_token()]),
        "output_tokens_per_second": tokens / seconds["median"],
        "roofline": {**asdict(roofline), "least_seconds": least, "share": least / seconds["median"]},
    }
