"""Load: many streams for a long time, a part of them left in the middle; nothing may grow and nothing may be left.

`python -m tests.server.load` (`make load`): 64 streams of smollm2 for 10 minutes through `octavo serve`, half of them
greedy; a quarter of the clients leave at a random moment. Every greedy answer that is read to its end is compared with
the first answer to the same prompt. Memory of both processes, descriptors and KV blocks are sampled all the while.
Before that, the bounds that are promised in seconds: see load_limits.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.served import Served, served

PROMPTS = 40
OUTPUT = (8, 96)  # tokens
GROWTH = 0.05  # of the median of the last third over that of the first


@dataclass
class Report:
    counts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    tokens: float = 0.0
    samples: list[dict[str, float]] = field(default_factory=list)

    def thirds(self, name: str) -> tuple[float, float]:
        third = max(1, len(self.samples) // 3)
        values = [sample[name] for sample in self.samples]
        return statistics.median(values[:third]), statistics.median(values[-third:])

    def __str__(self) -> str:
        flat = ", ".join(f"{name} {a:.0f} → {b:.0f}" for name in self.samples[0] for a, b in (self.thirds(name),))
        counts = ", ".join(f"{count} {what}" for what, count in sorted(self.counts.items()))
        return f"{self.seconds:.0f} s, {self.tokens / self.seconds:.0f} tok/s; {counts}; medians of thirds: {flat}"


async def run(
    server: Served,
    *,
    streams: int,
    seconds: float,
    seed: int = 0,
    sample_seconds: float = 0.5,
    after_sample: Callable[[], None] = lambda: None,
) -> Report:
    """Raises AssertionError for an answer that differs, a status that is not 200, or anything that grows or stays."""
    source, report, known, filled = random.Random(seed), Report(), {}, False
    begin = time.monotonic()
    before = await metrics(server)
    clients = [
        asyncio.ensure_future(_client(server, random.Random(source.random()), begin + seconds, known, report))
        for _ in range(streams)
    ]
    while not all(client.done() for client in clients):
        await asyncio.wait(clients, timeout=sample_seconds)
        if time.monotonic() < begin + seconds:
            sample = await _sample(server)
            if sample.pop("free blocks") == 0 and not filled:  # from here on all KV memory is resident
                filled = True
                report.samples.clear()
            report.samples.append(sample)
            after_sample()
    await asyncio.gather(*clients)
    report.seconds = time.monotonic() - begin
    after = await metrics(server)
    report.tokens = after["octavo_generation_tokens_total"] - before["octavo_generation_tokens_total"]
    await assert_idle(server)
    for name in report.samples[0]:
        first, last = report.thirds(name)
        assert last <= first * (1 + GROWTH) + 8, f"{name} grew from {first} to {last}: {report}"
    return report


async def _client(server: Served, source: random.Random, end: float, known: dict[str, bytes], report: Report) -> None:
    while time.monotonic() < end:
        greedy = source.random() < 0.5
        number, tokens = source.randrange(PROMPTS), source.randrange(*OUTPUT)
        body: dict[str, Any] = {
            "prompt": f"Story {number}. " + "Once upon a time there was a castle. " * (number % 4),
            "max_tokens": tokens,
            "temperature": 0 if greedy else 0.8,
            "seed": source.randrange(1 << 30),
            "stream": True,
        }
        leave = source.randrange(1, tokens) if source.random() < 0.25 else None
        text = await _stream(server.port, body, leave)
        if text is None:
            report.counts["left by their client"] += 1
            continue
        report.counts["read to the end"] += 1
        if greedy:  # of the same prompt, whatever its length: one begins with the other
            text = text.rstrip("\ufffd".encode())  # a character that the limit has cut
            other = known.setdefault(body["prompt"], text)
            assert text.startswith(other) or other.startswith(text), f"{body}: {text!r} is not {other!r}"
            known[body["prompt"]] = max(text, other, key=len)


async def _stream(port: int, body: dict[str, Any], leave: int | None) -> bytes | None:
    """The text; None when the client left after so many chunks."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request("POST", "/v1/completions", {"model": "tiny", **body}))
        status = await reader.readline()
        assert b" 200 " in status, status + await reader.read(1 << 16)
        texts = []
        while line := await reader.readline():
            if line == b"data: [DONE]\n":
                return b"".join(texts)
            if line.startswith(b"data: "):
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                texts.append(chunk["choices"][0]["text"].encode())
                if leave is not None and len(texts) >= leave:
                    return None
        raise AssertionError("a stream without an end")
    finally:
        writer.close()


def request(method: str, path: str, body: Any = None) -> bytes:
    data = b"" if body is None else json.dumps(body).encode()
    head = (f"{method} {path} HTTP/1.1", "host: x", "connection: close", "content-type: application/json")
    return "\r\n".join((*head, f"content-length: {len(data)}", "", "")).encode() + data


async def metrics(server: Served) -> dict[str, float]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request("GET", "/metrics"))
    text = (await reader.read()).decode()
    writer.close()
    found = {}
    for line in text.splitlines():
        if line.startswith("octavo_"):
            name, _, value = line.rpartition(" ")
            found[name] = float(value)
    return found


async def _sample(server: Served) -> dict[str, float]:
    """Resident KiB of the API process and of its engine, descriptors of the first, KV blocks in all and free ones."""
    now = await metrics(server)
    pids = {"API process": server.process.pid, "engine": server.children()[0]}
    sample = {f"KiB of the {name}": _resident(pid) for name, pid in pids.items()}
    sample["descriptors"] = float(len(list(Path(f"/proc/{server.process.pid}/fd").iterdir())))
    sample["blocks"] = sum(value for name, value in now.items() if name.startswith("octavo_kv_blocks{"))
    sample["free blocks"] = now['octavo_kv_blocks{state="free"}']
    return sample


def _resident(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return float(line.split()[1])
    raise AssertionError(f"process {pid} has no memory")


async def assert_idle(server: Served, seconds: float = 5.0) -> None:
    """All that ran is over, and its blocks are free or cached."""
    end = time.monotonic() + seconds
    while True:
        now = await metrics(server)
        busy = now["octavo_num_requests_running"] + now['octavo_kv_blocks{state="used"}']
        if busy == 0:
            return
        assert time.monotonic() < end, f"still busy: {busy}"
        await asyncio.sleep(0.05)


def main() -> int:
    from rich.console import Console
    from rich.progress import Progress

    from octavo.weights.sources import resolve_model
    from tests.server import load_limits
    from tests.support.tiny_llm import write_tiny_llm

    parser = argparse.ArgumentParser(prog="python -m tests.server.load", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--streams", type=int, default=64)
    arguments = parser.parse_args()
    seconds = 60 * arguments.minutes
    kept = []
    with Progress(console=Console(stderr=True)) as progress:
        limits = progress.add_task("bounds in seconds", total=load_limits.CHECKS)

        def told(finding: load_limits.Finding) -> None:
            kept.append(finding.kept)
            print(("kept: " if finding.kept else "NOT KEPT: ") + finding.text, flush=True)
            progress.advance(limits)

        with tempfile.TemporaryDirectory() as folder:
            load_limits.run(write_tiny_llm(Path(folder)), told=told)
        time_left = progress.add_task(f"{arguments.streams} streams", total=seconds)
        with served(resolve_model("smollm2"), "--kv-memory", "256MiB", "--threads", "2") as server:
            begin = time.monotonic()

            def advance() -> None:
                progress.update(time_left, completed=time.monotonic() - begin)

            report = asyncio.run(run(server, streams=arguments.streams, seconds=seconds, after_sample=advance))
            assert server.end() == 0
    print(report)
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
