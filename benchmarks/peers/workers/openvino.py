"""OpenVINO GenAI's continuous batching pipeline, which reads the GGUF itself.

Settings: {"model": path, "threads": n, "properties": {…}, "cache_gb": n, "batched_tokens": n}
"""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

from benchmarks.peers.protocol import Run, Stopwatch, serve


class OpenVINO:
    def __init__(self, settings: dict[str, Any]) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = settings["cache_gb"]
        scheduler.max_num_seqs = 64
        scheduler.max_num_batched_tokens = settings["batched_tokens"]
        scheduler.enable_prefix_caching = True  # `decode` comes again with prompts whose KV is then there
        properties = {"INFERENCE_NUM_THREADS": settings["threads"], "PERFORMANCE_HINT": "LATENCY"}
        properties |= settings["properties"]
        self._pipeline = genai.ContinuousBatchingPipeline(settings["model"], scheduler, "CPU", properties)
        self._properties = properties
        self._next = 0

    def about(self) -> dict[str, Any]:
        return {"version": f"openvino-genai {genai.__version__}", "properties": self._properties}

    def generate(self, prompts: list[list[int]], lengths: list[int], options: dict[str, Any]) -> Run:
        clock = Stopwatch()
        outputs, _, _ = self._run(prompts, lengths)
        return clock.run(outputs)

    def decode(self, prompts: list[list[int]], lengths: list[int], options: dict[str, Any]) -> Run:
        outputs, clock, before = self._run(prompts, lengths)
        return clock.run(outputs, before)

    def _run(self, prompts: list[list[int]], lengths: list[int]) -> tuple[list[list[int]], Stopwatch, int]:
        """All ids, a watch that runs since every request had its first, and the number of ids there were then."""
        handles = []
        for prompt, length in zip(prompts, lengths):
            config = genai.GenerationConfig(max_new_tokens=length, ignore_eos=True, do_sample=False)
            ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
            handles.append(self._pipeline.add_request(self._next, ids, config))
            self._next += 1
        outputs: list[list[int]] = [[] for _ in prompts]
        started: tuple[Stopwatch, int] | None = None
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            for handle, output in zip(handles, outputs):
                while handle.can_read():
                    for part in handle.read().values():
                        output.extend(part.generated_ids)
            if started is None and all(outputs):
                started = (Stopwatch(), sum(map(len, outputs)))
        assert started is not None, "every request generates at least one token"
        return outputs, *started


if __name__ == "__main__":
    serve(OpenVINO)
