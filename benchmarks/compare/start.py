"""How soon Octavo is ready and how much memory it takes, in new processes."""

from __future__ import annotations

from typing import Any

from benchmarks.compare import workloads
from benchmarks.compare.contenders import octavo
from benchmarks.compare.rounds import log_file
from benchmarks.peers.process import Worker

KV_MEMORY = 256 << 20
MOST_READY_SECONDS = 1.5


def measure(rounds: int, threads: int) -> dict[str, Any]:
    """ready_seconds: from the start of a process until its LLM is ready, with the file in the file cache."""
    contender = octavo("smollm2", threads, kv_memory=KV_MEMORY)
    ready, loaded, used = [], [], []
    for _ in range(rounds):
        with Worker(contender.python(), "octavo", contender.settings[0], log_file()) as worker:
            ready.append(worker.ready_seconds)
            loaded.append(worker.about["peak_rss"])
            for load in (workloads.PREFILL, workloads.BATCH_32):
                answer = worker.run(load.op, *load.requests(1), {})
            used.append(answer["peak_rss"])
            weight_bytes = worker.about["weight_bytes"]
    bound = 1.1 * weight_bytes + KV_MEMORY + 200e6
    return {
        "ready_seconds": ready,
        "peak_rss_ready": loaded,
        "peak_rss": used,
        "weight_bytes": weight_bytes,
        "kv_bytes": KV_MEMORY,
        "bound": bound,
    }
