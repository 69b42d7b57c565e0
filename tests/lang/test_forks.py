"""Forks go on side by side from what was written, which is computed once."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from octavo import LLM, InvalidParameterError, ProgramError, ProgramState, function, gen

PREFIX = "A prefix that all forks share. " * 20  # 620 tokens


@function
def vote(s: ProgramState, size: int) -> None:
    s += PREFIX
    forks = s.fork(size)
    forks += gen("answer", max_tokens=6, ignore_eos=True)
    forks.join()
    s += gen("end", max_tokens=4, ignore_eos=True)


def test_join_gathers_what_each_fork_set() -> None:
    @function
    def gather(s: ProgramState) -> None:
        s += "x"
        s.set_var("old", 1)
        forks = s.fork(3)
        forks += lambda i, fork: f"{i}" + gen("a", max_tokens=i + 1, ignore_eos=True)
        forks += ["p", gen("only", max_tokens=1), "q"]
        for i, fork in enumerate(forks):
            fork.set_var("mine", i)
        forks.join()

    state = gather.run()
    assert [len(text) > 0 for text in state["a"]] == [True] * 3
    assert (state["mine"], state["old"]) == ([0, 1, 2], 1)
    assert (state["only"][0], state["only"][2]) == (None, None)
    assert state.text() == "x"


def test_the_prefix_of_forks_is_computed_once(llm: LLM) -> None:
    before = llm.stats()
    vote.run(size=16)
    after = llm.stats()
    assert after["computed_tokens"] - before["computed_tokens"] < len(PREFIX) + 17 * 32
    assert after["prefix_hit_tokens"] - before["prefix_hit_tokens"] >= 16 * (len(PREFIX) - 1)


def test_forks_run_at_the_same_time() -> None:
    """Each waits for all: one after another they would never come to an end."""
    together = threading.Barrier(4, timeout=10)

    class Backend:
        def generate(self, *_: Any) -> Any:
            together.wait()
            raise ProgramError("f", 1, "", ValueError("met"))

        kept = score = warm = flush_cache = turns = generate

    @function
    def meet(s: ProgramState) -> None:
        forks = s.fork(4)
        forks += "x" + gen("a")
        forks.join()

    with pytest.raises(ProgramError, match="met"):
        meet.run(backend=Backend())


def test_a_run_with_a_seed_gives_the_same_bits_whatever_is_forked_beside() -> None:
    one, two = vote.run(size=2, seed=11), vote.run(size=5, seed=11)
    assert one["answer"] == two["answer"][:2]
    assert len(set(two["answer"])) == 5
    assert one["end"] == two["end"]
    assert vote.run(size=2, seed=12)["answer"] != one["answer"]


def test_a_fork_of_a_fork_and_a_copy() -> None:
    @function
    def tree(s: ProgramState) -> None:
        s += "a"
        left, right = s.fork(2)
        left += "b" + gen("x", max_tokens=2)
        leaves = left.fork(2)
        leaves += lambda i, leaf: f"{i}"
        with right.copy() as other:
            other += "c"
            other.set_var("copied", other.text())
        s.set_var("texts", [state.text() for state in (left, *leaves, right)])
        s.set_var("x", left["x"])
        s.set_var("copied", right["copied"])

    state = tree.run()
    left = "ab" + state["x"]
    assert state["texts"] == [left, left + "0", left + "1", "a"]
    assert state["copied"] == ["ac"]


def test_a_fork_is_added_to_by_its_place_and_cannot_become_another() -> None:
    @function
    def places(s: ProgramState) -> None:
        s += "x"
        forks = s.fork(2)
        forks[0] += gen("a", max_tokens=2, ignore_eos=True)
        forks[-1] += "y"
        forks[1]["b"] = 7
        forks.join()
        s["c"] = [state.text() for state in forks]

    state = places.run()
    assert state["a"][1] is None
    assert state["b"] == [None, 7]
    assert state["c"] == ["x" + state["a"][0], "xy"]

    @function
    def swapped(s: ProgramState) -> None:
        forks = s.fork(2)
        forks[0] = forks[1]

    with pytest.raises(ProgramError, match="the same fork") as error:
        swapped.run()
    assert isinstance(error.value.error, InvalidParameterError)


def test_more_forks_than_threads_all_come_to_an_end() -> None:
    @function
    def many(s: ProgramState) -> None:
        s += "x"
        forks = s.fork(200)
        forks += gen("a", max_tokens=1, ignore_eos=True)
        forks.join()

    before = threading.active_count()
    assert len(many.run()["a"]) == 200
    assert threading.active_count() == before


@pytest.mark.parametrize("size", [0, -1, 1.5, 10_000])
def test_a_wrong_size_is_refused(size: Any) -> None:
    with pytest.raises(ProgramError, match="an integer from 1 to 1024"):
        vote.run(size=size)


def test_a_wrong_join_or_list_is_refused() -> None:
    @function
    def wrong(s: ProgramState, how: Any) -> None:
        forks = s.fork(2)
        how(forks)

    with pytest.raises(ProgramError, match="gather_variable"):
        wrong.run(how=lambda forks: forks.join("concate_and_append"))
    with pytest.raises(ProgramError, match="one for each of 2 forks") as error:
        wrong.run(how=lambda forks: forks.__iadd__(["a"]))
    assert isinstance(error.value.error, InvalidParameterError)
