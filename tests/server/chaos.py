"""Chaos: the engine is killed and stopped at random moments under concurrent streams; every bit must be as undisturbed.

`python -m tests.server.chaos` (`make chaos`): 50 × kill -9 and 20 × SIGSTOP under 16 streams, a second or two a round;
in half of the rounds the engine that comes next is killed as well.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from octavo.engine.client import EngineClient, EngineState
from tests.support import clients
from tests.support.clients import Heard, answers, assert_idle, hear, is_running, mixed_cases, open_client, submit_all
from tests.support.tiny_llm import write_tiny_llm


@dataclass
class Report:
    rounds: int = 0
    hits: int = 0
    streams: int = 0
    away: list[float] = field(default_factory=list)  # seconds from each hit until the engine was ready again
    load: float = 0.0

    def __str__(self) -> str:
        away = sorted(self.away)
        return (
            f"{self.rounds} rounds, {self.hits} hits, {self.streams} streams, all with the undisturbed bits; away "
            f"{away[len(away) // 2]:.2f} s (median), {away[-1]:.2f} s (longest); the first load took {self.load:.2f} s"
        )


async def run(
    folder: Path, *, kills: int, stops: int, streams: int = 16, tokens: int = 60, seed: int = 0, stall: float = 1.0
) -> Report:
    """Raises AssertionError for a stream that is not as it would have been, or for anything that is left behind."""
    source = random.Random(seed)
    hits = [signal.SIGKILL] * kills + [signal.SIGSTOP] * stops
    source.shuffle(hits)
    cases = mixed_cases(streams, tokens)
    report = Report()
    begin = time.monotonic()
    async with open_client(folder, faults={"step_seconds": 0.005}, stall_seconds=stall) as client:
        report.load = time.monotonic() - begin
        begin = time.monotonic()
        expected = await answers(client, cases)
        length = time.monotonic() - begin
        gc.collect()
        descriptors, tasks = clients.open_fds(), len(asyncio.all_tasks())
        pids = []
        for number in hits:
            pids.append(client.engine_pid)
            # Now and then the next engine dies too, as it loads or has one request on trial.
            again = source.uniform(0.2, 0.7) if source.random() < 0.5 else None
            await _round(client, number, source.uniform(0, length), again, cases, expected, report)
            await assert_idle(client)
            gc.collect()
            assert clients.open_fds() == descriptors, "a descriptor was left behind"
            assert len(asyncio.all_tasks()) == tasks, "a task was left behind"
        assert not any(is_running(pid) for pid in pids), "an engine process was left behind"
        assert client.restarts == report.hits
    return report


async def _round(
    client: EngineClient,
    number: signal.Signals,
    delay: float,
    again: float | None,
    cases: list[clients.Case],
    expected: list[object],
    report: Report,
) -> None:
    heard = [Heard() for _ in cases]
    tasks = [asyncio.create_task(hear(*pair)) for pair in zip(submit_all(client, cases), heard)]
    await asyncio.sleep(delay)
    begin = time.monotonic()
    pid = await _hit(client, number, None)
    report.hits += 1
    if again is not None:
        await asyncio.sleep(again)
        pid = await _hit(client, signal.SIGKILL, pid)
        report.hits += 1
    while client.engine_pid in (None, pid) or client.state is not EngineState.READY:
        assert time.monotonic() - begin < 30, f"not ready again after {number.name}: {client.reason}"
        await asyncio.sleep(0.005)
    report.away.append(time.monotonic() - begin)
    await asyncio.wait_for(asyncio.gather(*tasks), 60)
    for i, (one, wanted) in enumerate(zip(heard, expected)):
        assert one.answer == wanted, f"stream {i} is not as it would have been without {number.name}"
    report.rounds += 1
    report.streams += len(cases)


async def _hit(client: EngineClient, number: signal.Signals, last: int | None) -> int:
    """Sends a signal to the engine that comes after `last`; returns its pid."""
    while (pid := client.engine_pid) in (None, last):
        await asyncio.sleep(0.005)
    assert pid is not None
    os.kill(pid, number)
    return pid


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.server.chaos")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--stops", type=int, default=20)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_llm(Path(folder) / "model")
        print(asyncio.run(run(model, kills=given.kills, stops=given.stops, streams=given.streams, seed=given.seed)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
