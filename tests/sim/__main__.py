"""`python -m tests.sim`: a million steps in random worlds, and every planted bug.

`--seed S --steps N` replays one world; with `--bug NAME` that bug is planted.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from multiprocessing import get_context

from .bugs import BUGS
from .fake import SimulationFault
from .search import MOST_STEPS, steps_to_find
from .waste import measure
from .world import EVENTS, STEPS, Parts, run_world

LEAST_SEEN = 1_000


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--total", type=int, default=1_000_000, help="steps in all worlds together")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, help="run this world only")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of that world")
    parser.add_argument("--bug", choices=sorted(BUGS), help="plant a bug in that world")
    options = parser.parse_args(arguments)
    try:
        if options.seed is not None:
            seen = run_world(options.seed, options.steps, BUGS[options.bug] if options.bug else Parts())
            print(f"seed {options.seed}: {seen['step']} steps without a fault")
            return 0
        run_worlds(options.first_seed, options.total, options.processes)
        find_bugs()
    except SimulationFault as fault:
        print(fault, file=sys.stderr)
        return 1
    print(measure())
    return 0


def run_worlds(first_seed: int, total: int, processes: int) -> None:
    begin = time.monotonic()
    seeds = range(first_seed, first_seed + -(-total // STEPS))
    seen: Counter[str] = Counter()
    with get_context("spawn").Pool(processes) as workers:
        for number, world in enumerate(workers.imap_unordered(run_world, seeds), 1):
            seen += world
            if number % 50 == 0:
                print(f"{seen['step']:>9,} steps, {time.monotonic() - begin:.0f} s", flush=True)
    for event in sorted(EVENTS):
        print(f"{seen[event]:>10,}  {event}")
    rare = [event for event in EVENTS if seen[event] < LEAST_SEEN]
    if rare and total >= 1_000_000:
        raise SimulationFault(f"seen fewer than {LEAST_SEEN:,} times: {', '.join(rare)}")
    print(f"{seen['step']:,} steps without a fault")


def find_bugs() -> None:
    for name, parts in BUGS.items():
        steps, _ = steps_to_find(parts)
        print(f"planted bug found after {steps:>6,} steps: {name}")
    print(f"{len(BUGS)} planted bugs, each found within {MOST_STEPS:,} steps")


if __name__ == "__main__":
    sys.exit(main())
