"""How soon the simulation finds a planted bug."""

from __future__ import annotations

from .fake import SimulationFault
from .world import Parts, run_world

MOST_STEPS = 10_000
_WORLD_STEPS = 500


def steps_to_find(parts: Parts, first_seed: int = 0) -> tuple[int, str]:
    """Runs small worlds, one seed after another, until one fails: an upper bound of the steps run, and the report."""
    seed = first_seed
    steps = 0
    while steps < MOST_STEPS:
        try:
            seen = run_world(seed, _WORLD_STEPS, parts)
        except SimulationFault as fault:
            return steps + _steps_in(str(fault)), str(fault)
        steps += seen["step"]
        seed += 1
    raise SimulationFault(f"not found within {MOST_STEPS} steps")


def _steps_in(report: str) -> int:
    return int(report.split("step ")[1].split(":")[0])
