"""The server itself is ended at random moments under streams, by SIGTERM and by kill -9; a part of `make chaos`."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.clients import is_running
from tests.support.served import Served, served

STREAMS, TOKENS, STEP_SECONDS = 4, 60, 0.01
ENGINE_GONE_SECONDS = 10.0


@dataclass
class Report:
    drained: list[float] = field(default_factory=list)  # seconds from SIGTERM until the process had ended
    hurried: list[float] = field(default_factory=list)  # the same after a second one
    orphans: list[float] = field(default_factory=list)  # seconds from kill -9 until the engine had ended

    def __str__(self) -> str:
        def longest(seconds: list[float]) -> str:
            return f"{max(seconds):.2f} s at most" if seconds else "none"

        return (
            f"{len(self.drained)} × SIGTERM: every stream whole, status 0 after {longest(self.drained)}; "
            f"{len(self.hurried)} × a second one: {longest(self.hurried)}\n"
            f"{len(self.orphans)} × kill -9 of the server: engine gone after {longest(self.orphans)}, "
            "the same port served again at once"
        )


def run(
    folder: Path, *, terms: int, kills: int, seed: int = 0, after_round: Callable[[], None] = lambda: None
) -> Report:
    """Raises AssertionError for a stream without its right end, another status than 0, or a process that is left."""
    source, report = random.Random(seed), Report()
    for number in range(terms):
        with served(folder, faults={"step_seconds": STEP_SECONDS}) as server:
            _terminate(server, source, report, hurry=number % 2 == 1)
        after_round()
    port = 0
    for _ in range(kills):
        with served(folder, "--port", str(port), faults={"step_seconds": STEP_SECONDS}) as server:
            port = server.port
            engines = server.children()
            streams = _streams(server, source)
            server.process.kill()
            server.process.wait()
            begin = time.monotonic()
            while any(map(is_running, engines)):
                assert time.monotonic() - begin < ENGINE_GONE_SECONDS, "the engine has outlived its server"
                time.sleep(0.01)
            report.orphans.append(time.monotonic() - begin)
            del streams  # which were open until here
        after_round()
    return report


def _streams(server: Served, source: random.Random) -> list[Iterator[bytes]]:
    """Starts them and returns at a random moment in their midst."""
    streams = [server.stream(max_tokens=TOKENS) for _ in range(STREAMS)]
    time.sleep(source.uniform(0, TOKENS * STEP_SECONDS))
    return streams


def _terminate(server: Served, source: random.Random, report: Report, *, hurry: bool) -> None:
    streams = _streams(server, source)
    begin = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    if hurry:
        time.sleep(source.uniform(0.05, 0.2))
        server.process.send_signal(signal.SIGTERM)
    ends = [b"".join(lines).strip().split(b"\n\n")[-1] for lines in streams]
    assert server.process.wait(20) == 0, server.log
    (report.hurried if hurry else report.drained).append(time.monotonic() - begin)
    for end in ends:
        whole = end.endswith(b"data: [DONE]")
        assert whole or (hurry and b'"error"' in end), f"a stream ended with {end!r}"
