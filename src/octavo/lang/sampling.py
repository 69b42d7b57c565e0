"""Sampling arguments of the language: those of SamplingParams, with SGLang's names beside them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from octavo import limits
from octavo.errors import InvalidParameterError
from octavo.params import SamplingParams

_FIELDS = frozenset(field.name for field in dataclasses.fields(SamplingParams))
_RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
_LOGPROBS = ("return_logprob", "top_logprobs_num", "logprob_start_len", "return_text_in_logprobs")
NAMES = _FIELDS | set(_RENAMED) | set(_LOGPROBS)

DEFAULTS: Mapping[str, Any] = {"max_tokens": limits.PROGRAM_MAX_TOKENS}


def gen_params(**given: Any) -> dict[str, Any]:
    """The arguments that are not None, by SamplingParams' names and checked. Raises InvalidParameterError."""
    given = {name: value for name, value in given.items() if value is not None}
    params = _with_logprobs({name: value for name, value in given.items() if name in _LOGPROBS})
    for name, value in given.items():
        if name in _LOGPROBS:
            continue
        ours = _RENAMED.get(name, name)
        if ours not in _FIELDS:
            raise InvalidParameterError(name, value, "no such argument: those of SamplingParams are allowed")
        if ours in params:
            raise InvalidParameterError(name, value, f"{ours} is given already")
        params[ours] = value
    SamplingParams(**{**DEFAULTS, **params, **_room(params)})
    return params


def run_defaults(**given: Any) -> dict[str, Any]:
    """What `run` gives every gen of a program that does not say otherwise."""
    for name in ("n", "structured", "seed"):
        if given.get(name) is not None:
            raise InvalidParameterError(name, given[name], "an argument of gen, not of a whole program")
    return gen_params(**given)


def merged(defaults: Mapping[str, Any], params: Mapping[str, Any], seed: int) -> SamplingParams:
    """`params` over `defaults`; `seed` where they say none. Raises InvalidParameterError where they do not agree."""
    return SamplingParams(**{"seed": seed, **DEFAULTS, **defaults, **params})


def _room(params: Mapping[str, Any]) -> dict[str, Any]:
    """min_tokens alone may be above the default of max_tokens: `run` may have another."""
    return {} if "max_tokens" in params or "min_tokens" not in params else {"max_tokens": None}


def _with_logprobs(given: Mapping[str, Any]) -> dict[str, Any]:
    """SGLang's way to ask for them: a switch, how many, and from which prompt position on (-1: none)."""
    if not given.get("return_logprob"):
        return {}
    top = given.get("top_logprobs_num", 0)
    start = given.get("logprob_start_len", -1)
    return {"logprobs": top} | ({"prompt_logprobs": top, "prompt_logprobs_start": start} if start >= 0 else {})
