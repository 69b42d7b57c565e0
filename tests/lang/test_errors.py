"""Errors are raised where they happen, and name the program's line."""

from __future__ import annotations

import inspect
import time
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, CapacityError, InvalidParameterError, ProgramError, ProgramState, assistant, function, gen, user
from tests.support.llms import open_llm
from tests.support.tiny_llm import write_tiny_llm

LONG = "x" * 3000  # more than the context


def line_of(program: Any, text: str) -> int:
    lines, first = inspect.getsourcelines(program._function)
    return first + next(i for i, line in enumerate(lines) if text in line)


@function
def too_long(s: ProgramState) -> None:
    s += "a" + gen("first", max_tokens=2)
    s += LONG
    s += "b" + gen("second", max_tokens=2)


def test_an_error_of_the_backend_names_file_line_and_expression() -> None:
    with pytest.raises(ProgramError) as error:
        too_long.run()
    line = line_of(too_long, '"second"')
    assert (error.value.file, error.value.line, error.value.expression) == (__file__, line, "gen('second')")
    assert str(error.value).startswith(f"{__file__}:{line}: gen('second'): the prompt has ")
    assert isinstance(error.value.error, CapacityError)


def test_the_traceback_shows_the_line_of_the_program() -> None:
    with pytest.raises(ProgramError) as error:
        too_long.run()
    own = [entry for entry in error.traceback if str(entry.path) == __file__]
    assert own[-1].lineno + 1 == line_of(too_long, '"second"')


def test_a_wrong_argument_names_its_line() -> None:
    @function
    def wrong(s: ProgramState) -> None:
        s += "a"
        s += gen("x", top_p=7)

    with pytest.raises(ProgramError, match="top_p=7") as error:
        wrong.run()
    assert error.value.line == line_of(wrong, "top_p=7")
    assert isinstance(error.value.error, InvalidParameterError)


def test_a_program_can_catch_an_error_and_go_on() -> None:
    @function
    def careful(s: ProgramState) -> None:
        s += "hello"
        try:
            s += gen("x", stop_token_ids=[100_000])
        except ProgramError:
            s += gen("x", temperature=0, max_tokens=2)

    assert careful.run()["x"]


def test_the_programs_own_errors_pass_unchanged() -> None:
    @function
    def own(s: ProgramState) -> None:
        s += "a"
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        own.run()


def test_an_error_of_a_fork_is_raised_by_the_first_line_that_touches_it() -> None:
    @function
    def forks(s: ProgramState, then: Any) -> None:
        s += "a"
        one, two = s.fork(2)
        one += LONG
        one += gen("x", max_tokens=2)
        two += gen("x", max_tokens=2)
        assert two["x"] is not None
        then(s, one)

    for touch in (lambda s, one: one["x"], lambda s, one: one.text(), lambda s, one: one.sync()):
        with pytest.raises(ProgramError, match=r"gen\('x'\): the prompt has") as error:
            forks.run(then=touch)
        assert error.value.line == line_of(forks, "one += gen")


def test_an_error_of_a_fork_that_nobody_looks_at_ends_the_run() -> None:
    @function
    def careless(s: ProgramState) -> None:
        one = s.fork()[0]
        one += LONG + gen("x")

    with pytest.raises(ProgramError, match="the prompt has"):
        careless.run()


def test_an_error_ends_the_forks_under_way(llm: LLM) -> None:
    @function
    def broken(s: ProgramState) -> None:
        s += "a"
        for fork in s.fork(3):
            fork += gen("x", max_tokens=2000, ignore_eos=True)
        while llm.stats()["running"] < 3:
            time.sleep(0.001)
        raise LookupError("mine")

    before = llm.stats()["computed_tokens"]
    with pytest.raises(LookupError):
        broken.run()
    assert llm.stats()["computed_tokens"] - before < 3 * 2000 / 4


def test_a_batch_reports_the_error_of_each_item() -> None:
    @function
    def some(s: ProgramState, x: str) -> None:
        s += x + gen("y", max_tokens=2)

    items = [{"x": "a"}, {"x": LONG}, {"x": "b"}, {}, {"x": "c", "y": 1}, {"x": "d", "top_p": 7}]
    states = some.run_batch(items)
    kinds = [type(None), ProgramError, type(None), TypeError, TypeError, InvalidParameterError]
    assert [type(state.error()) for state in states] == kinds
    assert [isinstance(states[i]["y"], str) for i in (0, 2)] == [True, True]
    with pytest.raises(ProgramError, match="the prompt has") as error:
        states[1]["y"]
    assert error.value.line == line_of(some, "gen(")


def test_wrong_items_and_defaults_of_a_batch_are_told_at_once() -> None:
    @function
    def some(s: ProgramState, x: str) -> None:
        s += x + gen("y", max_tokens=2)

    with pytest.raises(InvalidParameterError, match="tuples of up to 1"):
        some.run_batch([("a", "b")])
    with pytest.raises(InvalidParameterError, match="temperature"):
        some.run_batch([{"x": "a"}], temperature=-1)
    with pytest.raises(InvalidParameterError, match="num_threads"):
        some.run_batch([{"x": "a"}], num_threads=0)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (lambda s: [s.user_begin(), s.assistant_begin()], "begun after the end of the user turn"),
        (lambda s: s.user_end(), "there is none"),
        (lambda s: s.user(assistant("hi")), "begun after the end of the user turn"),
        (lambda s: [s.user_begin(), s.assistant_end()], "it is user"),
    ],
)
def test_turns_out_of_order_are_told(program: Any, message: str) -> None:
    with pytest.raises(ProgramError, match=message) as error:
        function(program).run()
    assert error.value.file == __file__


def test_a_select_with_nothing_before_it_is_refused() -> None:
    @function
    def bare(s: ProgramState) -> None:
        s += gen("x", choices=["a", "b"])

    with pytest.raises(ProgramError, match="behind some text"):
        bare.run()


def test_the_model_without_a_template_refuses_turns_by_name(tmp_path: Path) -> None:
    @function
    def chat(s: ProgramState) -> None:
        s += user("hi")

    bare = write_tiny_llm(tmp_path / "bare", template=None)
    with open_llm(bare) as llm, pytest.raises(ProgramError, match="no chat template"):
        chat.run(backend=llm)
