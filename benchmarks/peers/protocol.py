"""What a worker process says: JSON lines, a request on stdin and its answer on stdout. Standard library only.

The first request is the engine's settings; its answer says what runs. Each later one is {"op": "generate" | "decode",
"prompts": [[id, …], …], "lengths": [n, …], "options": {…}} and is answered with the fields of `Run`, the CPU seconds
the process spent since the answer before it (a sleeping worker must not take any from the others), and its resident
memory and the peak of it, in bytes. A failure is answered with {"error": text}; end of input ends the worker.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol


@dataclass
class Run:
    """One timed stretch: wall seconds, the CPU seconds of all threads, the ids generated in it; all ids of the call."""

    seconds: float
    cpu_seconds: float
    tokens: int
    outputs: list[list[int]]


class Stopwatch:
    """Runs from its construction."""

    def __init__(self) -> None:
        self._cpu, self._begin = _cpu_seconds(), time.perf_counter()

    def run(self, outputs: list[list[int]], before: int = 0) -> Run:
        """The stretch until now, in which all but `before` of the ids were generated."""
        seconds = time.perf_counter() - self._begin
        return Run(seconds, _cpu_seconds() - self._cpu, sum(map(len, outputs)) - before, outputs)


class Engine(Protocol):
    """A loaded model. Greedy, never ending at an end-of-sequence token, so that all do the same work."""

    def about(self) -> dict[str, Any]:
        """Versions and settings in use."""

    def generate(self, prompts: list[list[int]], lengths: list[int], options: dict[str, Any]) -> Run:
        """All requests at once, none of them seen before: from the call to the last token."""

    def decode(self, prompts: list[list[int]], lengths: list[int], options: dict[str, Any]) -> Run:
        """Only the stretch in which all prompts are prefilled: after the last first token, to the last token.

        The same prompts come again every round; an engine may keep their KV.
        """


def serve(load: Callable[[dict[str, Any]], Engine]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print does not come between the answers

    def answer(fields: dict[str, Any]) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    engine: Engine | None = None
    idle_since = _cpu_seconds()
    for line in sys.stdin:
        request = json.loads(line)
        begin = _cpu_seconds()
        try:
            if engine is None:
                engine = load(request)
                fields = engine.about()
            else:
                run = engine.decode if request["op"] == "decode" else engine.generate
                fields = asdict(run(request["prompts"], request["lengths"], request["options"]))
        except Exception as error:
            traceback.print_exc()
            fields = {"error": f"{type(error).__name__}: {error}"}
        answer(fields | {"idle_cpu_seconds": begin - idle_since} | _memory())
        idle_since = _cpu_seconds()
        if engine is None:
            return


def _memory() -> dict[str, int]:
    """Of /proc, not of getrusage: that counts the process before exec too, which was as large as the parent."""
    with open("/proc/self/status") as status:
        values = dict(line.split(":", 1) for line in status)
    return {name: int(values[key].split()[0]) * 1024 for name, key in (("rss", "VmRSS"), ("peak_rss", "VmHWM"))}


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
