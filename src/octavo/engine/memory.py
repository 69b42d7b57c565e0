"""How much memory the KV pool may take, and the plan that says so at start."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import CapacityError, InvalidParameterError
from octavo.limits import BLOCK_TOKENS, MAX_BATCH_SEQUENCES

DEFAULT_SHARE = 0.5  # of the memory available at start
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes unless said otherwise. The pool is reserved, not touched: pages are used when blocks are first written."""

    available: int
    kv_memory: int
    block_bytes: int
    num_blocks: int
    max_model_len: int

    @property
    def kv_tokens(self) -> int:
        return self.num_blocks * BLOCK_TOKENS

    def describe(self) -> str:
        return (
            f"KV memory {_show(self.kv_memory)} of {_show(self.available)} available: {self.num_blocks:,} blocks of "
            f"{BLOCK_TOKENS} tokens ({self.kv_tokens:,} tokens), context up to {self.max_model_len:,} tokens"
        )


def plan_memory(
    block_bytes: int, context: int, *, kv_memory: int | str | None = None, max_model_len: int | None = None
) -> MemoryPlan:
    """`context`: the longest sequence the model was made for. Raises InvalidParameterError or CapacityError."""
    if max_model_len is not None and (isinstance(max_model_len, bool) or not isinstance(max_model_len, int) or max_model_len < 2):
        raise InvalidParameterError("max_model_len", max_model_len, "an integer of at least 2 tokens")
    if max_model_len is not None and max_model_len > context:
        raise InvalidParameterError("max_model_len", max_model_len, f"at most the model's context of {context} tokens")
    wanted_len = context if max_model_len is None else max_model_len
    available = available_memory()
    blocks_a_sequence = -(-wanted_len // BLOCK_TOKENS)
    if kv_memory is None:
        size = min(int(available * DEFAULT_SHARE), MAX_BATCH_SEQUENCES * blocks_a_sequence * block_bytes)
    else:
        size = parse_bytes("kv_memory", kv_memory)
        if size > available:
            raise CapacityError(f"kv_memory={_show(size)} is more than the {_show(available)} of memory available")
    num_blocks = size // block_bytes
    if num_blocks < 1:
        raise CapacityError(f"kv_memory={_show(size)} does not hold one block of {BLOCK_TOKENS} tokens ({_show(block_bytes)})")
    if max_model_len is not None and num_blocks < blocks_a_sequence:
        needed = blocks_a_sequence * block_bytes
        raise CapacityError(f"max_model_len={max_model_len} needs {_show(needed)} of KV memory, but kv_memory is {_show(size)}")
    length = min(wanted_len, num_blocks * BLOCK_TOKENS)
    return MemoryPlan(available, num_blocks * block_bytes, block_bytes, num_blocks, length)


def parse_bytes(field: str, value: int | str) -> int:
    """Bytes from an int or a text like "2GiB", "500MB", "1.5g" (decimal units without the i)."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]i?)?b?\s*", value.lower())
        if match is not None:
            size = int(float(match[1]) * _UNITS[match[2] or ""])
            if size > 0:
                return size
    raise InvalidParameterError(field, value, "a number of bytes, or a size like 2GiB or 500MB")


def available_memory() -> int:
    """Bytes this process may still take: the system's available memory, or what its cgroup leaves, if less."""
    available = 2**62
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    except OSError:
        pass
    for folder, limit, used in (
        ("/sys/fs/cgroup", "memory.max", "memory.current"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            left = int(Path(folder, limit).read_text()) - int(Path(folder, used).read_text())
            left += _reclaimable(Path(folder, "memory.stat"))
        except (OSError, ValueError):  # no such cgroup version, or "max"
            continue
        available = min(available, max(left, 0))
    return available if available < 2**62 else 4 * 2**30


def _reclaimable(stat: Path) -> int:
    """Bytes of file cache the cgroup can give back."""
    values = dict(line.split() for line in stat.read_text().splitlines())
    return int(values.get("inactive_file", 0))


def _show(size: int) -> str:
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
