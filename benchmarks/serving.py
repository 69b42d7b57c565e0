"""What serving costs beside the engine alone: `python -m benchmarks.serving`; writes benchmarks/SERVING.md.

In turn, round after round: a batch of streams through `octavo serve`, read by a client that counts bytes and parses
nothing, and the same batch through `LLM.generate`. Prompts are random tokens, new ones each time; outputs are greedy
and go on past any end of sequence, so that the number of tokens is known. The first call of each is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from benchmarks.compare import machine

HERE = Path(__file__).parent
STREAMS, PROMPT, OUTPUT = 32, 128, 128  # tokens
LEAST_OF_OFFLINE, MOST_API_MICROSECONDS = 0.85, 60.0
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Rates:
    """One entry a round. tok/s of the whole batch, prefill included; microseconds of CPU for an output token."""

    served: list[float] = field(default_factory=list)
    offline: list[float] = field(default_factory=list)
    api: list[float] = field(default_factory=list)
    client: list[float] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    rates = measure(arguments.rounds, arguments.threads)
    text = report(rates, arguments.threads)
    HERE.joinpath("SERVING.md").write_text(text)
    print(text)


def measure(rounds: int, threads: int) -> Rates:
    from octavo import LLM, SamplingParams

    source, rates, count = random.Random(0), Rates(), STREAMS * OUTPUT
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
    with _server(threads) as (server, port), LLM("smollm2", threads=threads, kv_memory="512MiB") as llm:
        for turn in range(rounds + 1):
            prompts = [[source.randrange(1000, 40000) for _ in range(PROMPT)] for _ in range(STREAMS)]
            cpu, own = _cpu_seconds(server.pid), time.process_time()
            begin = time.perf_counter()
            asyncio.run(_streams(port, prompts))
            served = count / (time.perf_counter() - begin)
            cpu, own = _cpu_seconds(server.pid) - cpu, time.process_time() - own
            begin = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            offline = count / (time.perf_counter() - begin)
            if turn == 0:
                continue
            rates.served.append(served)
            rates.offline.append(offline)
            rates.api.append(1e6 * cpu / count)
            rates.client.append(1e6 * own / count)
            print(f"round {turn}: served {served:.0f}, offline {offline:.0f} tok/s", file=sys.stderr, flush=True)
    return rates


@contextmanager
def _server(threads: int) -> Iterator[tuple[subprocess.Popen[str], int]]:
    flags = ["--port", "0", "--threads", str(threads), "--kv-memory", "512MiB"]
    command = [sys.executable, "-m", "octavo", "serve", "smollm2", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"is ready at http://[\d.]+:(\d+)", line):
                yield process, int(found[1])
                break
        else:
            raise SystemExit("octavo serve did not start")
    finally:
        process.terminate()
        process.communicate()


def _cpu_seconds(pid: int) -> float:
    """Of the API process, all its threads; its engine is another process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


async def _streams(port: int, prompts: list[list[int]]) -> None:
    for answer in await asyncio.gather(*(_stream(port, prompt) for prompt in prompts)):
        if b"data: [DONE]" not in answer:
            raise SystemExit(f"a stream ended early: {answer!r}")


async def _stream(port: int, prompt: list[int]) -> bytes:
    """The last bytes of a streamed completion; the rest is read and forgotten."""
    options = {"model": "smollm2", "max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True, "stream": True}
    body = json.dumps({"prompt": prompt, **options}).encode()
    head = ("POST /v1/completions HTTP/1.1", "host: x", "connection: close", "content-type: application/json")
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write("\r\n".join((*head, f"content-length: {len(body)}", "", "")).encode() + body)
    last = b""
    while data := await reader.read(1 << 16):
        last = (last + data)[-200:]
    writer.close()
    return last


def report(rates: Rates, threads: int) -> str:
    shares = [served / offline for served, offline in zip(rates.served, rates.offline)]
    share, api = statistics.median(shares), statistics.median(rates.api)
    rows = [
        ("`octavo serve`, tok/s", _spread(rates.served, ".0f"), ""),
        ("`LLM.generate`, the same batch, tok/s", _spread(rates.offline, ".0f"), ""),
        ("served of offline", _spread(shares, ".1%"), _verdict(share >= LEAST_OF_OFFLINE, "≥ 85 %")),
        ("API process, µs of CPU a token", _spread(rates.api, ".0f"), _verdict(api <= MOST_API_MICROSECONDS, "≤ 60")),
        ("the client, µs of CPU a token", _spread(rates.client, ".0f"), ""),
    ]
    lines = [
        "# What serving costs",
        "",
        f"Made by `python -m {' '.join(['benchmarks.serving', *sys.argv[1:]])}` on {datetime.now():%-d %B %Y}: "
        f"{STREAMS} streams of `smollm2`, {PROMPT} random tokens in and {OUTPUT} out, {threads} threads, "
        f"{len(rates.served)} rounds; medians, with the least and the most in brackets.",
        "",
        *(f"- {name}: {value}" for name, value in machine.describe().items()),
        "",
        "| | measured | target |",
        "|---|---|---|",
        *(f"| {what} | {value} | {target} |" for what, value, target in rows),
        "",
        "The client, the API process and the engine share the cores: what the first two take, the engine lacks.",
        "",
    ]
    return "\n".join(lines)


def _spread(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} – {max(values):{form}})"


def _verdict(met: bool, target: str) -> str:
    return f"{target}: {'met' if met else '**not met**'}"


if __name__ == "__main__":
    main()
