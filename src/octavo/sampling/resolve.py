"""The one validator that knows the model: every frontend's parameters pass here before a request is queued."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from octavo.errors import CapacityError, InvalidParameterError
from octavo.params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedParams:
    """Checked parameters as plain data: nothing is left to choose, draw or look up. Meanings as in SamplingParams.

    max_tokens is a number that fits the context; seed is set; bad_words are token ids.
    """

    n: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    typical_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    include_stop_str_in_output: bool
    ignore_eos: bool
    eos_ids: frozenset[int]
    max_tokens: int
    min_tokens: int
    logprobs: int | None
    prompt_logprobs: int | None
    prompt_logprobs_start: int
    logit_bias: tuple[tuple[int, float], ...]
    allowed_token_ids: tuple[int, ...] | None
    bad_words: tuple[tuple[int, ...], ...]
    skip_special_tokens: bool
    shown_special_ids: frozenset[int]
    priority: int
    cache_salt: str | None
    vocab_size: int


def resolve(
    params: SamplingParams,
    *,
    prompt_len: int,
    vocab_size: int,
    context_len: int,
    eos_ids: frozenset[int],
    encode: Callable[[str], list[int]],
) -> ResolvedParams:
    """Checks `params` against a model and a prompt of `prompt_len` tokens (after truncation).

    vocab_size: width of a row of logits. context_len: most tokens of prompt and output together. encode: text to ids
    without special tokens. Raises CapacityError when the prompt leaves no room for a token, InvalidParameterError for
    what this model cannot do. A max_tokens beyond the context is cut to what fits.
    """
    room = context_len - prompt_len
    if room < 1:
        raise CapacityError(
            f"the prompt has {prompt_len} tokens; with at least one to generate it does not fit the context of "
            f"{context_len} tokens: at most {max(context_len - 1, 0)} prompt tokens are allowed"
        )
    max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    if params.min_tokens > max_tokens:
        allowed = f"at most the {max_tokens} tokens the context has left"
        raise InvalidParameterError("min_tokens", params.min_tokens, allowed)
    if params.prompt_logprobs is not None and params.prompt_logprobs_start > prompt_len:
        raise InvalidParameterError(
            "prompt_logprobs_start", params.prompt_logprobs_start, f"a position in the prompt of {prompt_len} tokens"
        )
    _check_ids("stop_token_ids", params.stop_token_ids or (), vocab_size)
    _check_ids("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    _check_ids("logit_bias", params.logit_bias or (), vocab_size)
    _check_ids("shown_special_ids", params.shown_special_ids or (), vocab_size)
    return ResolvedParams(
        n=params.n,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        typical_p=params.typical_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        seed=secrets.randbits(63) if params.seed is None else params.seed,
        stop=tuple(dict.fromkeys(params.stop or ())),
        stop_token_ids=frozenset(params.stop_token_ids or ()),
        include_stop_str_in_output=params.include_stop_str_in_output,
        ignore_eos=params.ignore_eos,
        eos_ids=frozenset(i for i in eos_ids if 0 <= i < vocab_size),
        max_tokens=max_tokens,
        min_tokens=params.min_tokens,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        prompt_logprobs_start=params.prompt_logprobs_start,
        logit_bias=tuple(sorted((params.logit_bias or {}).items())),
        allowed_token_ids=None if params.allowed_token_ids is None else tuple(sorted(params.allowed_token_ids)),
        bad_words=_encode_bad_words(params.bad_words or (), vocab_size, encode),
        skip_special_tokens=params.skip_special_tokens,
        shown_special_ids=frozenset(params.shown_special_ids or ()),
        priority=params.priority,
        cache_salt=params.cache_salt,
        vocab_size=vocab_size,
    )


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token_id in ids:
        if token_id >= vocab_size:
            raise InvalidParameterError(name, token_id, f"token ids from 0 to {vocab_size - 1} with this model")


def _encode_bad_words(
    words: Iterable[str], vocab_size: int, encode: Callable[[str], list[int]]
) -> tuple[tuple[int, ...], ...]:
    """Each word as it is written inside a word and at the start of one, that is with a space before it."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip() or word
        for text in (bare, " " + bare):
            ids = tuple(encode(text))
            if any(not 0 <= token_id < vocab_size for token_id in ids):
                raise InvalidParameterError("bad_words", word, "words whose tokens the model can generate")
            if ids:
                found[ids] = None
    return tuple(found)
