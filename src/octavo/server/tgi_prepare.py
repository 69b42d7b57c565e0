"""TGI's parameters as ours: its names, defaults and ranges, for those who come from there."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from octavo import limits
from octavo.errors import InvalidParameterError
from octavo.params import SamplingParams
from octavo.server.constraints import tgi_constraint
from octavo.server.errors import invalid, unsupported
from octavo.server.exchange import Exchange
from octavo.server.generation import Generation, with_seeds
from octavo.server.openai_prepare import name_ignored
from octavo.server.prompts import encode_text
from octavo.server.schema import TgiParameters, TgiRequest, decode, renamed, unknown_parameters
from octavo.server.state import ServerState

_U64 = 1 << 64
_NAMES = {"prompt": "inputs", "max_tokens": "max_new_tokens", "logprobs": "top_n_tokens", "n": "best_of"}


@dataclass(slots=True)
class TgiAnswer:
    """A generation as TGI's answer; best_of is the generation's n. samples: whether there is a seed to tell of."""

    generation: Generation
    inputs: str
    samples: bool
    full_text: bool = False
    details: bool = False
    prefill: bool = False
    top_n_tokens: int = 0
    pipeline: bool = False  # on "/": an answer in one piece comes in a list
    constrained_by: str | None = None  # the parameter that a structured output comes from


def prepare_generate(state: ServerState, exchange: Exchange, body: bytes, route: str) -> TgiAnswer:
    """route: "generate", "generate_stream" or "/". Raises ApiError or an OctavoError, in the words of TGI's names."""
    request, ignored = decode(body, TgiRequest)
    name_ignored(exchange, ignored + (unknown_parameters(body) if request.parameters else []))
    stream = bool(request.stream) if route == "/" else route == "generate_stream"
    given = request.parameters or TgiParameters(do_sample=True)
    _check(state, given, stream)
    if not request.inputs:
        raise invalid("inputs", "`inputs` cannot be empty")
    samples = bool(given.do_sample) or any(
        value is not None for value in (given.temperature, given.top_k, given.top_p, given.typical_p)
    )
    best_of = given.best_of or 1
    if best_of > 1:
        _check_best_of(given, samples, stream)
    constraint = tgi_constraint(given.grammar)
    details = bool(given.details)
    top_n = given.top_n_tokens or 0
    try:
        params = SamplingParams(
            n=best_of,
            temperature=(1.0 if given.temperature is None else given.temperature) if samples else 0.0,
            top_k=given.top_k or 0,
            top_p=_or(given.top_p, 1.0),
            typical_p=_or(given.typical_p, 1.0),
            repetition_penalty=_or(given.repetition_penalty, 1.0),
            frequency_penalty=_or(given.frequency_penalty, 0.0),
            seed=_signed(given.seed),
            stop=given.stop,
            include_stop_str_in_output=True,
            max_tokens=given.max_new_tokens,
            logprobs=top_n if stream or details or best_of > 1 else None,
            prompt_logprobs=0 if given.decoder_input_details else None,
            cache_salt=state.salt(exchange.scope, None),
            structured=None if constraint is None else constraint.structured,
        )
    except InvalidParameterError as error:
        raise renamed(error, _NAMES) from None
    prompt = encode_text(state, request.inputs, special=True)
    if given.truncate is not None:
        prompt.ids = prompt.ids[-given.truncate :]
    most = state.most_prompt_tokens
    if len(prompt.ids) > most:
        raise invalid("inputs", f"`inputs` must have less than {most + 1} tokens. Given: {len(prompt.ids)}")
    try:
        seeded = with_seeds(state, [prompt], params)
    except InvalidParameterError as error:
        raise renamed(error, _NAMES) from None
    full = given.return_full_text
    return TgiAnswer(
        generation=Generation("tgi-" + secrets.token_hex(16), [prompt], seeded, stream=stream),
        inputs=request.inputs,
        samples=samples,
        full_text=route == "/" if full is None else full,
        details=details,
        prefill=bool(given.decoder_input_details),
        top_n_tokens=top_n,
        pipeline=route == "/",
        constrained_by=None if constraint is None else constraint.field,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _signed(seed: int | None) -> int | None:
    """TGI's seeds are unsigned; ours have the same 64 bits. The one that means "draw one" to us is not that to TGI."""
    if seed is None:
        return None
    if not 0 <= seed < _U64:
        raise invalid("seed", f"`seed` must be from 0 to {_U64 - 1}")
    signed = seed - _U64 if seed >= _U64 // 2 else seed
    return signed if signed != -1 else -2


def _check_best_of(given: TgiParameters, samples: bool, stream: bool) -> None:
    if stream:
        raise invalid("best_of", "`best_of` != 1 is not supported when streaming tokens")
    if not samples:
        raise invalid("best_of", "you must use sampling when `best_of` is > 1")
    if given.seed is not None:
        raise invalid("seed", "`seed` must not be set when `best_of` > 1")


def _check(state: ServerState, given: TgiParameters, stream: bool) -> None:
    """TGI's ranges, where they are narrower than ours."""
    best_of, stop, top_n = given.best_of, given.stop or [], given.top_n_tokens
    rules: list[tuple[str, bool, str]] = [
        (
            "best_of",
            best_of is not None and not 1 <= best_of <= limits.TGI_MAX_BEST_OF,
            _between(1, limits.TGI_MAX_BEST_OF),
        ),
        ("temperature", _not_positive(given.temperature), "strictly positive"),
        ("repetition_penalty", _not_positive(given.repetition_penalty), "strictly positive"),
        ("top_k", _not_positive(given.top_k), "strictly positive"),
        ("top_p", _not_inside(given.top_p), "> 0.0 and < 1.0"),
        ("typical_p", _not_inside(given.typical_p), "> 0.0 and < 1.0"),
        ("max_new_tokens", _not_positive(given.max_new_tokens), "strictly positive"),
        ("stop", len(stop) > limits.TGI_MAX_STOP_SEQUENCES, f"at most {limits.TGI_MAX_STOP_SEQUENCES} sequences"),
        (
            "truncate",
            given.truncate is not None and not 1 <= given.truncate <= state.most_prompt_tokens,
            _between(1, state.most_prompt_tokens),
        ),
        (
            "top_n_tokens",
            top_n is not None and not 0 <= top_n <= limits.TGI_MAX_TOP_N_TOKENS,
            _between(0, limits.TGI_MAX_TOP_N_TOKENS),
        ),
    ]
    for name, broken, allowed in rules:
        if broken:
            raise invalid(name, f"`{name}` must be {allowed}")
    if stream and given.decoder_input_details:
        raise invalid("decoder_input_details", "`decoder_input_details` == true is not supported when streaming tokens")
    refused: dict[str, Any] = {
        "watermark": given.watermark or None,
        "adapter_id": given.adapter_id,
    }
    for name, value in refused.items():
        if value is not None:
            raise unsupported(name, f"`{name}` is not supported by this server")


def _between(low: int, high: int) -> str:
    return f">= {low} and <= {high}"


def _not_positive(value: float | None) -> bool:
    return value is not None and not value > 0


def _not_inside(value: float | None) -> bool:
    return value is not None and not 0 < value < 1
