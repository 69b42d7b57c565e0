"""How much memory the KV pool may take, and the plan that says so at start."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from octavo.errors import CapacityError, InvalidParameterError
from octavo.limits import BLOCK_TOKENS, MAX_BATCH_SEQUENCES

DEFAULT_SHARE = 0.5  # of what is available beside the weights
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes unless said otherwise. The pool is reserved, not touched: pages are used when blocks are first written.

    available: what was free at start, the weights taken off. max_model_len: tokens.
    """

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
            f"KV memory {_show(self.kv_memory)} of the {_show(self.available)} available beside the weights: "
            f"{self.num_blocks:,} blocks of {BLOCK_TOKENS} tokens ({self.kv_tokens:,} tokens), "
            f"context up to {self.max_model_len:,} tokens"
        )


def plan_memory(
    block_bytes: int,
    context: int,
    *,
    weight_bytes: int = 0,
    kv_memory: int | str | None = None,
    max_model_len: int | None = None,
) -> MemoryPlan:
    """Raises InvalidParameterError or CapacityError.

    context: the longest sequence the model was made for. weight_bytes: what the weights, not yet loaded, will take.
    """
    if max_model_len is not None:
        if type(max_model_len) is not int or max_model_len < 2:
            raise InvalidParameterError("max_model_len", max_model_len, "an integer of at least 2 tokens")
        if max_model_len > context:
            allowed = f"at most the model's context of {context} tokens"
            raise InvalidParameterError("max_model_len", max_model_len, allowed)
    wanted_len = context if max_model_len is None else max_model_len
    blocks_a_sequence = -(-wanted_len // BLOCK_TOKENS)
    available = max(available_memory() - weight_bytes, 0)
    if kv_memory is None:
        size = min(int(available * DEFAULT_SHARE), MAX_BATCH_SEQUENCES * blocks_a_sequence * block_bytes)
    else:
        size = parse_bytes("kv_memory", kv_memory)
        if size > available:
            raise CapacityError(
                f"kv_memory={_show(size)} is more than the {_show(available)} of memory available beside the weights"
            )
    num_blocks = size // block_bytes
    if num_blocks < 1:
        block = f"one block of {BLOCK_TOKENS} tokens ({_show(block_bytes)})"
        raise CapacityError(f"kv_memory={_show(size)} does not hold {block}; {_show(available)} are available")
    if max_model_len is not None and num_blocks < blocks_a_sequence:
        needed = blocks_a_sequence * block_bytes
        raise CapacityError(
            f"max_model_len={max_model_len} needs {_show(needed)} of KV memory, but there are {_show(size)}"
        )
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


def available_memory(root: Path = Path("/")) -> int:
    """Bytes this process may still take: the system's available memory, or what one of its cgroups leaves, if less."""
    available = _meminfo(root / "proc/meminfo")
    for folder, limit, used in _cgroups(root):
        try:
            left = int((folder / limit).read_text()) - int((folder / used).read_text())
            left += _reclaimable(folder / "memory.stat")
        except (OSError, ValueError):  # no such file, or "max"
            continue
        available = min(available, max(left, 0))
    return available if available < 2**62 else 4 * 2**30


def _meminfo(path: Path) -> int:
    try:
        for line in path.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 2**62


def _cgroups(root: Path) -> Iterator[tuple[Path, str, str]]:
    """Each cgroup the process is in, from its own up to the top: folder, and names of its limit and its usage file."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    # Inside a container the path may be the host's; then only the top, which is the container's own, exists.
    for line in lines or ["0::/"]:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            top, names = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        below = PurePosixPath(path.lstrip("/"))
        for part in (below, *below.parents):
            yield top / part, *names


def _reclaimable(stat: Path) -> int:
    """Bytes of file cache the cgroup can give back."""
    values = dict(line.split() for line in stat.read_text().splitlines())
    return int(values.get("total_inactive_file", values.get("inactive_file", 0)))


def _show(size: int) -> str:
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
