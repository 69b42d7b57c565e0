"""What busy neighbours cost: `python -m benchmarks.neighbours`, or --json for the figures.

Decode steps of 1 and 8 sequences and prefill of 512 tokens, through the executor, with one and two threads, beside 0, 1
and 2 processes that do nothing but spin. All in turn in one loop; figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from octavo import LLM, SamplingParams
from octavo.executor.interface import Batch
from octavo.sampling import SamplerState, build_rows, resolve

THREADS, NEIGHBOURS = (1, 2), (0, 1, 2)
CONTEXT = 128
WORKLOADS = {"decode, batch 1": 1, "decode, batch 8": 8, "prefill 512": 0}
SECONDS = 0.5  # of each measurement: several turns of the system's scheduler
# Of its quiet speed, the share that the team keeps beside so many neighbours; and its least speed beside one thread's.
LEAST_KEPT = {1: 0.42, 2: 0.38}
LEAST_BESIDE_ONE_THREAD = 0.9

Rates = dict[tuple[str, int, int], list[float]]  # workload, threads, neighbours → steps a second, one a round


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rates = measure(arguments.rounds)
    head, rows = table(rates)
    judged = verdicts(rates)
    if arguments.json:
        print(json.dumps({"table": [head, rows], "verdicts": judged}))
        return
    for row in [head, *rows]:
        print(f"{row[0]:18}" + "".join(f"{cell:>16}" for cell in row[1:]))
    for verdict in judged:
        kept, least = verdict["measured"][0], verdict["least"]
        text = (
            f"{verdict['workload']}, {verdict['what']}: {kept:.0%} of {verdict['against']}, at least {least:.0%} wanted"
        )
        print(text + ("" if verdict["met"] else "  NOT MET"))


def measure(rounds: int) -> Rates:
    rates: Rates = {}
    llms = {threads: LLM("smollm2", threads=threads, kv_memory="128MiB") for threads in THREADS}
    stops = multiprocessing.get_context("spawn")
    try:
        runs = {(name, t): _step(llm, batch) for t, llm in llms.items() for name, batch in WORKLOADS.items()}
        for round in range(rounds + 1):  # the first one warms up
            for neighbours in NEIGHBOURS:
                spinning = [stops.Process(target=_spin, daemon=True) for _ in range(neighbours)]
                for process in spinning:
                    process.start()
                if spinning:
                    time.sleep(0.5)  # until they spin
                try:
                    for (name, threads), run in runs.items():
                        rate = _rate(run)
                        if round:
                            rates.setdefault((name, threads, neighbours), []).append(rate)
                finally:
                    for process in spinning:
                        process.terminate()
                        process.join()
    finally:
        for llm in llms.values():
            llm.close()
    return rates


def table(rates: Rates) -> tuple[list[str], list[list[str]]]:
    """Steps a second; in brackets the share of the same threads' quiet speed."""
    head = ["workload", "threads", *(f"{n} neighbours" if n else "quiet" for n in NEIGHBOURS)]
    rows = []
    for name in WORKLOADS:
        for threads in THREADS:
            speeds = [statistics.median(rates[name, threads, n]) for n in NEIGHBOURS]
            kept = [f"{speed:.1f} ({speed / speeds[0]:.0%})" for speed in speeds[1:]]
            rows.append([name, str(threads), f"{speeds[0]:.1f}", *kept])
    return head, rows


def verdicts(rates: Rates) -> list[dict[str, Any]]:
    """measured: median, least and most over the rounds, each a ratio within a round."""
    team, one = max(THREADS), min(THREADS)
    found = []

    def judge(name: str, what: str, against: str, values: Sequence[float], least: float) -> None:
        measured = [statistics.median(values), min(values), max(values)]
        found.append(
            {
                "workload": name,
                "what": what,
                "against": against,
                "measured": measured,
                "least": least,
                "met": measured[0] >= least,
            }
        )

    for name in WORKLOADS:
        for n, least in LEAST_KEPT.items():
            busy = f"{n} busy neighbour{'s' if n > 1 else ''}"
            pairs = zip(rates[name, team, n], rates[name, team, 0])
            judge(name, busy, "its quiet speed", [a / b for a, b in pairs], least)
            pairs = zip(rates[name, team, n], rates[name, one, n])
            judge(name, busy, "one thread under the same load", [a / b for a, b in pairs], LEAST_BESIDE_ONE_THREAD)
    return found


def _rate(run: Callable[[], Any]) -> float:
    begin, count = time.perf_counter(), 0
    while (seconds := time.perf_counter() - begin) < SECONDS or count == 0:
        run()
        count += 1
    return count / seconds


def _step(llm: LLM, batch: int) -> Callable[[], Any]:
    """A greedy step of `batch` sequences at CONTEXT tokens, or, for 0, of a prompt of 512."""
    executor = llm._executor
    ids = [1000 + 37 * i % 40_000 for i in range(512)]
    if batch == 0:
        prompt, one = _batch([ids], 0), _rows(llm, ids, 1)
        return lambda: executor.step(prompt, one)
    rows = _rows(llm, ids[:CONTEXT], 1)
    for sequence in range(batch):
        executor.step(_batch([ids[:CONTEXT]], 0, sequence * _blocks(CONTEXT + 1)), rows)
    step, all = _batch([[i] for i in ids[:batch]], CONTEXT), _rows(llm, ids[:CONTEXT], batch)
    return lambda: executor.step(step, all)


def _blocks(tokens: int) -> int:
    return -(-tokens // 16)


def _batch(tokens: Sequence[Sequence[int]], start: int, first_block: int = 0) -> Batch:
    count, sequences = len(tokens[0]), len(tokens)
    each = _blocks(start + count) if start else _blocks(count + 1)
    blocks = np.arange(first_block, first_block + each * sequences, dtype=np.int32)
    zero = [] if start else [(block, -1, 0) for block in blocks.tolist()]
    return Batch(
        token_ids=np.array(tokens, dtype=np.int32).reshape(-1),
        positions=np.tile(np.arange(start, start + count, dtype=np.int64), sequences),
        sequence_rows=np.arange(sequences + 1, dtype=np.int32) * count,
        block_tables=blocks,
        block_offsets=np.arange(sequences + 1, dtype=np.int32) * each,
        logit_rows=np.arange(1, sequences + 1, dtype=np.int32) * count - 1,
        block_ops=np.array(zero, dtype=np.int32).reshape(-1, 3),
    )


def _rows(llm: LLM, ids: Sequence[int], count: int) -> Any:
    vocab_size = llm._executor.vocab_size
    params = SamplingParams(temperature=0.0)
    resolved = resolve(
        params, prompt_len=len(ids), vocab_size=vocab_size, context_len=8192, eos_ids=frozenset(), encode=lambda _: []
    )
    scalars = [SamplerState(resolved, ids, n).scalars for n in range(count)]
    return build_rows(scalars, [len(ids)] * count, [None] * count, vocab_size)


def _spin() -> None:
    while True:
        pass


if __name__ == "__main__":
    main()
