"""Octavo through `LLM.generate`, with its scheduler, prefix cache and sampler.

Settings: {"model": path or name, …options of LLM}
"""

from __future__ import annotations

from typing import Any

from benchmarks.peers.protocol import Run, Stopwatch, serve
from octavo import LLM, SamplingParams, __version__


class Octavo:
    def __init__(self, settings: dict[str, Any]) -> None:
        self._llm = LLM(**settings)

    def about(self) -> dict[str, Any]:
        info = self._llm.info()
        config = self._llm._model.checkpoint.config
        attention = 2 * config.heads * config.head_dim + 2 * config.kv_heads * config.head_dim
        layer = config.hidden_size * (attention + 3 * config.intermediate_size)
        names = ("kernels", "threads", "weights", "weight_bytes", "vocab_size")
        return {
            "version": f"octavo {__version__}",
            "layer_macs": config.layers * layer,  # of the matrices, a token
            "head_macs": config.hidden_size * config.vocab_size,  # a token that is sampled
            "kv_token_bytes": info["block_bytes"] // 16,
            **{name: info[name] for name in names},
        }

    def generate(self, prompts: list[list[int]], lengths: list[int], options: dict[str, Any]) -> Run:
        params = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=n) for n in lengths]
        clock = Stopwatch()
        results = self._llm.generate(list(prompts), params, use_tqdm=False)
        run = clock.run([result.outputs[0].token_ids if result.outputs else [] for result in results])
        for result in results:
            if result.error is not None:
                raise result.error
        return run

    def decode(self, prompts: list[list[int]], lengths: list[int], options: dict[str, Any]) -> Run:
        """With the prompts in the prefix cache: the time of all tokens less that of the first one alone."""
        one = [1] * len(prompts)
        self.generate(prompts, one, options)
        first = self.generate(prompts, one, options)
        whole = self.generate(prompts, lengths, options)
        cpu_seconds = whole.cpu_seconds - first.cpu_seconds
        return Run(whole.seconds - first.seconds, cpu_seconds, whole.tokens - first.tokens, whole.outputs)


if __name__ == "__main__":
    serve(Octavo)
