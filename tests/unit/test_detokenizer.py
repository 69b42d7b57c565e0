"""Streamed text is the whole text, for every list of token ids."""

from __future__ import annotations

import codecs
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import InvalidParameterError
from octavo.tokenizer import IncrementalDetokenizer, Tokenizer
from octavo.weights.assets import TokenizerAssets
from tests.support.tokenizer_golden import FOLDER, gguf_vocabularies, load

NAMES = ["gguf_smollm", "gguf_sentencepiece", "gguf_sentencepiece_no_prefix", "hf_byte_level", "hf_sentencepiece"]
EXTRA_IDS = 3


@cache
def golden(name: str) -> Tokenizer:
    if name.startswith("gguf_"):
        metadata = gguf_vocabularies()[name]
        width = len(metadata["tokenizer.ggml.tokens"]) + EXTRA_IDS
        return Tokenizer.from_assets(TokenizerAssets("gguf", None, metadata, None), width)
    raw = (FOLDER / f"{name.removeprefix('hf_')}.json").read_bytes()
    size = Tokenizer.from_assets(TokenizerAssets("hf", raw, {}, None)).vocab_size
    return Tokenizer.from_assets(TokenizerAssets("hf", raw, {}, None), size + EXTRA_IDS)


@cache
def broken_ids(name: str) -> list[int]:
    """Tokens that are no whole characters: the ones that make streaming hard."""
    tokenizer = golden(name)
    return [i for i in range(tokenizer.vocab_size) if "\ufffd" in tokenizer.token_text(i)]


def id_lists(name: str) -> st.SearchStrategy[list[int]]:
    tokenizer = golden(name)
    anything = st.integers(0, tokenizer.vocab_size + EXTRA_IDS - 1)
    broken = st.sampled_from(broken_ids(name))
    special = st.sampled_from(sorted(tokenizer.special_ids))
    unused = st.integers(tokenizer.vocab_size, tokenizer.vocab_size + EXTRA_IDS - 1)
    return st.lists(st.one_of(anything, broken, broken, special, unused), max_size=24)


def stream(tokenizer: Tokenizer, ids: list[int], skip: bool, at_start: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip, at_start)
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("skip", [True, False])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_i17_deltas_are_the_whole_text_for_every_list_of_ids(name: str, skip: bool, data: st.DataObject) -> None:
    tokenizer = golden(name)
    ids = data.draw(id_lists(name))
    at_start = data.draw(st.booleans())
    deltas = stream(tokenizer, ids, skip, at_start)
    whole = tokenizer.decode(ids, skip, at_start)
    assert "".join(deltas) == whole
    # Every prefix of the stream is a prefix of the text: so no U+FFFD appears that the text lacks.
    shown = ""
    for delta in deltas:
        shown += delta
        assert whole.startswith(shown)


@pytest.mark.parametrize("name", NAMES)
def test_the_golden_texts_stream_without_a_stray_replacement_character(name: str) -> None:
    tokenizer = golden(name)
    for text in load("texts.json")["texts"]:
        if "<tool>" in text:  # after such a token SentencePiece encoding puts a space of its own
            continue
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        assert "".join(stream(tokenizer, ids, skip=True)) == text


@pytest.mark.parametrize("name", NAMES)
def test_every_single_id_streams_to_its_own_text(name: str) -> None:
    tokenizer = golden(name)
    for i in range(tokenizer.vocab_size + EXTRA_IDS):
        for skip in (True, False):
            assert "".join(stream(tokenizer, [i], skip)) == tokenizer.decode([i], skip)


@settings(max_examples=400, deadline=None)
@given(
    pieces=st.lists(
        st.one_of(
            st.binary(max_size=5),
            st.sampled_from([b"\xe4", b"\xbd", b"\xa0", b"\xf0\x9f", b"\x99\x82", b"\xed", b"\xc3", b"\xf5", b"a"]),
        )
    )
)
def test_pythons_streaming_utf8_decoder_equals_its_one_shot_decoder(pieces: list[bytes]) -> None:
    # What the detokenizer's exactness rests on.
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    streamed = "".join([decoder.decode(piece) for piece in pieces]) + decoder.decode(b"", True)
    assert streamed == b"".join(pieces).decode("utf-8", "replace")


def test_a_character_of_several_tokens_appears_with_its_last_one() -> None:
    tokenizer = golden("gguf_sentencepiece_no_prefix")
    ids = tokenizer.encode("\U0001f996", add_special_tokens=False)
    assert len(ids) == 4  # byte fallback
    assert stream(tokenizer, ids, skip=True) == ["", "", "", "\U0001f996", ""]
    assert stream(tokenizer, ids[:3], skip=True) == ["", "", "", "\ufffd"]


def test_state_is_a_fold_over_the_ids() -> None:
    tokenizer = golden("gguf_sentencepiece")
    ids = [i for text in load("texts.json")["texts"][8:12] for i in tokenizer.encode(text)]
    deltas = stream(tokenizer, ids, skip=True)
    for cut in range(len(ids)):
        rebuilt = IncrementalDetokenizer(tokenizer)
        for i in ids[:cut]:
            rebuilt.push(i)
        assert rebuilt.push(ids[cut]) == deltas[cut]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_pushing_many_is_pushing_one_by_one(name: str, data: st.DataObject) -> None:
    tokenizer = golden(name)
    ids = data.draw(id_lists(name))
    a, b = sorted(data.draw(st.tuples(*[st.integers(0, len(ids))] * 2)))
    skip, at_start = data.draw(st.booleans()), data.draw(st.booleans())
    deltas = stream(tokenizer, ids, skip, at_start)
    many = IncrementalDetokenizer(tokenizer, skip, at_start)
    texts = [many.push_all(ids[:a]), many.push_all(ids[a:b]), many.push_all(ids[b:]), many.flush()]
    assert texts == ["".join(deltas[:a]), "".join(deltas[a:b]), "".join(deltas[b:-1]), deltas[-1]]


def test_an_id_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match="token id"):
        IncrementalDetokenizer(golden("gguf_smollm")).push(10**9)


def test_special_tokens_that_are_to_be_shown_are() -> None:
    tokenizer = golden("gguf_smollm")
    shown, hidden = sorted(tokenizer.special_ids)[:2]
    detokenizer = IncrementalDetokenizer(tokenizer, shown_ids=frozenset({shown}))
    assert detokenizer.push_all([shown, hidden, shown]) == 2 * tokenizer.token_text(shown)
