"""Writes a GGUF in another format with llama.cpp's quantiser, run by its own Python.

    python -m benchmarks.peers.requantise model.gguf Q4_0 out.gguf

The embedding and head stay Q8_0 in the 4-bit formats, as in the file that is compared with; F16 is F16 throughout.
"""

from __future__ import annotations

import sys
from pathlib import Path

import llama_cpp as lib

# Name: llama_ftype, and ggml_type of the embedding and head.
FORMATS = {"F16": (1, 1), "Q4_0": (2, 8), "Q4_1": (3, 8), "Q8_0": (7, 8)}


def requantise(source: Path, format: str, target: Path) -> None:
    params = lib.llama_model_quantize_default_params()
    params.ftype, head = FORMATS[format]
    params.token_embedding_type = params.output_tensor_type = head
    params.allow_requantize = True
    params.nthread = 2
    part = target.with_suffix(".part")
    status = lib.llama_model_quantize(str(source).encode(), str(part).encode(), params)
    if status != 0:
        raise SystemExit(f"llama.cpp could not write {source.name} as {format} (status {status})")
    part.rename(target)


if __name__ == "__main__":
    requantise(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
