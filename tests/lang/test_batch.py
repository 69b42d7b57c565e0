"""A batch computes the common prefix once, gives each item what it would get alone, and is bounded."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from typing import Any

import pytest

from octavo import LLM, ProgramError, ProgramState, assistant, function, gen, select, system, user
from octavo.errors import ProgramCancelledError
from octavo.lang import batch
from octavo.lang.backends.engine import EngineBackend

EXAMPLES = "".join(f"Example {i}: the word {i * i} is a number.\n" for i in range(28))  # about 1,000 tokens


@function
def few_shot(s: ProgramState, question: str) -> None:
    s += f"{EXAMPLES}Question: {question}\nAnswer:"
    s += gen("answer", max_tokens=4, ignore_eos=True)
    s += select("sure", [" yes", " no"])


def test_sixty_four_programs_prefill_their_common_prefix_once(llm: LLM) -> None:
    assert len(EXAMPLES) > 1000
    before = llm.stats()
    states = few_shot.run_batch([{"question": f"{i}?"} for i in range(64)])
    after = llm.stats()
    assert all(state.error() is None for state in states)
    own = 64 * 4 * 24  # a gen and two choices: question, answer, choices, and up to a block at the end
    assert after["computed_tokens"] - before["computed_tokens"] < len(EXAMPLES) + own
    assert after["prefix_hit_tokens"] - before["prefix_hit_tokens"] >= 64 * len(EXAMPLES)


def test_the_prefix_is_found_by_tracing_before_the_batch(llm: LLM) -> None:
    trace = few_shot.trace()
    assert trace.prefix.text == EXAMPLES + "Question: "
    assert trace.complete
    assert [(node.kind, node.text) for node in trace.nodes] == [
        ("text", EXAMPLES + "Question: {question}\nAnswer:"),
        ("gen", "answer"),
        ("select", "sure"),
    ]
    few_shot.cache()
    assert few_shot.run("?").get_meta_info("answer")["cached_tokens"] >= len(trace.prefix.text) - 1


def test_a_trace_ends_where_the_program_asks_for_what_differs() -> None:
    @function
    def choosy(s: ProgramState, words: Any, name: Any) -> None:
        s += system("Be kind.")
        s += user("Hello " + name + words[0])
        if name == "x":
            s += "never"

    trace = choosy.trace()
    assert not trace.complete
    assert trace.prefix.text == "system: Be kind.\nuser: Hello "
    assert choosy.bind(name="y").trace().prefix.text == "system: Be kind.\nuser: Hello y"
    assert choosy.trace(name="y", words=["a"]).prefix.text == "system: Be kind.\nuser: Hello ya"


def test_a_trace_takes_defaults_as_they_are_and_goes_through_plain_forms() -> None:
    @function
    def times(s: ProgramState, x: str, count: int = 3) -> None:
        for i in range(count):
            s += f"line {i}\n"
        s += x

    assert times.trace().prefix.text == "line 0\nline 1\nline 2\n"

    @function
    def plain(x: str) -> Any:
        return "Word: " + gen("y") + x

    assert plain.trace().prefix.text == "Word: "
    assert [node.text for node in plain.trace().nodes] == ["Word: ", "y", "{x}"]


def test_arguments_that_all_items_share_belong_to_the_prefix(llm: LLM) -> None:
    @function
    def shots(s: ProgramState, examples: list[str], x: str) -> None:
        for example in examples:
            s += user(example) + assistant("ok")
        s += user(x) + assistant(gen("y", max_tokens=2, ignore_eos=True))

    examples = [f"This is example {i}, which is quite long." for i in range(8)]
    warmed: list[str] = []

    class Watched(EngineBackend):
        def warm(self, prompt: Any) -> None:
            warmed.append(prompt.text)
            super().warm(prompt)

    shots.run_batch([{"examples": examples, "x": str(i)} for i in range(3)], backend=Watched(llm))
    assert len(warmed) == 1
    assert warmed[0].endswith("assistant: ok\nuser: ")
    warmed.clear()
    shots.run_batch([{"examples": examples, "x": str(i)} for i in range(3)], backend=Watched(llm), precache=False)
    assert warmed == []


def test_an_item_of_a_batch_has_the_bits_of_a_run_alone() -> None:
    states = few_shot.run_batch([(f"{i}?",) for i in range(8)], seed=5)
    assert isinstance(states, list)
    alone = few_shot.run("3?", seed=states[3].seed)
    assert alone.text() == states[3].text()
    again = few_shot.run_batch([(f"{i}?",) for i in range(8)], seed=5, num_threads=1)
    assert [state.text() for state in again] == [state.text() for state in states]
    assert len({state["answer"] for state in states}) > 1


def test_threads_are_bounded_and_gone_at_the_end() -> None:
    running, most = set(), []

    @function
    def counted(s: ProgramState, i: int) -> None:
        running.add(threading.get_ident())
        most.append(len({thread.name for thread in threading.enumerate() if "octavo-batch" in thread.name}))
        s += f"{i}" + gen("x", max_tokens=1)

    before = threading.active_count()
    counted.run_batch([{"i": i} for i in range(40)], num_threads=3, precache=False)
    assert max(most) <= 3
    assert len(running) <= 3
    assert threading.active_count() == before


def test_a_generator_gives_states_in_order_and_runs_no_further_ahead_than_its_threads() -> None:
    started = []

    @function
    def noted(s: ProgramState, i: int) -> None:
        started.append(i)
        s += f"{i}" + gen("x", max_tokens=1)

    states = noted.run_batch([{"i": i} for i in range(30)], num_threads=2, generator_style=True, precache=False)
    assert isinstance(states, Generator)
    first = [next(states).text()[0] for _ in range(3)]
    assert first == ["0", "1", "2"]
    states.close()
    assert len(started) <= 3 + 2 * 2


def test_an_interrupt_ends_all_items(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []

    @function
    def endless(s: ProgramState, i: int) -> None:
        for fork in s.fork(2):
            fork += f"{i}" + gen("x", max_tokens=1900, ignore_eos=True)
        try:
            s += f"{i}" + gen("x", max_tokens=1900, ignore_eos=True)
        except ProgramError as error:
            ended.append(error.error)
            raise

    def interrupted(futures: Any) -> Any:
        while llm.stats()["running"] < 12:
            time.sleep(0.001)
        raise KeyboardInterrupt

    monkeypatch.setattr(batch, "as_completed", interrupted)
    before = llm.stats()["computed_tokens"]
    with pytest.raises(KeyboardInterrupt):
        endless.run_batch([{"i": i} for i in range(4)])
    assert llm.stats()["computed_tokens"] - before < 12 * 1900 / 4
    assert all(isinstance(error, ProgramCancelledError) for error in ended)


def test_the_progress_bar_counts_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []

    class Bar(batch.Progress):
        def finished(self, prompts: int = 1) -> None:
            counted.append(prompts)
            super().finished(prompts)

    monkeypatch.setattr(batch, "Progress", Bar)
    few_shot.run_batch([("a",), ("b",), ("c",)], progress_bar=True)
    assert counted == [1, 1, 1]


def test_an_empty_batch_is_empty() -> None:
    assert few_shot.run_batch([]) == []
    assert list(few_shot.run_batch([], generator_style=True)) == []
