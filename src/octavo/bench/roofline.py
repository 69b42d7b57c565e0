"""What the hardware can do at most: multiply-adds in registers and streaming reads, on a team like the executor's.

The machine may be shared and change by the minute, so measure it in the same run as what is held against it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo.errors import CapacityError, InvalidParameterError

BUFFER_BYTES = 512 << 20  # more than the caches of most machines
_INTEGER_ROUNDS, _FLOAT_ROUNDS = 1 << 16, 1 << 15  # a fraction of a millisecond each with SIMD
_GIGA = 1e9


@dataclass(frozen=True, slots=True)
class Roofline:
    """Rates of all threads together. integer_gmacs, float_gmacs: 10⁹ multiply-adds a second; read_gbs: 10⁹ bytes."""

    integer_gmacs: float
    float_gmacs: float
    read_gbs: float
    threads: int
    kernels: str

    def least_seconds(self, macs: float, read_bytes: float, *, quantised: bool = True) -> float:
        """The time below which this work can't be done, computing and reading at the same time.

        Data that lies in a cache can be read faster than read_gbs, which is memory's rate.
        """
        compute = macs / ((self.integer_gmacs if quantised else self.float_gmacs) * _GIGA)
        return max(compute, read_bytes / (self.read_gbs * _GIGA))

    def __str__(self) -> str:
        return (
            f"roofline of {self.threads} thread{'s' if self.threads > 1 else ''} with {self.kernels} kernels: "
            f"{self.integer_gmacs:.0f} integer and {self.float_gmacs:.0f} float GMAC/s, {self.read_gbs:.1f} GB/s read"
        )


class RooflineProbe:
    """Measures a little at each call, so that it can be interleaved with other work; the best of all calls counts."""

    def __init__(self, threads: int | None = None, kernels: str = "auto", buffer_bytes: int = BUFFER_BYTES) -> None:
        """kernels: a name of `octavo._native.kernel_names()`, or auto. buffer_bytes: at most a quarter of the free
        memory is taken, at the first reading."""
        from octavo import _native
        from octavo.engine.memory import available_memory
        from octavo.executor.threads import default_threads

        names = _native.kernel_names()
        if kernels != "auto" and kernels not in names:
            raise InvalidParameterError("kernels", kernels, f"auto, {', '.join(names)}")
        self.threads = default_threads() if threads is None else threads
        if type(self.threads) is not int or not 1 <= self.threads <= 256:
            raise InvalidParameterError("threads", threads, "1 to 256")
        if type(buffer_bytes) is not int or not 1 << 20 <= buffer_bytes <= 1 << 40:
            raise InvalidParameterError("buffer_bytes", buffer_bytes, "1 MiB to 1 TiB")
        self.kernels = names[-1] if kernels == "auto" else kernels
        size = max(min(buffer_bytes, available_memory() // 4), 1 << 20)
        self._native: Any = _native.Ceilings(self.threads, self.kernels, size)
        self.reset()

    def reset(self) -> None:
        """Forgets what was measured; the buffer stays."""
        self._integer = self._floats = self._read = 0.0

    def compute(self) -> None:
        self._integer = max(self._integer, self._native.integer(_INTEGER_ROUNDS))
        self._floats = max(self._floats, self._native.floats(_FLOAT_ROUNDS))

    def read(self) -> None:
        try:
            self._read = max(self._read, self._native.read(1), self._native.read(4))
        except MemoryError:
            raise CapacityError("the system refused the memory for the buffer of the read measurement") from None

    def result(self) -> Roofline:
        """The best so far. Both compute and read must have been called."""
        assert min(self._integer, self._floats, self._read) > 0
        return Roofline(self._integer / _GIGA, self._floats / _GIGA, self._read / _GIGA, self.threads, self.kernels)


def measure(threads: int | None = None, kernels: str = "auto", buffer_bytes: int = BUFFER_BYTES) -> Roofline:
    """The roofline of this machine now; takes less than a second on a quiet one."""
    probe = RooflineProbe(threads, kernels, buffer_bytes)
    for _ in range(3):
        probe.read()
        for _ in range(8):
            probe.compute()
    return probe.result()
