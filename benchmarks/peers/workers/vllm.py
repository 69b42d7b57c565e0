"""vLLM's CPU build, in bfloat16, the format it is made for. Settings: {"model": folder, "threads": n}"""

from __future__ import annotations

import os
from typing import Any

from benchmarks.peers.protocol import Run, Stopwatch, serve


class VLLM:
    def __init__(self, settings: dict[str, Any]) -> None:
        cores = sorted(os.sched_getaffinity(0))[: settings["threads"]]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "3"  # GiB
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # its CPU seconds are this process's
        import vllm

        self._params = vllm.SamplingParams
        self._llm = vllm.LLM(settings["model"], dtype="bfloat16", max_model_len=4096, disable_log_stats=True)
        self._version = vllm.__version__

    def about(self) -> dict[str, Any]:
        return {"version": f"vllm-cpu {self._version}"}

    def generate(self, prompts: list[list[int]], lengths: list[int], options: dict[str, Any]) -> Run:
        params = [self._params(temperature=0.0, ignore_eos=True, max_tokens=n, detokenize=False) for n in lengths]
        clock = Stopwatch()
        results = self._llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return clock.run([list(result.outputs[0].token_ids) for result in results])

    def decode(self, prompts: list[list[int]], lengths: list[int], options: dict[str, Any]) -> Run:
        """With the prompts in the prefix cache: the time of all tokens less that of the first one alone."""
        one = [1] * len(prompts)
        self.generate(prompts, one, options)
        first = self.generate(prompts, one, options)
        whole = self.generate(prompts, lengths, options)
        cpu_seconds = whole.cpu_seconds - first.cpu_seconds
        return Run(whole.seconds - first.seconds, cpu_seconds, whole.tokens - first.tokens, whole.outputs)


if __name__ == "__main__":
    serve(VLLM)
