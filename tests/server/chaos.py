"""Chaos: the engine is killed and stopped at random moments under concurrent streams; every bit must be as undisturbed.

`python -m tests.server.chaos` (`make chaos`): 50 × kill -9 and 20 × SIGSTOP under 16 streams, greedy and sampled, a
second or two a round; in half of the rounds the engine that comes next is killed as well. In 5 rounds more, one request
among the streams crashes any engine that runs it. Then the server itself is ended: see chaos_server.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.engine.client import EngineClient, EngineState
from octavo.errors import RequestFailedError
from octavo.params import SamplingParams
from tests.server import chaos_server
from tests.support import clients
from tests.support.clients import Heard, answers, assert_idle, hear, is_running, mixed_cases, open_client, submit_all
from tests.support.tiny_llm import write_tiny_llm

POISON = [128, 129, 130]  # in a row: single ones are drawn now and then


@dataclass
class Report:
    """away: seconds from each hit until the engine was ready again; pauses: the longest wait for a token, a stream."""

    rounds: int = 0
    hits: int = 0
    poisoned: int = 0
    streams: int = 0
    tokens: int = 0
    restarts: int = 0
    away: list[float] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    load: float = 0.0
    seconds: float = 0.0
    before: dict[str, int] = field(default_factory=dict)
    after: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        left = "\n".join(f"  {name:26}{count:6} → {self.after[name]}" for name, count in self.before.items())
        return f"""\
{self.rounds} rounds in {self.seconds:.0f} s: {self.hits} signals to the engine, {self.poisoned} poison requests, \
{self.restarts} restarts
{self.streams} streams of {self.tokens} tokens in all, each with exactly its undisturbed tokens
{self.poisoned} poison requests got their error, nobody else did
  away after a signal       {_spread(self.away)}
  longest pause of a stream {_spread(self.pauses)}
  first load                {self.load:.2f} s
before → after
{left}"""


def _spread(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f} s (median), {max(seconds):.2f} s (longest)" if seconds else "none"


async def run(
    folder: Path,
    *,
    kills: int,
    stops: int,
    poisons: int = 0,
    streams: int = 16,
    tokens: int = 60,
    seed: int = 0,
    stall: float = 1.0,
    after_round: Callable[[], None] = lambda: None,
) -> Report:
    """Raises AssertionError for a stream that is not as it would have been, or for anything that is left behind."""
    source = random.Random(seed)
    hits = [signal.SIGKILL] * kills + [signal.SIGSTOP] * stops + [None] * poisons
    source.shuffle(hits)
    cases = mixed_cases(streams, tokens)
    report, begin = Report(), time.monotonic()
    faults = {"step_seconds": 0.005, "poison": POISON, "how": "exit"}
    async with open_client(folder, faults=faults, stall_seconds=stall) as client:
        report.load = time.monotonic() - begin
        started = time.monotonic()
        expected = await answers(client, cases)
        length = time.monotonic() - started
        report.before, pids = await _counts(client), []
        for number in hits:
            pids.append(client.engine_pid)
            if number is None:
                await _poison_round(client, cases, expected, report)
            else:
                # Now and then the next engine dies too, as it loads or has one request on trial.
                again = source.uniform(0.2, 0.7) if source.random() < 0.5 else None
                await _round(client, number, source.uniform(0, length), again, cases, expected, report)
            await assert_idle(client)
            report.after = await _counts(client)
            assert report.after == report.before, f"left behind: {report.before} became {report.after}"
            after_round()
        assert not any(is_running(pid) for pid in pids), "an engine process was left behind"
        report.restarts = client.restarts
        assert client.restarts == report.hits + 2 * report.poisoned  # in company and alone
    report.seconds = time.monotonic() - begin
    return report


async def _counts(client: EngineClient) -> dict[str, int]:
    stats = await client.call("stats")
    gc.collect()
    return {
        "file descriptors": clients.open_fds(),
        "tasks": len(asyncio.all_tasks()),
        "processes": _children(),
        "KV blocks in use": stats["blocks_used"],
        "KV blocks free or cached": stats["blocks_free"] + stats["blocks_cached"],
        "requests": stats["requests"] + len(client._replay.entries),
    }


def _children() -> int:
    """Of this process, zombies among them."""
    tasks = Path("/proc/self/task").iterdir()
    return sum(len((task / "children").read_text().split()) for task in tasks)


async def _round(
    client: EngineClient,
    number: signal.Signals,
    delay: float,
    again: float | None,
    cases: list[clients.Case],
    expected: list[Any],
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
    _check(heard, expected, number.name, report)


async def _poison_round(client: EngineClient, cases: list[clients.Case], expected: list[Any], report: Report) -> None:
    half = len(cases) // 2
    streams = submit_all(client, cases[:half])
    poison = client.submit("poison", [7, *POISON, 8], SamplingParams(max_tokens=9))
    streams += submit_all(client, cases[half:])
    bad, *heard = await asyncio.wait_for(asyncio.gather(*map(hear, [poison, *streams])), 60)
    assert isinstance(bad.error, RequestFailedError), f"the poison request got {bad}"
    assert bad.tokens == []
    await client.wait_ready()
    report.poisoned += 1
    _check(heard, expected, "a poison request", report)


def _check(heard: list[Heard], expected: list[Any], what: str, report: Report) -> None:
    for i, (one, wanted) in enumerate(zip(heard, expected)):
        assert one.answer == wanted, f"stream {i} is not as it would have been without {what}"
        report.tokens += len(one.tokens)
    report.pauses.append(max(one.gap for one in heard))
    report.rounds += 1
    report.streams += len(heard)


async def _hit(client: EngineClient, number: signal.Signals, last: int | None) -> int:
    """Sends a signal to the engine that comes after `last`; returns its pid."""
    while (pid := client.engine_pid) in (None, last):
        await asyncio.sleep(0.005)
    assert pid is not None
    os.kill(pid, number)
    return pid


def main() -> int:
    import logging

    from rich.console import Console
    from rich.progress import Progress

    parser = argparse.ArgumentParser(prog="python -m tests.server.chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--stops", type=int, default=20)
    parser.add_argument("--poisons", type=int, default=5)
    parser.add_argument("--terms", type=int, default=50)
    parser.add_argument("--server-kills", type=int, default=20)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    logging.getLogger("octavo").setLevel(logging.CRITICAL)  # each death would be told
    rounds = given.kills + given.stops + given.poisons
    with tempfile.TemporaryDirectory() as folder, Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("the engine dies", total=rounds)
        model = write_tiny_llm(Path(folder) / "model")
        counts = {"kills": given.kills, "stops": given.stops, "poisons": given.poisons, "streams": given.streams}
        report = asyncio.run(run(model, **counts, seed=given.seed, after_round=lambda: progress.advance(task)))
        task = progress.add_task("the server is ended", total=given.terms + given.server_kills)
        ends = {"terms": given.terms, "kills": given.server_kills}
        ended = chaos_server.run(model, **ends, seed=given.seed, after_round=lambda: progress.advance(task))
    print(report)
    print(ended)
    return 0


if __name__ == "__main__":
    sys.exit(main())
