"""Request bodies as msgspec structs, and how bytes become one: types here, ranges in SamplingParams.

A field that is absent and one that is null mean the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from octavo import limits
from octavo.errors import InvalidParameterError
from octavo.params import SamplingParams
from octavo.server.errors import ApiError, invalid, unsupported

S = TypeVar("S", bound=msgspec.Struct)


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """The fields of SamplingParams that all OpenAI routes share, and what steers a request on its way."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None

    # Of these at most one may be given: see server.constraints.
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | str | bool | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: dict[str, Any] | str | None = None

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    return_token_ids: bool | None = None
    queue_timeout: float | None = None
    first_token_timeout: float | None = None
    request_timeout: float | None = None


class CompletionRequest(SamplingFields, kw_only=True):
    """POST /v1/completions. prompt: a text, texts, token ids, or lists of token ids."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None


class ChatCompletionRequest(SamplingFields, kw_only=True):
    """POST /v1/chat/completions. max_completion_tokens goes before max_tokens.

    tool_prompt: TGI's, for models whose template knows no tools. include_reasoning: false leaves thoughts out of the
    answer. separate_reasoning: false leaves them in its content.
    """

    messages: list[dict[str, Any]]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    tool_prompt: str | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize: `prompt` or `messages` as in vLLM, or `inputs` as in TGI."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    inputs: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: list[Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ScoreRequest(msgspec.Struct, kw_only=True):
    """POST /v1/score: a prompt as text or token ids, and what may come behind it."""

    continuations: list[str | list[int]]
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    user: str | None = None
    queue_timeout: float | None = None
    first_token_timeout: float | None = None
    request_timeout: float | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None


class TgiParameters(msgspec.Struct, kw_only=True):
    """TGI's GenerateParameters."""

    best_of: int | None = None
    temperature: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    typical_p: float | None = None
    do_sample: bool | None = None
    max_new_tokens: int | None = None
    return_full_text: bool | None = None
    stop: list[str] | None = None
    truncate: int | None = None
    watermark: bool | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    seed: int | None = None
    top_n_tokens: int | None = None
    grammar: Any = None
    adapter_id: str | None = None


class TgiRequest(msgspec.Struct, kw_only=True):
    """POST /generate, /generate_stream and /; `stream` counts only on /."""

    inputs: str
    parameters: TgiParameters | None = None
    stream: bool | None = None


class _Parameters(msgspec.Struct):
    parameters: dict[str, msgspec.Raw] | None = None


class ChatTokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /chat_tokenize: TGI's chat body, of which only the conversation matters here."""

    messages: list[dict[str, Any]]
    model: str | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    tool_prompt: str | None = None


# Fields that would change the answer and that we lack, each with the values that change nothing (null never does).
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "tool_prompt": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "grammar": (),
    "regex": (),
    "ebnf": (),
    "json_schema": (),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "verbosity": ("medium",),
    "reasoning_effort": ("none",),
    "thinking_token_budget": (-1,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "chat_template": (),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "prompt_embeds": (),
    "truncation_side": ("left",),
    "return_tokens_as_token_ids": (False,),
    "return_prompt_text": (False,),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "repetition_detection": (),
    "detokenize": (True,),
    # llama.cpp's, Ollama's and SGLang's
    "repeat_penalty": (1, 1.0),
    "mirostat": (0,),
    "dry_multiplier": (0, 0.0),
    "xtc_probability": (0, 0.0),
    "top_n_sigma": (-1, -1.0),
    "num_predict": (),
    "n_predict": (),
    "stop_regex": ([],),
    "custom_logit_processor": (),
    "lora_path": (),
    "adapter_id": (),
    "watermark": (False,),
    "min_new_tokens": (),
    "max_new_tokens": (),
    "best_of": (1,),
    "echo": (False,),
}

_NAMES = frozenset(field.name for field in msgspec.structs.fields(SamplingFields)) & set(
    SamplingParams.__dataclass_fields__
)
_HEADER_SAFE = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_PATH = re.compile(r"^(.*?)(?: - at (?:`key` in )?`\$\.?([^`]*)`)?$", re.DOTALL)


def decode(body: bytes, kind: type[S]) -> tuple[S, list[str]]:
    """The body as a struct, and the names in it that mean nothing to us. Raises ApiError (400)."""
    _check_shape(body)
    fields: dict[str, msgspec.Raw] = _decoded(body, dict[str, msgspec.Raw])
    known = kind.__struct_fields__
    unknown = [name for name in fields if name not in known]
    for name in unknown:
        if name in REFUSED:
            refuse(name, _decoded(bytes(fields[name]), Any))
    return _decoded(body, kind), [name for name in unknown if name not in REFUSED]


def unknown_parameters(body: bytes) -> list[str]:
    """The names in TGI's `parameters` that mean nothing to us; the body has been decoded before."""
    found = _decoded(body, _Parameters).parameters or {}
    return [f"parameters.{name}" for name in found if name not in TgiParameters.__struct_fields__]


def refuse(name: str, value: Any) -> None:
    """Raises ApiError unless the value of a field we do not have changes nothing."""
    if value is not None and not any(value == harmless for harmless in REFUSED[name]):
        raise unsupported(name)


def ignored_header(names: list[str]) -> str:
    safe = [name for name in names if _HEADER_SAFE.fullmatch(name)]
    return ", ".join(safe[: limits.MAX_IGNORED_FIELDS_NAMED])


def sampling_params(fields: SamplingFields, defaults: Mapping[str, Any], **ours: Any) -> SamplingParams:
    """`defaults` under what the body gives under `ours`."""
    given = {name: value for name in _NAMES if (value := getattr(fields, name)) is not None}
    return SamplingParams(**{**defaults, **given, **ours})


def renamed(error: InvalidParameterError, names: Mapping[str, str]) -> InvalidParameterError:
    """The same error under the name by which the body has the field."""
    name = names.get(error.field, error.field)
    return InvalidParameterError(name, error.value, error.allowed)


def check_timeouts(fields: SamplingFields | ScoreRequest) -> None:
    for name in ("queue_timeout", "first_token_timeout", "request_timeout"):
        value = getattr(fields, name)
        if value is not None and not 0 < value <= limits.MAX_TIMEOUT_SECONDS:
            raise InvalidParameterError(name, value, f"seconds, above 0, up to {limits.MAX_TIMEOUT_SECONDS}")


def _decoded(body: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _invalid_field(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(None, f"the body is not valid JSON: {error}", "invalid_json") from None
    except RecursionError:
        raise _too_deep() from None


def _invalid_field(message: str) -> ApiError:
    match = _PATH.match(message)
    assert match is not None
    problem, path = match[1], match[2] or ""
    missing = re.match(r"Object missing required field `(\w+)`", problem)
    if missing:
        param = f"{path}.{missing[1]}" if path else missing[1]
        return invalid(param, f"{param} is required", "missing_required_parameter")
    if not path:
        return invalid(None, f"the body must be a JSON object: {problem}", "invalid_type")
    return invalid(path, f"{path}: {problem[:1].lower()}{problem[1:]}", "invalid_type")


def _check_shape(body: bytes) -> None:
    """Before the parser, which holds up all threads while it makes objects, and whose own depth is the stack's.

    In whole passes over the bytes: a loop would be slow. Exact up to the first error, where the parser stops.
    """
    if (
        body.count(b"[") + body.count(b"{") <= limits.MAX_JSON_DEPTH
        and body.count(b":") <= limits.MAX_JSON_MEMBERS
        and body.count(b",") < limits.MAX_JSON_VALUES
    ):
        return
    import numpy as np

    text = np.frombuffer(body.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    outside = ~np.bitwise_xor.accumulate(text == ord('"'))  # of strings
    opens = ((text == ord("[")) | (text == ord("{"))) & outside
    closes = ((text == ord("]")) | (text == ord("}"))) & outside
    if np.cumsum(opens.view(np.int8) - closes.view(np.int8), dtype=np.int32).max() > limits.MAX_JSON_DEPTH:
        raise _too_deep()
    members = np.count_nonzero(opens) + np.count_nonzero((text == ord(":")) & outside)
    if members > limits.MAX_JSON_MEMBERS:
        raise invalid(
            None, f"the body has more than {limits.MAX_JSON_MEMBERS} lists, objects and fields", "invalid_json"
        )
    if np.count_nonzero((text == ord(",")) & outside) >= limits.MAX_JSON_VALUES:
        raise invalid(None, f"the body has more than {limits.MAX_JSON_VALUES} values", "invalid_json")


def _too_deep() -> ApiError:
    return invalid(None, f"the body is nested deeper than the {limits.MAX_JSON_DEPTH} levels allowed", "invalid_json")
