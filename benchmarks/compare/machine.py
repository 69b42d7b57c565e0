"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

# Of the flags that /proc/cpuinfo lists, those that kernels of this field are written for.
_FLAGS = (
    "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16",
    "amx_int8", "asimd", "asimddp", "i8mm", "sve",
)  # fmt: skip


def describe() -> dict[str, str]:
    facts: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    flags = facts.get("flags", facts.get("Features", "")).split()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    virtual = ", a virtual machine" if "hypervisor" in flags else ""
    model = facts.get("model name", platform.machine())
    numbers = " ".join(f"{key} {facts[key]}" for key in ("cpu family", "model", "stepping") if key in facts)
    return {
        "CPU": f"{model} ({numbers}), {len(os.sched_getaffinity(0))} cores{virtual}",
        "instructions": " ".join(flag for flag in _FLAGS if flag in flags),
        "memory": f"{memory / 2**30:.0f} GiB",
        "system": f"Linux {platform.release()}, Python {platform.python_version()}",
    }


def load() -> float:
    """The load average of the last minute: on a quiet machine nearly 0 before a run."""
    return os.getloadavg()[0]
