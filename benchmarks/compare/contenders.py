"""Who takes part, in which format, and the settings that are tried for each."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.compare import machine
from benchmarks.peers import setup

Settings = dict[str, Any]


@dataclass(frozen=True)
class Contender:
    """One system with one file.

    settings: of a process, options: of a call; all are tried and the best pair for each workload is measured.
    bits: of a weight, 16 and 32 for floats. sample: it gets only so many of the requests, one after the other.
    """

    name: str
    environment: str
    bits: int
    settings: tuple[Settings, ...]
    options: tuple[Settings, ...] = ({},)
    sample: int | None = None

    def python(self) -> Path:
        return Path(sys.executable) if self.environment == "octavo" else setup.python_of(self.environment)


OCTAVO = "Octavo"


def octavo(model: str | Path, threads: int, **options: Any) -> Contender:
    return Contender(OCTAVO, "octavo", 4, ({"model": str(model), "threads": threads, "kv_memory": "3GiB", **options},))


def llamacpp(format: str, file: Path, threads: int) -> Contender:
    # Where there is AMX, llama.cpp uses it for quantised formats. Without it, it repacks Q4_0 for AVX-512.
    amx = (True, False) if "amx_int8" in machine.describe()["instructions"] and format == "Q4_0" else (True,)
    return Contender(
        f"llama.cpp {format}",
        "llamacpp",
        {"F16": 16, "Q8_0": 8}.get(format, 4),
        tuple({"model": str(file), "threads": threads, "amx": on} for on in amx),
        tuple({"flash_attention": on, "ubatch": 512, "unified_kv": False} for on in (True, False)),
    )


def openvino(format: str, file: Path, threads: int) -> Contender:
    properties: tuple[dict[str, str], ...] = (
        {},  # bfloat16 where the CPU has it, KV in 8 bits
        {"KV_CACHE_PRECISION": "bf16"},
        {"INFERENCE_PRECISION_HINT": "f32"},
        {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f16"},
    )
    common = {"model": str(file), "threads": threads, "cache_gb": 2, "batched_tokens": 512}
    bits = 8 if format == "Q8_0" else 4
    return Contender(f"OpenVINO {format}", "openvino", bits, tuple({**common, "properties": p} for p in properties))


def transformers(file: Path, threads: int) -> Contender:
    settings = {"folder": str(file.parent), "file": file.name, "threads": threads}
    return Contender("Transformers float32", "transformers", 32, (settings,), sample=2)


def vllm(folder: Path, threads: int) -> Contender:
    return Contender("vLLM bfloat16", "vllm", 16, ({"model": str(folder), "threads": threads},))


def requantised(source: Path, format: str) -> Path:
    """The GGUF in another format, made once by llama.cpp's own quantiser."""
    target = setup.folder() / "models" / f"{source.stem.rsplit('.', 1)[0]}.{format}.gguf"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        _run(setup.python_of("llamacpp"), "benchmarks.peers.requantise", source, format, target)
    return target


def dequantised(source: Path) -> Path:
    """The GGUF as a Hugging Face folder in bfloat16."""
    target = setup.folder() / "models" / f"{source.stem.rsplit('.', 1)[0]}-bf16"
    if not (target / "config.json").exists():
        _run(setup.python_of("transformers"), "benchmarks.peers.dequantise", source, target)
    return target


def random_model(name: str) -> Path:
    """A GGUF of random weights in the shape of another model, made once; see benchmarks/peers/random_models.py."""
    target = setup.folder() / "models" / f"{name}.gguf"
    if not target.exists():
        _run(Path(sys.executable), "benchmarks.peers.random_models", name, target.parent)
    return target


def _run(python: Path, module: str, *arguments: str | Path) -> None:
    command = [str(python), "-m", module, *map(str, arguments)]
    done = subprocess.run(command, cwd=setup.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{module} failed:\n{done.stdout}")
