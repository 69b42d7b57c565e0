"""A program with a seed gives the same bits, whatever the engine and the other programs do."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, ProgramState, assistant, function, gen, select, user
from tests.support.llms import open_llm

Facts = list[tuple[str, Any]]


@function
def wild(s: ProgramState, plan: int) -> None:
    """Random turns, gens, selects and forks; `plan` decides which."""
    draw = random.Random(plan)
    s += f"{plan}: " + "begin " * draw.randrange(12)
    facts: Facts = []
    for step in range(draw.randrange(2, 6)):
        kind = draw.randrange(4)
        if kind == 0:
            s += user(f"step {step}")
            s += assistant(gen(f"{step}", max_tokens=draw.randrange(1, 90), temperature=1.2, ignore_eos=True))
        elif kind == 1:
            s += f"n{step}" + gen(f"{step}", max_tokens=8, n=2, ignore_eos=True, stop="e")
        elif kind == 2:
            s += select(f"{step}", ["a", "bc", "bcd"], choices_method="unconditional_likelihood_normalized")
        else:
            forks = s.fork(draw.randrange(1, 7))
            forks += lambda i, _: f"fork {i}" + gen("inside", max_tokens=60, repetition_penalty=1.3, ignore_eos=True)
            forks += select("end", [" x", " yy"])
            forks.join()
            s += str(len(s["inside"]))
            facts += [("inside", s["inside"]), ("end", s["end"])]
        if kind != 3:
            facts.append((f"{step}", s[f"{step}"]))
    s.set_var("facts", facts)


PLANS = range(40)


@pytest.fixture(scope="module")
def alone(shared: LLM) -> list[tuple[str, Facts]]:
    """Each by itself, with nothing cached."""
    found = []
    for plan in PLANS:
        shared.flush_cache()
        state = wild.run(plan, seed=plan, backend=shared)
        found.append((state.text(), state["facts"]))
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunk_size": 5, "max_num_seqs": 3},
        {"kv_memory": "104kB", "max_model_len": 400},  # too little for all: some are preempted
        {"policy": "lpm", "cascade": False, "kernels": "scalar"},
    ],
    ids=["batched", "chunked", "preempted", "scalar"],
)
def test_programs_side_by_side_have_the_bits_of_each_alone(
    folder: Path, alone: list[tuple[str, Facts]], options: dict[str, Any]
) -> None:
    plans = PLANS[:10] if "kernels" in options else PLANS  # scalar kernels are slow
    with open_llm(folder, **{"kv_memory": "16MB", **options}) as llm:

        @function
        def one(s: ProgramState, plan: int) -> None:
            state = wild.run(plan, seed=plan)
            s.set_var("found", (state.text(), state["facts"]))

        states = one.run_batch([{"plan": plan} for plan in plans], backend=llm)
        assert [state["found"] for state in states] == alone[: len(plans)]
        if "max_model_len" in options:
            assert llm.stats()["preemptions"] > 0
