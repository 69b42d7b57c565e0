"""KV waste of a real scheduler run with lengths like ShareGPT's: `python -m tests.sim.waste`.

Prompt mean 161 and output mean 338 tokens are those of the PagedAttention paper (arXiv 2309.06180, section 6.1);
both log-normal, capped at 2,048. Half of the prompts start with one system prompt: blocks are shared and copied.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from statistics import NormalDist

from octavo.kv.blocks import BlockPool
from octavo.kv.tree import PrefixTree
from octavo.scheduler.plan import SchedulerStats
from octavo.scheduler.scheduler import Scheduler, SchedulerConfig
from octavo.scheduler.sequence import Sequence

LONGEST = 2_048
VOCABULARY = 49_152
SYSTEM_TOKENS = 25


@dataclass(frozen=True)
class WasteReport:
    waste_percent: float  # mean over steps
    worst_percent: float
    mean_prompt: float
    mean_output: float
    stats: SchedulerStats

    def __str__(self) -> str:
        s = self.stats
        return (
            f"KV waste {self.waste_percent:.2f} % averaged over {s.steps} steps (worst {self.worst_percent:.1f} %); "
            f"prompt mean {self.mean_prompt:.0f}, output mean {self.mean_output:.0f} tokens; "
            f"{s.prefix_hit_tokens} tokens hit, {s.copied_tokens} of them copied; {s.preemptions} preemptions"
        )


def lengths(mean: float, count: int, rng: random.Random, sigma: float = 1.0) -> list[int]:
    """`count` log-normal lengths in 1 .. LONGEST with that mean, in random order."""
    normal = [NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)]

    def drawn(mu: float) -> list[int]:
        return [min(max(round(math.exp(mu + sigma * z)), 1), LONGEST) for z in normal]

    low, high = 0.0, math.log(LONGEST)
    for _ in range(40):
        middle = (low + high) / 2
        if sum(drawn(middle)) < mean * count:
            low = middle
        else:
            high = middle
    result = drawn(high)
    rng.shuffle(result)
    return result


def measure(requests: int = 400, sequences: int = 32, blocks: int = 1_200, seed: int = 0) -> WasteReport:
    rng = random.Random(seed)
    prompts, outputs = lengths(161, requests, rng), lengths(338, requests, rng)
    system = [rng.randrange(VOCABULARY) for _ in range(SYSTEM_TOKENS)]
    pool = BlockPool(blocks)
    scheduler = Scheduler(pool, PrefixTree(pool), SchedulerConfig(max_sequences=sequences))
    for i in range(requests):
        prompt = [rng.randrange(VOCABULARY) for _ in range(prompts[i])]
        if rng.random() < 0.5:
            prompt[:SYSTEM_TOKENS] = system[: len(prompt)]
        scheduler.add(Sequence(i, prompt, len(prompt), len(prompt) + outputs[i], arrival=i))
    waste: list[float] = []
    while scheduler.has_work():
        plan = scheduler.plan(128)
        assert plan is not None
        scheduler.commit(plan)
        waste.append(scheduler.stats().waste_percent)
        for chunk in plan.sequences:
            if chunk.samples:
                chunk.sequence.token_ids.append(rng.randrange(VOCABULARY))
                if len(chunk.sequence.token_ids) == chunk.sequence.max_total:
                    scheduler.finish(chunk.sequence)
    return WasteReport(
        sum(waste) / len(waste), max(waste), sum(prompts) / requests, sum(outputs) / requests, scheduler.stats()
    )


if __name__ == "__main__":
    print(measure(requests=2_000))
