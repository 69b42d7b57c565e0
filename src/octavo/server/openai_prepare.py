"""From a body to what is to be generated, for /v1/completions and /v1/chat/completions. Runs beside the event loop."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo import limits
from octavo.chat.tools import Tools, read_tools
from octavo.chat.turn import Turn
from octavo.errors import InvalidParameterError
from octavo.params import SamplingParams
from octavo.server.chat_answer import ChatReader
from octavo.server.constraints import Constraint, naming, read_constraint
from octavo.server.errors import ApiError, invalid, unsupported
from octavo.server.exchange import IGNORED_HEADER, Exchange
from octavo.server.generation import Generation, default_sampling, with_seeds
from octavo.server.openai_shapes import Answer
from octavo.server.prompts import EncodedPrompt, chat_prompt, completion_prompts
from octavo.server.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    SamplingFields,
    check_timeouts,
    decode,
    ignored_header,
    renamed,
    sampling_params,
)
from octavo.server.state import ServerState

ANY_MODEL = ("tgi", "dummy")  # what clients of TGI send whatever the model


def prepare_completion(state: ServerState, exchange: Exchange, body: bytes) -> Answer:
    """Raises ApiError or an OctavoError that says what is wrong with the request."""
    request, ignored = decode(body, CompletionRequest)
    name_ignored(exchange, ignored)
    model = check_model(state, request.model)
    _check_stream_options(request)
    echo, n = bool(request.echo), request.n or 1
    if request.best_of is not None and request.best_of != n:
        raise unsupported("best_of", f"best_of={request.best_of} is not supported: it must equal n, {n}")
    if request.stream and request.prompt_logprobs is not None:
        raise invalid("prompt_logprobs", "prompt_logprobs cannot be streamed: ask without stream")
    hides = echo and request.max_tokens == 0
    ours: dict[str, Any] = {
        "max_tokens": limits.COMPLETION_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    }
    if hides:
        ours["max_tokens"] = 1
    if request.logprobs is not None:
        ours["logprobs"] = request.logprobs
        if echo:
            if request.stream:
                raise invalid("logprobs", "logprobs of an echoed prompt cannot be streamed: ask without stream")
            ours["prompt_logprobs"] = request.logprobs
            ours["prompt_logprobs_start"] = 0
    constraint = read_constraint(request)
    if constraint is not None:
        ours["structured"] = constraint.structured
    params = _params(state, exchange, request, ours)
    prompts = completion_prompts(state, request)
    answer = _answer(state, request, "cmpl-", model, prompts, params)
    answer.generation.hides_output = hides
    answer.constrained_by = None if constraint is None else constraint.field
    if echo:
        answer.echo = True
        answer.echo_texts = [_echoed(state, prompt, request) for prompt in prompts]
    return answer


def _echoed(state: ServerState, prompt: EncodedPrompt, request: CompletionRequest) -> str:
    if prompt.text is not None and request.truncate_prompt_tokens is None:
        return prompt.text
    return state.tokenizer.decode(prompt.ids, skip_special_tokens=request.skip_special_tokens is not False)


def prepare_chat(state: ServerState, exchange: Exchange, body: bytes) -> Answer:
    """Raises ApiError or an OctavoError that says what is wrong with the request."""
    request, ignored = decode(body, ChatCompletionRequest)
    name_ignored(exchange, ignored)
    model = check_model(state, request.model)
    _check_stream_options(request)
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs", "top_logprobs needs logprobs to be true")
    if request.stream and request.prompt_logprobs is not None:
        raise invalid("prompt_logprobs", "prompt_logprobs cannot be streamed: ask without stream")
    most = request.max_completion_tokens
    names = {"logprobs": "top_logprobs"} | ({} if most is None else {"max_tokens": "max_completion_tokens"})
    ours: dict[str, Any] = {"max_tokens": request.max_tokens if most is None else most}
    if request.logprobs:
        ours["logprobs"] = request.top_logprobs or 0
    params = _params(state, exchange, request, ours, names)
    constraint = read_constraint(request)
    tools = _tools(state, request, constraint)
    field = "tools" if constraint is None else constraint.field
    messages, variables = state.chat.conversation(request.messages, tools, request.tool_prompt)
    prompt = chat_prompt(state, request, messages, variables)
    with naming(field):
        turn = _turn(state, request, prompt, tools, constraint)
        params = replace(params, structured=turn.structured, shown_special_ids=turn.shown_ids or None)
    answer = _answer(state, request, "chatcmpl-", model, [prompt], params, chat=True)
    answer.constrained_by = field
    if turn.reads:
        answer.readers = _readers(request, turn, prompt, answer.generation.params[0])
    return answer


def _tools(state: ServerState, request: ChatCompletionRequest, constraint: Constraint | None) -> Tools:
    tools = read_tools(request.tools, request.tool_choice, request.parallel_tool_calls)
    if tools.callable and not tools.required and not state.auto_tool_choice:
        message = "tool_choice must be required or name a function: this server does not let the model choose"
        raise invalid("tool_choice", message, "unsupported_parameter")
    if constraint is not None and tools.required:
        message = f"{constraint.field} and tool_choice both say what the answer must be: give one of them"
        raise invalid(constraint.field, message)
    return tools


def _turn(
    state: ServerState,
    request: ChatCompletionRequest,
    prompt: EncodedPrompt,
    tools: Tools,
    constraint: Constraint | None,
) -> Turn:
    assert prompt.text is not None
    continued = None
    if request.continue_final_message:
        content = request.messages[-1].get("content")
        continued = content if isinstance(content, str) else ""
    return state.chat.turn(prompt.text, tools, None if constraint is None else constraint.structured, continued)


def _readers(
    request: ChatCompletionRequest, turn: Turn, prompt: EncodedPrompt, params: SamplingParams
) -> list[ChatReader]:
    if request.separate_reasoning is False:
        turn = replace(turn, reasoning=None, thinking=False)
    tells = request.include_reasoning is not False
    return [ChatReader(turn.parser(prompt.ids, params.seed, choice), tells) for choice in range(params.n)]


def _params(
    state: ServerState,
    exchange: Exchange,
    request: SamplingFields,
    ours: dict[str, Any],
    names: Mapping[str, str] | None = None,
) -> SamplingParams:
    """Checked before any text is looked at: what is wrong here need not wait for the tokenizer."""
    check_timeouts(request)
    defaults = default_sampling(state.info.recommended_sampling)
    try:
        params = sampling_params(request, defaults, **ours)
        salt = state.salt(exchange.scope, params.cache_salt)
        return params if salt == params.cache_salt else sampling_params(request, defaults, **ours, cache_salt=salt)
    except InvalidParameterError as error:
        raise renamed(error, names or {}) from None


def _answer(
    state: ServerState,
    request: SamplingFields,
    prefix: str,
    model: str,
    prompts: list[EncodedPrompt],
    params: SamplingParams,
    chat: bool = False,
) -> Answer:
    try:
        seeded = with_seeds(state, prompts, params)
    except InvalidParameterError as error:
        raise renamed(error, {"prompt_token_ids": "prompt"}) from None
    generation = Generation(
        request_id=prefix + secrets.token_hex(16),
        prompts=prompts,
        params=seeded,
        stream=bool(request.stream),
        timeouts=(request.queue_timeout, request.first_token_timeout, request.request_timeout),
    )
    options = request.stream_options
    include = options is not None and bool(options.include_usage)
    return Answer(
        generation=generation,
        chat=chat,
        created=int(time.time()),
        model=model,
        fingerprint=state.info.fingerprint,
        most_logprobs=params.logprobs,
        hidden_ids=state.tokenizer.special_ids if params.skip_special_tokens else frozenset(),
        prompt_logprobs=request.prompt_logprobs is not None,
        return_token_ids=bool(request.return_token_ids),
        include_usage=include,
        continuous_usage=include and options is not None and bool(options.continuous_usage_stats),
    )


def _check_stream_options(request: SamplingFields) -> None:
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options", "stream_options is only for stream=true")


def check_model(state: ServerState, name: str | None) -> str:
    """The name that answers say. Raises ApiError (404) for a model that is not served."""
    if not name or name in ANY_MODEL:
        return state.model_names[0]
    if name not in state.model_names:
        shown = name if len(name) <= 100 else name[:100] + "…"
        message = f"the model {shown!r} is not served here; GET /v1/models lists what is"
        raise ApiError(404, message, "model", "model_not_found")
    return name


def name_ignored(exchange: Exchange, names: list[str]) -> None:
    value = ignored_header(names)
    if value:
        exchange.headers[IGNORED_HEADER] = value
