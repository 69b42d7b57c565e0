"""Conversations with tool calls, tool results and reasoning, as a model's own chat template wants them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from octavo import limits
from octavo.chat.formats import HERMES, ToolFormat
from octavo.chat.tools import Tool, short_id
from octavo.errors import ChatTemplateError, InvalidParameterError

Render = Callable[[Sequence[Mapping[str, Any]]], str]

_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_PROBE = '{"octavo":"probe"}'
TOOL_PROMPT = (
    "You can call functions. Their signatures, as JSON, one on a line:\n<tools>\n{tools}\n</tools>\n"
    "To call one, write its name and its arguments as JSON between these tags:\n"
    '<tool_call>\n{{"name": "the function", "arguments": {{"parameter": "value"}}}}\n</tool_call>'
)


def takes_argument_text(render: Render) -> bool:
    """Whether a template writes a call's arguments given as text as they are; otherwise it wants them as a mapping."""
    call = {"id": "octavo000", "type": "function", "function": {"name": "octavo", "arguments": _PROBE}}
    messages: list[Mapping[str, Any]] = [
        {"role": "user", "content": "octavo"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "octavo", "tool_call_id": "octavo000", "name": "octavo"},
    ]
    try:
        return _PROBE in render(messages)
    except ChatTemplateError:
        return False


def with_tool_calls(messages: Sequence[Any], *, argument_text: bool, native: bool, short_ids: bool) -> list[Any]:
    """The messages with what is about tools and reasoning checked and in the template's form.

    argument_text: see takes_argument_text. native: the template writes tool calls; otherwise they become texts in the
    hermes format. short_ids: ids of calls have nine letters and digits. Other messages, and what is no message at all,
    pass as they are: the template's own check is for them. Raises InvalidParameterError.
    """
    return [
        _prepared(message, f"messages[{i}]", argument_text, native, short_ids) for i, message in enumerate(messages)
    ]


def _prepared(message: Any, where: str, argument_text: bool, native: bool, short_ids: bool) -> Any:
    if not isinstance(message, Mapping):
        return message
    if message.get("role") == "tool":
        return _tool_result(message, where, native, short_ids)
    if message.get("role") != "assistant":
        return message
    prepared = dict(message)
    _merge_reasoning(prepared, where)
    calls = prepared.pop("tool_calls", None)
    if calls:
        read = _read_calls(calls, f"{where}.tool_calls", argument_text, short_ids)
        if prepared.get("content") is None:
            prepared["content"] = ""
        if native:
            prepared["tool_calls"] = read
        else:
            prepared["content"] = _with_calls_written(prepared["content"], read)
    return prepared


def _merge_reasoning(message: dict[str, Any], where: str) -> None:
    """Both names that thoughts have come back under become the one that templates read."""
    for name in ("reasoning_content", "reasoning"):
        thoughts = message.get(name)
        if thoughts is not None and not isinstance(thoughts, str):
            raise InvalidParameterError(f"{where}.{name}", thoughts, "a text")
    other = message.pop("reasoning", None)
    if message.get("reasoning_content") is None:
        message.pop("reasoning_content", None)
        if other is not None:
            message["reasoning_content"] = other
    if message.get("content") is None and message.get("reasoning_content"):
        message["content"] = ""


def _tool_result(message: Mapping[str, Any], where: str, native: bool, short_ids: bool) -> Mapping[str, Any]:
    call_id = message.get("tool_call_id")
    if call_id is not None and not isinstance(call_id, str):
        raise InvalidParameterError(f"{where}.tool_call_id", call_id, "the id of a tool call")
    if native:
        return message if call_id is None else {**message, "tool_call_id": _id(call_id, short_ids)}
    text = _whole_text(message.get("content"))
    return message if text is None else {"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"}


def _whole_text(content: Any) -> str | None:
    """Of a text or a list of text parts; None for anything else."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    parts = [part for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
    texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
    return "\n".join(texts) if len(texts) == len(content) else None


def _read_calls(calls: Any, where: str, argument_text: bool, short_ids: bool) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, (str, bytes)):
        raise InvalidParameterError(where, calls, "a list of tool calls")
    if len(calls) > limits.MAX_TOOL_CALLS:
        raise InvalidParameterError(where, f"{len(calls)} tool calls", f"at most {limits.MAX_TOOL_CALLS}")
    read = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            shape = '{"id": …, "type": "function", "function": {"name": …, "arguments": …}}'
            raise InvalidParameterError(f"{where}[{i}]", call, shape)
        call_id = call.get("id")
        if call_id is not None and not isinstance(call_id, str):
            raise InvalidParameterError(f"{where}[{i}].id", call_id, "a text")
        arguments = _arguments(function.get("arguments"), f"{where}[{i}].function.arguments", argument_text)
        found: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
        read.append(found if call_id is None else {"id": _id(call_id, short_ids), **found})
    return read


def _arguments(arguments: Any, where: str, as_text: bool) -> Any:
    if arguments is None or arguments == "":
        arguments = {}
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments, strict=False)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise InvalidParameterError(where, arguments, "a JSON object, as text")
        return arguments if as_text else value
    if not isinstance(arguments, Mapping):
        raise InvalidParameterError(where, arguments, "a JSON object, as text")
    return json.dumps(arguments, ensure_ascii=False) if as_text else arguments


def _id(call_id: str, short: bool) -> str:
    return short_id(call_id) if short and not _SHORT_ID.fullmatch(call_id) else call_id


# For templates that know no tools


def _with_calls_written(content: Any, calls: list[dict[str, Any]]) -> Any:
    text = _whole_text(content)
    if text is None:
        return content
    written = [
        f"{HERMES.opener}\n{json.dumps(call['function'], ensure_ascii=False)}\n{HERMES.closer}" for call in calls
    ]
    return "\n".join([text, *written] if text else written)


def with_tool_prompt(messages: Sequence[Any], tools: Sequence[Tool], prompt: str | None) -> list[Any]:
    """The tools in the text of the first message: behind a system message's own, before any other's.

    prompt: instead of our words for it.
    """
    lines = "\n".join(json.dumps(tool.for_template(), ensure_ascii=False) for tool in tools)
    told = TOOL_PROMPT.format(tools=lines) if prompt is None else f"{prompt}\n{lines}"
    first = messages[0] if messages else None
    text = _whole_text(first.get("content")) if isinstance(first, Mapping) else None
    if not isinstance(first, Mapping) or text is None:
        return list(messages)  # the template's check names what is wrong
    if first.get("role") not in ("system", "user"):
        return [{"role": "system", "content": told}, *messages]
    parts = [text, told] if first["role"] == "system" else [told, text]
    return [{**first, "content": "\n\n".join(part for part in parts if part)}, *messages[1:]]


def wants_short_ids(tools: ToolFormat | None) -> bool:
    return tools is not None and tools.style == "list"
