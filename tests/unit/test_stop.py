"""No character of a stop string, nor any after it, is shown; nothing before it is lost; however the text is cut."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.params import SamplingParams
from octavo.sampling import StopChecker, resolve

EOS = 2
End = tuple[str, str | None, int | str | None]


def checker(**fields: Any) -> StopChecker:
    params = SamplingParams(**{"max_tokens": 10_000, **fields})
    model: dict[str, Any] = {"vocab_size": 100, "context_len": 100_000, "eos_ids": frozenset({EOS})}
    return StopChecker(resolve(params, prompt_len=1, encode=lambda text: [], **model))


def run(stop: StopChecker, pieces: list[str], ids: list[int] | None = None) -> End:
    """All text shown, with how it ended."""
    shown = ""
    for i, piece in enumerate(pieces):
        text, reason, stop_reason = stop.push(9 if ids is None else ids[i], piece)
        shown += text
        if reason is not None:
            return shown, reason, stop_reason
    return shown, None, None


def one_shot(text: str, stops: list[str]) -> tuple[str, str] | None:
    """(text before the stop, the stop): by earliest end, then by length."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return None


letters = st.text(alphabet="ab", max_size=40)
stop_strings = st.lists(st.text(alphabet="ab", min_size=1, max_size=6), min_size=1, max_size=4)


def cut(text: str, places: list[int]) -> list[str]:
    bounds = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in pairwise(bounds)]


@given(letters, stop_strings, st.lists(st.integers(0, 1000), max_size=15), st.booleans())
@settings(max_examples=400, deadline=None)
def test_i18_any_cut_gives_the_one_shot_answer(text: str, stops: list[str], places: list[int], include: bool):
    shown, reason, found = run(checker(stop=stops, include_stop_str_in_output=include), cut(text, places))
    expected = one_shot(text, stops)
    if expected is None:
        assert reason is None
        held = text[len(shown) :]
        assert text.startswith(shown)
        # Only what may still become a stop string is held back: the longest such end of the text.
        ends = [text[-k:] for k in range(1, len(text) + 1) if any(s.startswith(text[-k:]) for s in stops)]
        assert held == max(ends, key=len, default="")
    else:
        before, stop = expected
        assert (shown, reason, found) == (before + (stop if include else ""), "stop", stop)


@given(letters, stop_strings, st.lists(st.integers(0, 1000), max_size=15), st.sampled_from(["eos", "id", "length"]))
@settings(max_examples=200, deadline=None)
def test_text_held_back_is_shown_when_the_output_ends_otherwise(
    text: str, stops: list[str], places: list[int], how: str
):
    if one_shot(text, stops) is not None:
        return
    pieces = [*cut(text, places), ""]
    last = EOS if how == "eos" else 50 if how == "id" else 9
    fields: dict[str, Any] = {"stop_token_ids": [50]}
    if how == "length":
        fields["max_tokens"] = len(pieces)
    shown, reason, found = run(checker(stop=stops, **fields), pieces, [9] * (len(pieces) - 1) + [last])
    assert shown == text
    assert (reason, found) == ("length" if how == "length" else "stop", 50 if how == "id" else None)


def test_nothing_is_held_back_without_a_beginning_of_a_stop_string():
    stop = checker(stop=["END"])
    assert stop.push(9, "hello ")[0] == "hello "
    assert stop.push(9, "E")[0] == ""
    assert stop.push(9, "N")[0] == ""
    assert stop.push(9, "T E")[0] == "ENT "
    assert stop.push(9, "ND more") == ("", "stop", "END")


def test_the_longest_of_stops_completed_together_is_cut():
    assert run(checker(stop=["b", "ab"]), ["xab"]) == ("x", "stop", "ab")
    assert run(checker(stop=["abc", "b"]), ["xabc"]) == ("xa", "stop", "b")


def test_characters_beyond_ascii_are_matched_whole():
    assert run(checker(stop=["终🙂"]), ["日本", "终", "🙂x"]) == ("日本", "stop", "终🙂")


def test_end_of_sequence_ends_without_a_reason_unless_ignored():
    assert run(checker(), ["a", "b", ""], [9, 9, EOS]) == ("ab", "stop", None)
    assert run(checker(ignore_eos=True), ["a", "<e>", "b"], [9, EOS, 9]) == ("a<e>b", None, None)


def test_a_stop_id_ends_with_its_id_and_its_text_only_when_included():
    assert run(checker(stop_token_ids=[7]), ["a", "X"], [9, 7]) == ("a", "stop", 7)
    assert run(checker(stop_token_ids=[7], include_stop_str_in_output=True), ["a", "X"], [9, 7]) == ("aX", "stop", 7)
    assert run(checker(stop_token_ids=[EOS], ignore_eos=True), ["a", "X"], [9, EOS]) == ("a", "stop", EOS)


def test_max_tokens_ends_by_length_and_a_stop_at_the_last_token_wins():
    assert run(checker(max_tokens=2), ["a", "b", "c"]) == ("ab", "length", None)
    assert run(checker(max_tokens=2, stop=["b"]), ["a", "b", "c"]) == ("a", "stop", "b")
    assert run(checker(max_tokens=2), ["a", ""], [9, EOS]) == ("a", "stop", None)


def test_stops_completed_before_min_tokens_are_ignored_and_shown():
    stop = checker(stop=["ab"], min_tokens=3)
    assert run(stop, ["ab", "xa", "b!", "ab"]) == ("abx", "stop", "ab")  # completed by the third token
    assert run(checker(stop=["aa"], min_tokens=2), ["aa", "a"]) == ("a", "stop", "aa")  # begun before, completed after
    assert run(checker(stop=["ab"], min_tokens=4), ["ab", "ab", "ab"]) == ("ababab", None, None)


def test_end_ids_are_ignored_until_as_many_tokens_came_before():
    fields: dict[str, Any] = {"min_tokens": 2, "stop_token_ids": [7]}
    assert run(checker(**fields), ["", "x", ""], [EOS, 7, EOS]) == ("x", "stop", None)


def test_a_checker_rebuilt_from_the_same_tokens_goes_on_the_same_way():
    pieces = ["ab", "a", "aab", "b", "aba", "bb", "abb", "a"]
    fields: dict[str, Any] = {"stop": ["abba", "aabbaab"]}
    whole = checker(**fields)
    texts = [whole.push(9, piece)[0] for piece in pieces]
    for at in range(len(pieces)):
        again = checker(**fields)
        assert [again.push(9, piece)[0] for piece in pieces[:at]] == texts[:at]
        assert [again.push(9, piece)[0] for piece in pieces[at:]] == texts[at:]
