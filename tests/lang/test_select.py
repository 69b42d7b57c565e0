"""`select` takes the choice that the log-probabilities favour, all scored in one batch; `score` tells them."""

from __future__ import annotations

from collections.abc import Callable
from math import fsum
from typing import Any

import pytest

from octavo import LLM, CapacityError, InvalidParameterError, ProgramState, SamplingParams, function, gen, select
from octavo.lang import greedy_token_selection, token_length_normalized, unconditional_likelihood_normalized
from octavo.lang.backends.tokens import choices_ids, prompt_ids
from octavo.lang.choices import Scored, pick
from octavo.lang.prompt import Output, Prompt

CHOICES = ["yes", "no", "perhaps", "ye"]
METHODS = [token_length_normalized, greedy_token_selection, unconditional_likelihood_normalized]


def prompt_logprobs(llm: LLM, ids: list[int], start: int) -> list[float]:
    """From a request of its own, with nothing cached."""
    llm.flush_cache()
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    found = llm.generate([ids], params, use_tqdm=False)[0].prompt_logprobs
    assert found is not None
    return [entry[token_id].logprob for token_id, entry in list(zip(ids, found))[start:] if entry is not None]


def test_score_gives_the_prompt_logprobs_of_the_concatenated_ids(llm: LLM) -> None:
    scores = llm.score("Is it? ", CHOICES)
    before = llm.tokenizer.encode("Is it? ")
    for choice, score in zip(CHOICES, scores):
        assert score.token_ids == llm.tokenizer.encode(choice, add_special_tokens=False)
        assert score.logprobs == prompt_logprobs(llm, before + score.token_ids, len(before))
        assert score.logprob == fsum(score.logprobs)
    assert llm.score(before, [score.token_ids for score in scores])[1].logprobs == scores[1].logprobs


def test_the_prompt_of_a_score_is_computed_once(llm: LLM) -> None:
    prompt = "x" * 800
    before = llm.stats()["computed_tokens"]
    llm.score(prompt, [f"{i} choice" for i in range(20)])
    assert llm.stats()["computed_tokens"] - before < 800 + 20 * 32


@pytest.mark.parametrize(
    ("prompt", "continuations", "error", "message"),
    [
        ("", ["a"], InvalidParameterError, "prompt"),
        ("a", ["b", ""], InvalidParameterError, r"continuations\[1\]"),
        ("a", "b", InvalidParameterError, "a list of texts"),
        ("a", ["b" * 3000], CapacityError, "does not fit"),
        ("a", [[10**6]], InvalidParameterError, "token ids from 0"),
    ],
)
def test_what_cannot_be_scored_is_refused(
    llm: LLM, prompt: str, continuations: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        llm.score(prompt, continuations)


def test_no_continuations_have_no_scores(llm: LLM) -> None:
    assert llm.score("a", []) == []


@pytest.mark.parametrize("method", METHODS)
def test_select_takes_the_best_by_its_method(llm: LLM, method: str) -> None:
    @function
    def ask(s: ProgramState) -> None:
        s += "Is it? " + select("answer", CHOICES, choices_method=method)

    state = ask.run()
    before = llm.tokenizer.encode("Is it? ")
    scored = []
    for choice in CHOICES:
        ids = llm.tokenizer.encode(choice, add_special_tokens=False)
        alone = [0.0, *prompt_logprobs(llm, ids, 1)]
        scored.append(Scored(ids, prompt_logprobs(llm, before + ids, len(before)), alone))
    assert state["answer"] == CHOICES[pick(method, scored)]
    meta = state.get_meta_info("answer")
    assert meta["choices"] == CHOICES
    assert [each["logprobs"] for each in meta["scores"]] == [each.logprobs for each in scored]
    assert meta["normalized_prompt_logprobs"] == [each.mean for each in scored]


def test_a_method_is_given_by_its_text_or_by_the_name_octavo_lang_has_for_it() -> None:
    assert METHODS == ["token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized"]
    assert [select("a", CHOICES, choices_method=method).method for method in METHODS] == METHODS  # type: ignore[attr-defined]
    with pytest.raises(InvalidParameterError, match="one of token_length_normalized, greedy"):
        select("a", CHOICES, choices_method="normalized")


def test_gen_with_choices_is_a_select() -> None:
    @function
    def ask(s: ProgramState, how: Callable[..., Any]) -> None:
        s += "Is it? " + how("answer", choices=CHOICES, choices_method=greedy_token_selection)

    assert ask.run(how=gen)["answer"] == ask.run(how=select)["answer"]


def scored(*logprobs: list[float]) -> list[Scored]:
    return [Scored(list(range(len(each))), each) for each in logprobs]


@pytest.mark.parametrize(
    ("method", "choices", "wanted"),
    [
        ("token_length_normalized", scored([-4.0], [-1.0, -2.0], [-1.5]), 1),  # of equals the first
        ("token_length_normalized", scored([-3.0], [-1.0, -4.0]), 1),
        ("greedy_token_selection", scored([-3.0], [-1.0, -9.0], [-2.0]), 1),
        ("greedy_token_selection", scored([-1.0, -5.0], [-1.0, -4.0], [-2.0]), 1),
        ("greedy_token_selection", scored([-1.0], [-1.0, -2.0]), 0),  # ended: stands with its mean, -1
        (
            "unconditional_likelihood_normalized",
            [Scored([1], [-1.0], [-0.5]), Scored([2, 3], [-3.0, -3.0], [-5.0, -3.0])],
            1,
        ),
    ],
)
def test_the_methods_on_numbers_done_by_hand(method: str, choices: list[Scored], wanted: int) -> None:
    assert pick(method, choices) == wanted


WORDS = {"is": 1, ":": 2, " ": 3, "A": 4, " A": 5, "B": 6, " B": 7}


def encode(text: str, special: bool) -> list[int]:
    """The longest words first, as a merging tokenizer would; 0 is BOS."""
    ids = [0] if special else []
    while text:
        word = max((word for word in WORDS if text.startswith(word)), key=len)
        ids.append(WORDS[word])
        text = text[len(word) :]
    return ids


def test_a_choice_behind_a_space_is_scored_as_the_word_with_its_space() -> None:
    assert choices_ids(Prompt(["is: "]), ["A", "B"], encode, whole=False) == (3, [[0, 1, 2, 5], [0, 1, 2, 7]])
    assert choices_ids(Prompt(["is: "]), ["AB"], encode, whole=False) == (3, [[0, 1, 2, 5, 6]])
    assert choices_ids(Prompt(["is:"]), [" A", "B"], encode, whole=False) == (3, [[0, 1, 2, 5], [0, 1, 2, 6]])


def test_what_the_model_wrote_stays_as_its_tokens() -> None:
    prompt = Prompt(["is", Output(": A", (2, 3, 4)), "B"])
    assert prompt_ids(prompt, encode, whole=False) == [0, 1, 2, 3, 4, 6]
    assert prompt_ids(prompt, encode, whole=True) == [0, 1, 2, 5, 6]
    assert prompt_ids(Prompt([Output(":", None), " A"], chat=True), encode, whole=False) == [2, 5]
