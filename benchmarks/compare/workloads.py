"""What is measured. Prompts are random token ids; every engine gets the same ones in the same round."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from octavo.bench.datasets import SHAREGPT_INPUT, SHAREGPT_LONGEST, SHAREGPT_OUTPUT, long_tailed_lengths

LOWEST_ID, HIGHEST_ID = 1000, 40_000  # words in every vocabulary that is measured, no control tokens
Requests = tuple[list[list[int]], list[int]]


@dataclass(frozen=True)
class Workload:
    """counts: whether its rate is of prompt tokens or of output tokens, a second.

    op "generate" gets new prompts every round, none of which any cache can know. "decode" gets the same ones, so that
    their KV may be kept, and counts only what comes after the first token of each.
    """

    name: str
    op: str
    prompts: tuple[int, ...]  # tokens of each
    outputs: tuple[int, ...]
    counts: str = "output"

    def requests(self, round: int) -> Requests:
        rng = random.Random(f"{self.name} {round if self.op == 'generate' else ''}")
        return [random_ids(rng, n) for n in self.prompts], list(self.outputs)

    def rate(self, answer: dict[str, Any]) -> float:
        """Tokens a second of a worker's answer."""
        tokens = sum(self.prompts) if self.counts == "prompt" else answer["tokens"]
        return float(tokens / answer["seconds"])

    @cached_property
    def tokens(self) -> int:
        """Those that its rate counts."""
        if self.counts == "prompt":
            return sum(self.prompts)
        return sum(self.outputs) - (len(self.outputs) if self.op == "decode" else 0)

    @property
    def is_long(self) -> bool:
        return sum(self.prompts) > 8192

    def smaller(self) -> Workload:
        """For trying settings: the same shape, a fraction of the time."""
        if len(self.prompts) > 32:
            return replace(self, prompts=self.prompts[:32], outputs=tuple(max(n // 4, 1) for n in self.outputs[:32]))
        return self if self.op == "generate" else replace(self, outputs=tuple(max(n // 3, 9) for n in self.outputs))


def random_ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(LOWEST_ID, HIGHEST_ID) for _ in range(count)]


def _decode(batch: int, context: int, outputs: int) -> Workload:
    name = f"decode, batch {batch}" + (f", context {context:,}" if context != 128 else "")
    return Workload(name, "decode", (context,) * batch, (outputs,) * batch)


def sharegpt_like(count: int = 64) -> Workload:
    """Lengths as conversations have them: long-tailed, mean 161 in and 338 out, cut at 1,024; the same every time."""
    rng = random.Random(2023)
    prompts = long_tailed_lengths(count, SHAREGPT_INPUT, SHAREGPT_LONGEST, rng)
    outputs = long_tailed_lengths(count, SHAREGPT_OUTPUT, SHAREGPT_LONGEST, rng)
    return Workload(f"{count} requests, ShareGPT-like", "generate", tuple(prompts), tuple(outputs))


def sample(workload: Workload, count: int, round: int) -> Workload:
    """`count` of the requests, another choice each round, with nearly the mean lengths of all."""
    rng = random.Random(round)
    n = len(workload.prompts)
    wanted = count / n * sum(workload.prompts), count / n * sum(workload.outputs)

    def distance(chosen: Sequence[int]) -> float:
        got = sum(workload.prompts[i] for i in chosen), sum(workload.outputs[i] for i in chosen)
        return sum(abs(a / b - 1) for a, b in zip(got, wanted))

    chosen = min((rng.sample(range(n), count) for _ in range(2000)), key=distance)
    return replace(
        workload,
        name=f"{workload.name}, {count} of them",
        prompts=tuple(workload.prompts[i] for i in chosen),
        outputs=tuple(workload.outputs[i] for i in chosen),
    )


PREFILL = Workload("prefill 512", "generate", (512,), (1,), counts="prompt")
BATCH_1, BATCH_8, BATCH_32 = _decode(1, 128, 128), _decode(8, 128, 64), _decode(32, 128, 64)
LONG = _decode(32, 1024, 32)
REQUESTS = sharegpt_like()
ALL = (PREFILL, BATCH_1, BATCH_8, BATCH_32, LONG, REQUESTS)
