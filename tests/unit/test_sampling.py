"""The sampler's state is a fold over output ids, and rows say exactly what the parameters ask."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest

from octavo.executor.interface import Edits, SamplingRows
from octavo.params import SamplingParams
from octavo.sampling import ResolvedParams, SamplerState, build_rows, resolve
from tests.support.batches import no_edits

VOCAB = 100
PROMPT = [5, 6, 5, 7]
KINDS = {"masks": np.uint32, "bias_values": np.float32}


def resolved(**fields: Any) -> ResolvedParams:
    encode = fields.pop("encode", lambda text: [ord(c) % VOCAB for c in text])
    return resolve(
        SamplingParams(**fields),
        prompt_len=len(PROMPT),
        vocab_size=VOCAB,
        context_len=4096,
        eos_ids=frozenset({2}),
        encode=encode,
    )


def state(*ids: int, n_index: int = 0, **fields: Any) -> SamplerState:
    sampler = SamplerState(resolved(**fields), PROMPT, n_index)
    for token_id in ids:
        sampler.append(token_id)
    return sampler


def rows(*samplers: SamplerState) -> SamplingRows:
    edits = [sampler.edits() if sampler.edits_logits else None for sampler in samplers]
    return build_rows([sampler.scalars for sampler in samplers], range(10, 10 + len(samplers)), edits, VOCAB)


def edits(*samplers: SamplerState) -> Edits:
    got = rows(*samplers).edits
    assert got is not None
    return got


def seen(got: Edits, r: int) -> dict[int, int]:
    return dict(zip(ragged(got.seen_offsets, got.seen_ids, r), ragged(got.seen_offsets, got.seen_counts, r)))


def ragged(offsets: np.ndarray[Any, Any], values: np.ndarray[Any, Any], r: int) -> list[Any]:
    return list(values[offsets[r] : offsets[r + 1]].tolist())


def banned(sampler: SamplerState) -> set[int]:
    return set(sampler.edits().banned)


def test_every_scalar_reaches_its_field():
    a = state(
        temperature=0.5,
        top_p=0.75,
        top_k=7,
        min_p=0.25,
        typical_p=0.125,
        presence_penalty=-1.5,
        frequency_penalty=1.25,
        repetition_penalty=1.75,
        seed=-3,
        logprobs=4,
        n_index=9,
    )
    built = rows(a, state(seed=2**63 - 1))
    assert built.edits is not None  # the penalties
    got = built.table()
    assert got["temperature"].tolist() == [0.5, 1.0]
    assert got["top_p"].tolist() == [0.75, 1.0]
    assert got["top_k"].tolist() == [7, 0]
    assert got["min_p"].tolist() == [0.25, 0.0]
    assert got["typical_p"].tolist() == [0.125, 1.0]
    assert got["presence"].tolist() == [-1.5, 0.0]
    assert got["frequency"].tolist() == [1.25, 0.0]
    assert got["repetition"].tolist() == [1.75, 1.0]
    assert got["seed"].tolist() == [2**64 - 3, 2**63 - 1]
    assert list(built.position) == [10, 11]
    assert got["n_index"].tolist() == [9, 0]
    assert got["target"].tolist() == [-1, -1]
    assert got["num_logprobs"].tolist() == [4, -1]
    assert built.edits.mask_index.tolist() == [-1, -1]


def test_arrays_have_the_types_and_layout_the_executor_reads():
    a = state(1, logit_bias={3: 1.0}, allowed_token_ids=[4], bad_words=["x"], repetition_penalty=2.0)
    for given in ([a, state()], [a]):
        got, count = edits(*given), len(given)
        for name in Edits.__slots__:
            array = getattr(got, name)
            assert array.dtype == KINDS.get(name, np.int32), name
            assert array.flags.c_contiguous, name
            if name.endswith("_offsets"):
                assert array.shape == (count + 1,), name
        assert got.mask_index.shape == (count,)
        assert got.masks.shape == (1, 4)


def test_rows_that_edit_nothing_have_no_arrays_for_it():
    assert rows(state(temperature=0.5, top_p=0.9, logprobs=3), state()).edits is None
    assert build_rows([], [], [], VOCAB).edits is None
    assert len(build_rows([], [], [], VOCAB).table()) == 0


def test_penalties_see_prompt_and_output_with_output_counts():
    got = edits(state(8, 6, 8, repetition_penalty=1.1), state(8, 6, 8, presence_penalty=0.5), state(8))
    assert seen(got, 0) == {5: 0, 6: 1, 7: 0, 8: 2}
    assert seen(got, 1) == {8: 2, 6: 1}  # without a repetition penalty the prompt cannot matter
    assert seen(got, 2) == {}


def test_seen_tokens_grow_over_many_ids():
    drawn = [random.Random(1).randrange(VOCAB) for _ in range(1000)]
    got = edits(state(*drawn, frequency_penalty=1.0))
    assert seen(got, 0) == {i: drawn.count(i) for i in set(drawn)}


def test_allowed_ids_become_a_bitmap():
    got = edits(state(), state(allowed_token_ids=[0, 31, 32, 99]))
    assert got.mask_index.tolist() == [-1, 0]
    bits = np.unpackbits(got.masks[0].view(np.uint8), bitorder="little")
    assert np.flatnonzero(bits).tolist() == [0, 31, 32, 99]


def test_bias_reaches_its_row():
    got = edits(state(), state(logit_bias={9: -2.5, 3: 1.5}), state(logit_bias={1: 1.0}))
    assert ragged(got.bias_offsets, got.bias_ids, 1) == [3, 9]
    assert ragged(got.bias_offsets, got.bias_values, 1) == [1.5, -2.5]
    assert ragged(got.bias_offsets, got.bias_ids, 2) == [1]


def test_end_and_stop_ids_are_banned_until_min_tokens():
    for given in range(5):
        expected = {2, 40} if given < 3 else set()
        assert banned(state(*[9] * given, min_tokens=3, stop_token_ids=[40])) == expected


def test_bad_words_ban_the_id_that_would_complete_them():
    words = {"a": [11], " a": [12], "bcd": [13, 14, 15], " bcd": [16, 14, 15], "bcb": [13, 14, 13], " bcb": [1, 14, 13]}
    one = {"bad_words": ["a", "bcd", "bcb"], "encode": words.__getitem__}
    assert banned(state(**one)) == {11, 12}
    assert banned(state(13, **one)) == {11, 12}
    assert banned(state(13, 14, **one)) == {11, 12, 15, 13}
    assert banned(state(16, 14, **one)) == {11, 12, 15}
    assert banned(state(14, **one)) == {11, 12}  # too short to match
    assert banned(state(13, 14, 3, **one)) == {11, 12}


def test_prompt_ids_do_not_complete_bad_words():
    words = {"x": [5, 8], " x": [7, 8]}  # the prompt ends in 7
    assert banned(state(bad_words=["x"], encode=words.__getitem__)) == set()
    assert banned(state(7, bad_words=["x"], encode=words.__getitem__)) == {8}


def test_bans_of_both_kinds_share_a_row():
    words = {"x": [50], " x": [51]}
    got = edits(state(), state(bad_words=["x"], min_tokens=1, encode=words.__getitem__), state(min_tokens=1))
    assert sorted(ragged(got.banned_offsets, got.banned_ids, 1)) == [2, 50, 51]
    assert ragged(got.banned_offsets, got.banned_ids, 2) == [2]


def test_a_prompt_row_draws_nothing_and_reports_its_target():
    sampler = state(prompt_logprobs=3, temperature=0.5, repetition_penalty=1.5, logit_bias={1: 1.0}, min_tokens=1)
    built = build_rows([sampler.prompt_scalars(42), sampler.scalars], [0, 4], [None, sampler.edits()], VOCAB)
    assert built.table()["target"].tolist() == [42, -1]
    assert built.table()["num_logprobs"].tolist() == [3, -1]
    got = built.edits
    assert got is not None
    assert ragged(got.seen_offsets, got.seen_ids, 0) == []
    assert ragged(got.banned_offsets, got.banned_ids, 0) == []
    assert ragged(got.banned_offsets, got.banned_ids, 1) == [2]


def test_a_state_cut_at_any_token_and_rebuilt_gives_the_same_rows():
    rng = random.Random(3)
    fields: dict[str, Any] = {
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.5,
        "min_tokens": 5,
        "bad_words": ["ab", "ba"],
        "logit_bias": {1: 2.0},
        "allowed_token_ids": list(range(90)),
        "seed": 1,
    }
    drawn = [rng.choice([97, 98, 3, 4]) for _ in range(40)]
    running = state(**fields)
    for i, token_id in enumerate(drawn):
        running.append(token_id)
        again = state(*drawn[: i + 1], **fields)
        assert rows(running).scalars == rows(again).scalars
        for name in Edits.__slots__:
            assert np.array_equal(getattr(edits(running), name), getattr(edits(again), name)), name


def test_building_rows_of_a_large_batch_is_cheap():
    plain = [state(temperature=0.8, top_p=0.9, seed=i) for i in range(32)]
    penalised = [state(*range(50), repetition_penalty=1.1, seed=i) for i in range(32)]
    for samplers, most in ((plain, 1e-3), (penalised, 2e-3)):  # far above what is needed (0.1 ms): machines are shared
        best = 1.0
        for _ in range(20):
            begin = time.perf_counter()
            rows(*samplers)
            best = min(best, time.perf_counter() - begin)
        assert best < most


# Through the native sampler


@pytest.fixture(scope="module")
def native() -> Any:
    from octavo import _native

    return _native


def test_native_draws_respect_what_the_rows_ask(native: Any):
    logits = np.random.default_rng(0).normal(size=(4, VOCAB)).astype(np.float32)
    best = int(logits[0].argmax())
    logits[:] = logits[0]
    words = {"x": [best], " x": [best]}
    samplers = [
        state(temperature=0, logprobs=2),
        state(temperature=0, bad_words=["x"], encode=words.__getitem__),
        state(allowed_token_ids=[17]),
        state(temperature=0, logit_bias={23: 100.0}),
    ]
    ids, logprobs, ranks, top_ids, top_logprobs, ok = native.sample(logits, rows(*samplers), "auto")
    order = np.argsort(-logits[0], kind="stable")
    assert ids.tolist() == [best, order[1], 17, 23]
    assert ok.tolist() == [1] * 4
    assert top_ids[0].tolist() == order[:2].tolist()
    expected = logits[0] - np.log(np.exp(logits[0].astype(np.float64)).sum())
    assert np.allclose(logprobs[0], expected[best], atol=1e-5)
    assert np.allclose(top_logprobs[0], expected[order[:2]], atol=1e-5)
    assert ranks[0] == 1


def test_native_kernels_agree_and_one_bad_row_fails_alone(native: Any):
    logits = (3 * np.random.default_rng(1).normal(size=(8, VOCAB))).astype(np.float32)
    logits[3, 50] = np.nan
    logits[6, 0] = np.inf
    fields: dict[str, Any] = {"top_p": 0.9, "top_k": 40, "repetition_penalty": 1.3, "logprobs": 5}
    given = rows(*[state(1, 2, 1, seed=i, **fields) for i in range(8)])
    scalar = native.sample(logits, given, "scalar")
    assert scalar[5].tolist() == [1, 1, 1, 0, 1, 1, 0, 1]
    assert scalar[0][3] == scalar[0][6] == -1
    for a, b in zip(scalar, native.sample(logits, given, "auto")):
        assert a.tobytes() == b.tobytes()


def test_native_sampler_refuses_rows_it_cannot_trust(native: Any):
    from dataclasses import replace

    good = rows(state(), state(1, presence_penalty=1.0))
    logits = np.zeros((2, VOCAB), dtype=np.float32)
    native.sample(logits, good, "auto")
    changes: dict[str, SamplingRows] = {
        "seen": replace(good, edits=replace(good.edits, seen_ids=np.array([VOCAB], dtype=np.int32))),
        "mask_index": replace(good, edits=replace(good.edits, mask_index=np.zeros(2, dtype=np.int32))),
        "masks": replace(good, edits=replace(good.edits, masks=np.zeros((1, 9), dtype=np.uint32))),
        "bias_values": replace(good, edits=replace(good.edits, bias_values=np.zeros(0, dtype=np.float64))),
        "temperature": replace(good, scalars=_with(good, temperature=np.nan)),
        "top_k": replace(good, scalars=_with(good, top_k=-1)),
        "scalars": replace(good, scalars=good.scalars[:-1]),
        "position": replace(good, position=np.zeros(1, dtype=np.int64)),
    }
    for field, bad in changes.items():
        with pytest.raises(ValueError, match=field):
            native.sample(logits, bad, "auto")


def _with(rows: SamplingRows, **fields: Any) -> bytes:
    table = rows.table().copy()
    for field, value in fields.items():
        table[field][0] = value
    return table.tobytes()


def test_native_sampler_reads_rows_without_edits_like_rows_with_empty_ones(native: Any):
    from dataclasses import replace

    logits = (3 * np.random.default_rng(2).normal(size=(8, VOCAB))).astype(np.float32)
    given = rows(*[state(top_p=0.9, seed=i, logprobs=2) for i in range(8)])
    assert given.edits is None
    for a, b in zip(native.sample(logits, given), native.sample(logits, replace(given, edits=no_edits(8)))):
        assert a.tobytes() == b.tobytes()
