"""`octavo info`: this machine, and what a model would take of it."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.cli import engine, options, terminal


def info(
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Load this model too; show its facts and the memory plan.")
    ] = None,
    revision: options.Revision = None,
    weights: options.Weights = "auto",
    kv_dtype: options.KVDtype = "f16",
    kv_memory: options.KVMemory = None,
    max_model_len: options.MaxModelLen = None,
    threads: options.Threads = None,
    kernels: options.Kernels = "auto",
) -> None:
    """Show the CPU and the kernels; of a model, its memory plan."""
    print(terminal.table(machine()))
    if model is not None:
        engine_options = options.EngineOptions(
            model, revision, weights, kv_dtype, kv_memory, max_model_len, threads, kernels
        )
        with engine.open_engine(engine_options) as llm:
            print()
            print(terminal.table(_facts(llm.info())))


def machine() -> list[tuple[str, str]]:
    import octavo
    from octavo import _native
    from octavo.engine.memory import available_memory
    from octavo.executor.threads import default_threads

    names = _native.kernel_names()
    return [
        ("octavo", octavo.__version__),
        ("python", platform.python_version()),
        ("cpu", _cpu_name()),
        ("features", _features(_native.cpu_features())),
        ("kernels", f"{names[-1]} (this CPU runs {', '.join(names)})"),
        ("default threads", str(default_threads())),
        ("memory available", terminal.size(available_memory())),
    ]


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def _features(features: Mapping[str, bool]) -> str:
    return ", ".join(name for name, there in features.items() if there) or "none that a kernel uses"


def _facts(info: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(name.replace("_", " "), _shown(name, value)) for name, value in info.items() if name != "cpu"]


def _shown(name: str, value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {terminal.size(count)}" for key, count in value.items())
    if name.endswith("_bytes"):
        return terminal.size(value)
    return f"{value:,}" if isinstance(value, int) else str(value).removeprefix("KV memory ")
