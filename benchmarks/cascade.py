"""What reading a shared prefix once gives: decode throughput of sequences that share their prefix, and of others.

`python -m benchmarks.cascade`. The variants take turns in one loop; figures are medians of the rounds. All prompts are
in the prefix cache before the first round, so that a round is one step for the first tokens and then only decoding.
The processor time of a step is printed too: busy neighbours disturb it less than the clock.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from octavo.engine.llm import LLM
from octavo.outputs import RequestOutput
from octavo.params import SamplingParams

Prompts = list[list[int]]

UNSHARED, SHARED, OFF = "no shared prefix", "shared prefix", "shared prefix, cascade off"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cascade", description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--sequences", type=int, default=32, help="sequences in the batch (default 32)")
    parser.add_argument("--prefix", type=int, default=2000, help="tokens of the prefix (default 2000)")
    parser.add_argument("--own", type=int, default=50, help="tokens of each prompt behind the prefix (default 50)")
    parser.add_argument("--tokens", type=int, default=17, help="tokens to draw for each prompt (default 17)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", type=Path, default=None, help="write the figures here as well")
    options = parser.parse_args()

    rng = random.Random(1)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(100, 40_000) for _ in range(count)]

    prefix = tokens(options.prefix)
    shared = [prefix + tokens(options.own) for _ in range(options.sequences)]
    unshared = [tokens(options.prefix + options.own) for _ in range(options.sequences)]
    with (
        LLM(options.model, threads=options.threads) as llm,
        LLM(options.model, threads=options.threads, cascade=False) as off,
    ):
        variants = {UNSHARED: (llm, unshared), SHARED: (llm, shared), OFF: (off, shared)}
        for name, (engine, prompts) in variants.items():
            print(f"prefill: {name}", flush=True)
            engine.generate(prompts, SamplingParams(max_tokens=1, temperature=0.0))
        rates: dict[str, list[float]] = {name: [] for name in variants}
        processor: dict[str, list[float]] = {name: [] for name in variants}  # seconds a step
        for _ in range(options.rounds):
            answers = {}
            for name, (engine, prompts) in variants.items():
                begin = time.process_time()
                outputs = _decode(engine, prompts, options.tokens)
                processor[name].append((time.process_time() - begin) / options.tokens)
                rates[name].append(_tokens_per_second(outputs, options.tokens))
                answers[name] = [output.outputs[0].token_ids for output in outputs]
            if answers[SHARED] != answers[OFF]:
                raise SystemExit("cascade changed the tokens")
        threads, kernels = llm.info()["threads"], llm.info()["kernels"]

    medians = {name: statistics.median(values) for name, values in rates.items()}
    seconds = {name: statistics.median(values) for name, values in processor.items()}
    print(
        f"decode, {options.sequences} sequences of {options.prefix} + {options.own} tokens, {options.model}, "
        f"{kernels} kernels, {threads} threads, {options.rounds} rounds"
    )
    print(f"{'':28}  tok/s (range)           ratio  CPU ms a step  ratio")
    for name, values in rates.items():
        spread = f"({min(values):.0f} to {max(values):.0f})"
        print(
            f"{name:28}  {medians[name]:5.0f} {spread:16}  {medians[name] / medians[UNSHARED]:.2f}"
            f"  {seconds[name] * 1e3:13.0f}  {seconds[UNSHARED] / seconds[name]:5.2f}"
        )
    if options.json is not None:
        settings = {**vars(options), "json": str(options.json), "threads": threads, "kernels": kernels}
        figures = {
            name: {"tokens_per_second": rates[name], "processor_seconds_a_step": processor[name]} for name in variants
        }
        options.json.write_text(json.dumps({"settings": settings, "variants": figures}, indent=2) + "\n")


def _decode(llm: LLM, prompts: Prompts, tokens: int) -> list[RequestOutput]:
    outputs = llm.generate(prompts, SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True), use_tqdm=False)
    for prompt, output in zip(prompts, outputs):
        if output.error is not None:
            raise output.error
        if output.num_cached_tokens < len(prompt) - 1:
            raise SystemExit("a prompt was evicted from the cache: the KV memory is too small for this benchmark")
    return outputs


def _tokens_per_second(outputs: Sequence[RequestOutput], tokens: int) -> float:
    """Of the steps after the first tokens."""
    timings = [output.timings for output in outputs if output.timings is not None]
    begin = max(t.first_token for t in timings if t.first_token is not None)
    end = max(t.finished for t in timings if t.finished is not None)
    return len(outputs) * (tokens - 1) / (end - begin)


if __name__ == "__main__":
    main()
