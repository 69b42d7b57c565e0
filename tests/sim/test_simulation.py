"""The short form of `make sim`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from .__main__ import main
from .bugs import BUGS
from .fake import SimulationFault
from .search import MOST_STEPS, steps_to_find
from .waste import measure
from .world import EVENTS, Parts, run_world


def test_random_worlds_keep_every_invariant_and_see_every_event() -> None:
    seen: Counter[str] = Counter()
    for seed in range(30):
        seen += run_world(seed, 1_000)
    assert [event for event in EVENTS if seen[event] < 10] == []
    assert seen["step"] >= 30_000


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_found(name: str) -> None:
    steps, _ = steps_to_find(BUGS[name])
    assert steps <= MOST_STEPS


def test_a_failing_seed_replays_exactly() -> None:
    bug = BUGS["failed sequence enters the tree"]
    _, report = steps_to_find(bug)
    assert "replay: python -m tests.sim --seed " in report
    seed, steps = (int(report.split(flag)[1].split()[0]) for flag in ("--seed ", "--steps "))
    with pytest.raises(SimulationFault) as again:
        run_world(seed, steps, bug)
    assert str(again.value) == report


def test_the_replay_command_runs_one_world(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "2", "--steps", "100"]) == 0
    assert main(["--seed", "2", "--steps", "500", "--bug", "copy source not pinned"]) == 1
    assert "seed 2, step" in capsys.readouterr().err


def test_a_world_is_the_same_in_every_process() -> None:
    code = "from tests.sim.world import run_world; print(sorted(run_world(5, 300).items()))"
    root = Path(__file__).parents[2]
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=root,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert outputs == {f"{sorted(run_world(5, 300, Parts()).items())}\n"}


def test_average_kv_waste_is_under_four_percent() -> None:
    report = measure(requests=300)
    assert report.mean_prompt == pytest.approx(161, rel=0.02)
    assert report.mean_output == pytest.approx(338, rel=0.02)
    assert report.stats.copied_tokens > 0
    assert 0 < report.waste_percent < 4
