"""What a program writes is its text, and what it names is there."""

from __future__ import annotations

from typing import Any

import pytest

from octavo import (
    LLM,
    InvalidParameterError,
    ProgramState,
    SamplingParams,
    function,
    gen,
    select,
    set_var,
)


@function
def question(s: ProgramState, asked: str) -> str:
    """Answers."""
    s += f"Q: {asked}\n"
    s += gen("thought", max_tokens=8, temperature=0, ignore_eos=True) + "\nSo: " + select("answer", ["yes", "no"])
    return "done"


def greedy(llm: LLM, prompt: str, tokens: int) -> str:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].text


def test_text_is_what_was_written_in_order(llm: LLM) -> None:
    state = question.run(asked="why")
    thought = greedy(llm, "Q: why\n", 8)
    assert state["thought"] == thought
    assert state["answer"] in ("yes", "no")
    assert state.text() == f"Q: why\n{thought}\nSo: {state['answer']}"
    assert state.value == "done"


def test_arguments_go_by_place_and_by_name() -> None:
    assert question.run("why", seed=1).text() == question.run(asked="why", seed=1).text()
    assert question.bind(asked="why").run(seed=1).text() == question.run("why", seed=1).text()
    with pytest.raises(TypeError, match="asked"):
        question.run()
    with pytest.raises(TypeError, match="no parameter 'askd'"):
        question.run("why", askd=1)
    with pytest.raises(InvalidParameterError, match="a parameter of question"):
        question.bind(nothing=1)


def test_a_program_keeps_its_name_and_doc() -> None:
    assert (question.__name__, question.__doc__) == ("question", "Answers.")


def test_a_program_without_state_returns_its_text() -> None:
    @function
    def plain(asked: str) -> Any:
        s = f"Q: {asked}\n"
        s += gen("thought", max_tokens=8, temperature=0, ignore_eos=True)
        s += "\nSo: " + select("answer", ["yes", "no"])
        return s

    state = plain.run("why")
    assert type(state.value) is str
    assert state.value == state.text() == question.run("why").text()
    assert state["answer"] == question.run("why")["answer"]


def test_what_run_gives_is_the_default_of_each_gen_and_the_gens_own_wins() -> None:
    @function
    def two(s: ProgramState) -> None:
        s += "a" + gen("first") + "b" + gen("second", max_new_tokens=2)

    state = two.run(max_new_tokens=5, ignore_eos=True)
    tokens = [state.get_meta_info(name)["completion_tokens"] for name in ("first", "second")]
    assert tokens == [5, 2]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"max_new_tokens": 3}, {"max_tokens": 3}),
        ({"max_tokens": 3, "min_new_tokens": 3}, {"max_tokens": 3, "min_tokens": 3}),
        ({"max_tokens": 3, "return_logprob": True, "top_logprobs_num": 2}, {"max_tokens": 3, "logprobs": 2}),
        ({"max_tokens": 3, "return_logprob": False, "top_logprobs_num": 2}, {"max_tokens": 3}),
        (
            {"max_tokens": 3, "return_logprob": True, "logprob_start_len": 1},
            {"max_tokens": 3, "logprobs": 0, "prompt_logprobs": 0, "prompt_logprobs_start": 1},
        ),
    ],
)
def test_sglangs_names_mean_ours(llm: LLM, given: dict[str, Any], meant: dict[str, Any]) -> None:
    @function
    def one(s: ProgramState) -> None:
        s += "hello" + gen("x", seed=5, ignore_eos=True, **given)

    wanted = llm.generate("hello", SamplingParams(seed=5, ignore_eos=True, **meant), use_tqdm=False)[0]
    state = one.run()
    meta = state.get_meta_info("x")
    assert state["x"] == wanted.outputs[0].text
    assert meta["logprobs"] == wanted.outputs[0].logprobs
    assert meta["prompt_logprobs"] == wanted.prompt_logprobs
    assert (meta["finish_reason"], meta["seed"]) == ("length", 5)


def test_n_outputs_are_a_list_and_the_program_goes_on_behind_the_first() -> None:
    @function
    def many(s: ProgramState) -> None:
        s += "hello" + gen("x", max_tokens=6, n=3, ignore_eos=True) + "."

    state = many.run(seed=1)
    assert len(set(state["x"])) == 3
    assert state.text() == f"hello{state['x'][0]}."
    assert [meta["completion_tokens"] for meta in state.get_meta_info("x")["outputs"]] == [6, 6, 6]


def test_a_stop_string_ends_the_text_and_the_program_goes_on_before_it(llm: LLM) -> None:
    whole = greedy(llm, "hello", 8)
    stop = whole[4:6]
    cut = whole[: whole.find(stop)]

    @function
    def stopped(s: ProgramState) -> None:
        s += "hello" + gen("x", max_tokens=8, temperature=0, stop=stop, ignore_eos=True) + "|" + gen("y", temperature=0)

    state = stopped.run(max_tokens=4)
    assert state["x"] == cut
    assert state.get_meta_info("x")["stop_reason"] == stop
    assert state["y"] == llm.generate(f"hello{cut}|", SamplingParams(temperature=0, max_tokens=4))[0].outputs[0].text


def test_variables_and_scopes() -> None:
    @function
    def named(s: ProgramState) -> None:
        s += "a" + set_var("one", 1)
        s.set_var("two", [2])
        with s.var_scope("inside"):
            s += "b" + gen("x", max_tokens=2)
        s += "c"

    state = named.run()
    assert (state["one"], state.get_var("two"), state["inside"]) == (1, [2], "b" + state["x"])
    assert "x" in state
    assert "y" not in state


def test_a_missing_variable_is_a_key_error_that_tells_what_there_is() -> None:
    with pytest.raises(KeyError, match="no variable 'anser'; there are: thought, answer"):
        question.run("why")["anser"]


def test_programs_call_programs() -> None:
    @function
    def inner(s: ProgramState, x: str) -> None:
        s += x + gen("y", max_tokens=4)

    @function
    def phrase(x: str) -> Any:
        return f"[{x}" + gen("z", max_tokens=2) + "]"

    @function
    def outer(s: ProgramState) -> None:
        s += "A"
        inner(s, "B")  # goes on with this state
        other = inner("C")  # a program of its own, on the same backend
        s += other["y"] + phrase("D")

    state = outer.run(seed=3)
    again = outer.run(seed=3)
    assert state.text().startswith("AB" + state["y"])
    assert state.text().endswith(f"[D{state['z']}]")
    assert state.text() == again.text()
    assert type(phrase("E")) is ProgramState  # outside of a program it is `run`


@pytest.mark.parametrize("item", [None, 3, ["a"]])
def test_only_texts_and_expressions_can_be_added(item: Any) -> None:
    @function
    def wrong(s: ProgramState) -> None:
        s += item

    with pytest.raises(Exception, match="a text or an expression") as error:
        wrong.run()
    assert isinstance(error.value.__cause__, InvalidParameterError)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temprature": 1}, "temprature=1 is not allowed: no such argument"),
        ({"temperature": -1}, "temperature=-1"),
        ({"max_tokens": 3, "max_new_tokens": 3}, "max_tokens is given already"),
        ({"regex": "a", "dtype": int}, "at most one constraint"),
        ({"dtype": list}, "int, float, bool or str"),
        ({"choices": []}, "1 to 1024"),
        ({"choices": "abc"}, "a list of texts"),
        ({"choices": ["a"], "choices_method": "best"}, "one of token_length_normalized"),
        ({"choices_method": "greedy_token_selection"}, "given only with choices"),
        ({"name": ""}, "a text that is not empty"),
        ({"structured": {"regx": "a"}}, "regx"),
    ],
)
def test_a_wrong_argument_of_gen_is_told_where_it_is_given(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        gen(**arguments)


def test_run_refuses_what_belongs_to_a_gen() -> None:
    with pytest.raises(InvalidParameterError, match="an argument of gen"):
        question.run("why", n=2)
    with pytest.raises(InvalidParameterError, match="another name"):
        function(lambda s, backend: None)

    async def later(s: ProgramState) -> None:
        s += "x"

    with pytest.raises(InvalidParameterError, match="a plain function"):
        function(later)


def test_each_gen_has_a_seed_of_its_own() -> None:
    @function
    def drawn(s: ProgramState) -> None:
        for name in "abc":
            s += gen(name, max_tokens=1) if s.text() else "x" + gen(name, max_tokens=1)
        inner = drawn_again()
        s.set_var("inner", inner.get_meta_info("a")["seed"])

    @function
    def drawn_again(s: ProgramState) -> None:
        s += "x" + gen("a", max_tokens=1)

    state = drawn.run(seed=1)
    seeds = [state.get_meta_info(name)["seed"] for name in "abc"] + [state["inner"]]
    assert len(set(seeds)) == 4
    again = drawn.run(seed=1)
    assert [again.get_meta_info(name)["seed"] for name in "abc"] + [again["inner"]] == seeds


def test_meta_info_tells_the_seed_that_gives_the_same_text_again(llm: LLM) -> None:
    @function
    def drawn(s: ProgramState) -> None:
        s += "hello" + gen("x", max_tokens=8)

    state = drawn.run()
    params = SamplingParams(seed=state.get_meta_info("x")["seed"], max_tokens=8)
    assert state["x"] == llm.generate("hello", params, use_tqdm=False)[0].outputs[0].text


@pytest.mark.parametrize("backend", ["smollm2", 3, object()])
def test_what_no_program_can_run_on_is_refused(backend: Any) -> None:
    with pytest.raises(InvalidParameterError, match="an LLM, an OctavoServer or an OpenAIEndpoint"):
        question.run("why", backend=backend)
