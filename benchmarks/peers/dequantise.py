"""Writes a GGUF as a Hugging Face folder in bfloat16, run by the Transformers peer's Python.

python -m benchmarks.peers.dequantise model.gguf folder
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers


def dequantise(source: Path, target: Path) -> None:
    file = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    plain = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(**file, dtype=torch.bfloat16, quantization_config=plain)
    model.hf_quantizer = None  # else it refuses to be saved, though its weights are plain
    transformers.AutoTokenizer.from_pretrained(**file).save_pretrained(target)
    model.save_pretrained(target)


if __name__ == "__main__":
    dequantise(Path(sys.argv[1]), Path(sys.argv[2]))
