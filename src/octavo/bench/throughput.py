"""`octavo bench throughput`: many requests at once, as fast as they go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from octavo.bench.datasets import BenchRequest
from octavo.bench.roofline import RooflineProbe
from octavo.bench.serving import described, least_seconds, run_requests, times
from octavo.params import SamplingParams

if TYPE_CHECKING:
    from octavo.engine.llm import LLM


def throughput(
    llm: LLM,
    requests: Sequence[BenchRequest],
    params: SamplingParams | None = None,
    *,
    progress: bool = False,
    warmed: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Runs the requests once, after a short one that warms threads and memory. Described in docs/cli.md."""
    info = llm.info()
    params = params or SamplingParams()
    first = requests[0].prompt_token_ids
    run_requests(llm, [BenchRequest(first[:16], 2)], params)
    llm.flush_cache()
    probe = RooflineProbe(info["threads"], info["kernels"])
    _measure(probe)
    warmed()
    run = run_requests(llm, requests, params, progress=progress)
    _measure(probe)
    roofline = probe.result()
    least = least_seconds(run, info, roofline)
    cached = sum(output.num_cached_tokens for output in run.finished)
    errors = [str(output.error) for output in run.outputs if output.error is not None]
    return {
        "settings": {"num_prompts": len(requests), "n": params.n, "temperature": params.temperature},
        "engine": described(info),
        "elapsed_seconds": run.seconds,
        "finished_requests": len(run.finished),
        "failed_requests": len(errors),
        "first_error": errors[0] if errors else None,
        "prompt_tokens": run.prompt_tokens,
        "output_tokens": run.output_tokens,
        "requests_per_second": len(run.finished) / run.seconds,
        "output_tokens_per_second": run.output_tokens / run.seconds,
        "total_tokens_per_second": (run.prompt_tokens + run.output_tokens) / run.seconds,
        "prefix_hit_tokens": cached,
        "prefix_hit_share": cached / run.prompt_tokens,
        **times(run),
        "kv": run.kv,
        **run.counters,
        "roofline": {**asdict(roofline), "least_seconds": least, "share": least / run.seconds},
    }


def _measure(probe: RooflineProbe) -> None:
    for _ in range(3):
        probe.compute()
        probe.read()
