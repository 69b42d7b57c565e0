"""Transformers as most people run it: PyTorch in float32, one request after the other.

Settings: {"folder": path, "file": name of the GGUF in it, "threads": n}
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

from benchmarks.peers.protocol import Run, Stopwatch, serve


class Transformers:
    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(settings["threads"])
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            settings["folder"],
            gguf_file=settings["file"],
            dtype=torch.float32,
            quantization_config=transformers.GgufConfig(dequantize=True),
        ).eval()
        self._model.generation_config.eos_token_id = None

    def about(self) -> dict[str, Any]:
        return {"version": f"transformers {transformers.__version__}, torch {torch.__version__}"}

    def generate(self, prompts: list[list[int]], lengths: list[int], options: dict[str, Any]) -> Run:
        clock = Stopwatch()
        return clock.run([self._one(prompt, length) for prompt, length in zip(prompts, lengths)])

    def decode(self, prompts: list[list[int]], lengths: list[int], options: dict[str, Any]) -> Run:
        """The time of all tokens less that of the first one alone."""
        first = self.generate(prompts, [1] * len(prompts), options)
        whole = self.generate(prompts, lengths, options)
        cpu_seconds = whole.cpu_seconds - first.cpu_seconds
        return Run(whole.seconds - first.seconds, cpu_seconds, whole.tokens - first.tokens, whole.outputs)

    @torch.inference_mode()
    def _one(self, prompt: list[int], length: int) -> list[int]:
        ids = torch.tensor([prompt])
        out = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=length, min_new_tokens=length
        )
        return out[0, len(prompt) :].tolist()


if __name__ == "__main__":
    serve(Transformers)
