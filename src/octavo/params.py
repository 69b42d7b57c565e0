"""What a user may ask of sampling. Checked on construction, and by sampling.resolve for what depends on the model."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from octavo import limits
from octavo.errors import InvalidParameterError
from octavo.structured import StructuredOutputs as StructuredOutputs

_INT64_MIN, _INT64_MAX = -(1 << 63), (1 << 63) - 1
_INT32_MAX = (1 << 31) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled and when it stops; names and defaults are vLLM's, except max_tokens.

    The order of work: allowed_token_ids, bad_words and min_tokens, logit_bias, penalties, temperature, min_p, top_k,
    typical_p, top_p. Every violation raises InvalidParameterError with the field's name, the value and what is allowed.

    n: outputs a prompt, each with its own randomness. temperature: 0 is greedy. top_k: 0 or -1 is off.
    typical_p: locally typical sampling (Meister et al. 2022); 1 is off.
    presence_penalty, frequency_penalty: over output tokens. repetition_penalty: over prompt and output tokens.
    seed: the same request with the same seed has the same answer; None (or -1): a fresh one, told in the output.
    stop: a string or several; the output ends before the first that appears (after it: include_stop_str_in_output).
    stop_token_ids: ids that end the output beside the model's own; ignore_eos: the model's own do not.
    max_tokens: None is to the end of the context; a larger number than the context has room for is cut to it.
    min_tokens: before it, end and stop tokens are masked and stop strings ignored.
    logprobs, prompt_logprobs: also report the k most likely ids at each position; 0: only the token itself.
    prompt_logprobs_start: first prompt position that prompt_logprobs are for.
    logit_bias: id to a number added to its logit, cut to -100 .. 100. allowed_token_ids: only these can be drawn.
    bad_words: texts that are not generated, at the start of a word or inside one.
    skip_special_tokens: control tokens leave no text, except those of shown_special_ids.
    truncate_prompt_tokens: keep only this many last tokens of the prompt.
    priority: lower is served first, under the priority policy. cache_salt: prefixes are shared only under equal salts.
    structured: what the output must be, as StructuredOutputs or a dict of its fields; all of the above works within it.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | list[str] | None = field(default_factory=list)  # a list once constructed
    stop_token_ids: list[int] | None = field(default_factory=list)  # a list once constructed
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = limits.DEFAULT_MAX_TOKENS
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = field(default_factory=list)  # a list once constructed
    skip_special_tokens: bool = True
    shown_special_ids: list[int] | None = None
    truncate_prompt_tokens: int | None = None
    priority: int = 0
    cache_salt: str | None = None
    structured: StructuredOutputs | None = None  # or a mapping of its fields, until constructed

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_lists()
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidParameterError(name, getattr(self, name), "true or false")
        if self.cache_salt is not None:
            _text("cache_salt", self.cache_salt, limits.MAX_CACHE_SALT_CHARS)
        self._set("structured", StructuredOutputs.of(self.structured))
        if self.n > 1 and self.temperature == 0.0:
            raise InvalidParameterError("n", self.n, "1 when temperature is 0, as all outputs would be equal")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameterError("min_tokens", self.min_tokens, f"at most max_tokens, {self.max_tokens}")

    def _check_numbers(self) -> None:
        self._set("n", _integer("n", self.n, 1, limits.MAX_N))
        self._set("temperature", _number("temperature", self.temperature, 0.0, limits.MAX_TEMPERATURE))
        self._set("top_p", _number("top_p", self.top_p, 0.0, 1.0, above_low=True))
        self._set("typical_p", _number("typical_p", self.typical_p, 0.0, 1.0, above_low=True))
        self._set("min_p", _number("min_p", self.min_p, 0.0, 1.0))
        for name in ("presence_penalty", "frequency_penalty"):
            self._set(name, _number(name, getattr(self, name), -2.0, 2.0))
        # A range that float32 holds: what is smaller or larger would become 0 or infinity in the sampler.
        self._set("repetition_penalty", _number("repetition_penalty", self.repetition_penalty, 1e-30, 1e30))
        self._set("top_k", max(0, _integer("top_k", self.top_k, -1, _INT32_MAX)))
        self._set("min_tokens", _integer("min_tokens", self.min_tokens, 0, _INT64_MAX))
        self._set("prompt_logprobs_start", _integer("prompt_logprobs_start", self.prompt_logprobs_start, 0, _INT64_MAX))
        self._set("priority", _integer("priority", self.priority, _INT64_MIN, _INT64_MAX))
        if self.seed is not None:
            seed = _integer("seed", self.seed, _INT64_MIN, _INT64_MAX)
            self._set("seed", None if seed == -1 else seed)
        for name, low, high in (
            ("max_tokens", 1, _INT64_MAX),
            ("truncate_prompt_tokens", 1, _INT64_MAX),
            ("logprobs", 0, limits.MAX_LOGPROBS),
            ("prompt_logprobs", 0, limits.MAX_LOGPROBS),
        ):
            if getattr(self, name) is not None:
                self._set(name, _integer(name, getattr(self, name), low, high))

    def _check_lists(self) -> None:
        self._set("stop", _texts("stop", self.stop, limits.MAX_STOP_STRINGS, limits.MAX_STOP_STRING_CHARS))
        if isinstance(self.bad_words, str):
            raise InvalidParameterError("bad_words", self.bad_words, "a list of words")
        self._set("bad_words", _texts("bad_words", self.bad_words, limits.MAX_BAD_WORDS, limits.MAX_BAD_WORD_CHARS))
        stop_ids = _token_ids("stop_token_ids", self.stop_token_ids or [], limits.MAX_STOP_TOKEN_IDS)
        self._set("stop_token_ids", stop_ids)
        if self.shown_special_ids is not None:
            shown = _token_ids("shown_special_ids", self.shown_special_ids, limits.MAX_SHOWN_SPECIAL_IDS)
            self._set("shown_special_ids", shown)
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids, limits.MAX_VOCABULARY)
            if not allowed:
                raise InvalidParameterError("allowed_token_ids", allowed, "at least one id, or None for all")
            self._set("allowed_token_ids", allowed)
        if self.logit_bias is not None:
            self._set("logit_bias", _bias(self.logit_bias))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)


def _integer(name: str, value: Any, low: int, high: int) -> int:
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not low <= number <= high:
        bounds = f"from {low} to {high}" if high < _INT32_MAX else f"of at least {low}" if low >= -1 else "of 64 bits"
        raise InvalidParameterError(name, value, f"an integer {bounds}")
    return number


def _number(name: str, value: Any, low: float, high: float, *, above_low: bool = False) -> float:
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    except OverflowError:
        number = math.nan
    if not low <= number <= high or (above_low and number == low):
        allowed = f"above {low:g}, up to {high:g}" if above_low else f"from {low:g} to {high:g}"
        raise InvalidParameterError(name, value, f"a number {allowed}")
    return number


def _text(name: str, value: Any, longest: int) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= longest:
        raise InvalidParameterError(name, value, f"a text of 1 to {longest} characters")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidParameterError(name, value, "a text without lone surrogates") from None
    return value


def _texts(name: str, value: Any, most: int, longest: int) -> list[str]:
    if value is None:
        return []
    items = [value] if isinstance(value, str) else _list(name, value, most, "texts")
    return [_text(name, item, longest) for item in items]


def _token_ids(name: str, value: Any, most: int) -> list[int]:
    """Without duplicates, in the order given."""
    items = _list(name, value, most, "token ids")
    return list(dict.fromkeys(_integer(name, item, 0, _INT32_MAX) for item in items))


def _list(name: str, value: Any, most: int, kind: str) -> list[Any]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise InvalidParameterError(name, value, f"a list of {kind}")
    items = list(value)
    if len(items) > most:
        raise InvalidParameterError(name, f"{len(items)} {kind}", f"at most {most}")
    return items


def _bias(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise InvalidParameterError("logit_bias", value, "a mapping of token ids to numbers")
    if len(value) > limits.MAX_LOGIT_BIAS:
        raise InvalidParameterError("logit_bias", f"{len(value)} ids", f"at most {limits.MAX_LOGIT_BIAS}")
    bias = {}
    for key, given in value.items():
        number = _number("logit_bias", given, -1e300, 1e300)
        bias[_integer("logit_bias", key, 0, _INT32_MAX)] = min(max(number, -100.0), 100.0)
    return bias
