"""What a gen is held to is what comes, typed by its dtype; the number in the text is the number in the variable."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from octavo import ProgramError, ProgramState, StructuredOutputs, function, gen, gen_int, gen_string
from octavo.lang.typed import value_of

SEEDS = range(12)


@function
def typed(s: ProgramState, dtype: type) -> None:
    s += "It is" + gen("x", max_tokens=1500, dtype=dtype) + "."


@pytest.mark.parametrize("dtype", [int, float, bool, str])
def test_a_dtype_gives_a_value_of_its_type_and_the_text_that_says_it(dtype: type) -> None:
    for seed in SEEDS:
        state = typed.run(dtype=dtype, seed=seed)
        value = state["x"]
        assert type(value) is dtype
        text = state.text().removeprefix("It is").removesuffix(".")
        said = json.loads(text) if dtype is str else {"True": True, "False": False}.get(text.strip())
        assert value == (said if dtype in (str, bool) else dtype(text))


def test_short_names_of_dtypes() -> None:
    @function
    def two(s: ProgramState) -> None:
        s += "a" + gen_int("i", 40) + "b" + gen_string("t", 80)

    state = two.run(seed=1)
    assert (type(state["i"]), type(state["t"])) == (int, str)


def test_a_regex_holds_what_is_written() -> None:
    @function
    def dated(s: ProgramState) -> None:
        s += "On " + gen("day", max_tokens=40, regex=r"[0-9]{4}-[01][0-9]-[0-3][0-9]")

    for seed in SEEDS:
        assert re.fullmatch(r"[0-9]{4}-[01][0-9]-[0-3][0-9]", dated.run(seed=seed)["day"])


def test_a_schema_gives_json_of_its_shape() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 0}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }

    @function
    def extract(s: ProgramState, given: dict[str, Any]) -> None:
        s += "As JSON: " + gen("x", max_tokens=120, **given)

    for given in ({"json_schema": schema}, {"json_schema": json.dumps(schema)}, {"structured": {"json": schema}}):
        state = extract.run(given=given, seed=2)
        found = json.loads(state["x"])
        assert (type(found["a"]), type(found["b"])) == (int, bool)
        assert state.get_meta_info("x")["finish_reason"] == "stop"
    assert extract.run(given={"structured": StructuredOutputs(choice=["q"])})["x"] == "q"


def test_a_batch_of_constrained_gens_has_the_bits_of_runs_alone() -> None:
    states = typed.run_batch([{"dtype": int} for _ in range(10)], seed=3)
    for state in states:
        assert typed.run(dtype=int, seed=state.seed).text() == state.text()


def test_n_constrained_outputs_are_all_typed() -> None:
    @function
    def guesses(s: ProgramState) -> None:
        s += "It is" + gen("x", max_tokens=40, dtype=int, n=3)

    state = guesses.run(seed=1)
    assert [type(value) for value in state["x"]] == [int, int, int]
    assert int(state.text().removeprefix("It is")) == state["x"][0]


def test_a_value_that_was_cut_off_is_an_error_that_says_so() -> None:
    @function
    def cut(s: ProgramState) -> None:
        s += "It is" + gen("x", max_tokens=1, dtype=str)

    with pytest.raises(ProgramError, match="ended too early; raise max_tokens"):
        cut.run(seed=1)


def test_a_constraint_that_cannot_be_compiled_names_the_programs_line() -> None:
    @function
    def broken(s: ProgramState) -> None:
        s += "x" + gen("x", regex="(")

    with pytest.raises(ProgramError, match="regex") as error:
        broken.run()
    assert error.value.file == __file__


@pytest.mark.parametrize(
    ("dtype", "text", "wanted"),
    [
        (int, " 42 ", (42, " 42")),
        (int, "-7.5", (-7, "-7")),
        (float, "3.25,", (3.25, "3.25")),
        (float, "3.", (3.0, "3")),
        (bool, " False", (False, " False")),
        (str, '"a \\"b\\" \\n"', ('a "b" \n', '"a \\"b\\" \\n"')),
    ],
)
def test_the_character_behind_a_number_is_not_kept(dtype: type, text: str, wanted: Any) -> None:
    assert value_of(dtype, text) == wanted
