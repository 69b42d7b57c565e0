"""A constraint begins behind the first appearance of its marker, whatever tokens spell it, and at a token's end."""

from __future__ import annotations

import random

from octavo.grammar.marker import Marker


def test_any_tokens_that_may_come_find_the_marker_at_its_end() -> None:
    """Two letters, so that every self-overlap comes up; against a plain search of the bytes."""
    rng = random.Random(1)
    found = overran = 0
    for _ in range(300):
        text = "".join(rng.choices("ab", k=rng.randint(1, 6)))
        vocabulary = list({"".join(rng.choices("ab", k=rng.randint(1, 5))).encode() for _ in range(12)} | {b"a", b"b"})
        marker = Marker(text, [*vocabulary, b""])
        said, matched = b"", 0
        for _ in range(40):
            token_id = rng.randrange(len(vocabulary))
            after = said + vocabulary[token_id]
            at = after.find(text.encode())
            overruns = at >= 0 and at + len(text) < len(after)
            assert (token_id in marker.overruns(matched)) == overruns
            if overruns:
                overran += 1
                continue
            said = after
            state = marker.push(matched, token_id)
            assert (state is None) == (at >= 0)
            if state is None:
                found += 1
                break
            matched = state
    assert found > 100
    assert overran > 100


def test_a_marker_of_many_bytes_and_ids_without_text() -> None:
    tokens = [b"", "é".encode()[:1], "é".encode()[1:], "é".encode(), "é€".encode(), b"x"]
    marker = Marker("é", tokens)
    half = marker.push(0, 1)
    assert half == 1
    assert marker.push(half, 0) == 1
    assert marker.push(half, 2) is None
    assert marker.push(half, 5) == 0
    assert marker.push(0, 3) is None
    assert marker.overruns(0) == (4,)
