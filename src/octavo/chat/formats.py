"""How models write tool calls and reasoning, as data; found by a chat template's text, or by vLLM's names for them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from octavo.errors import InvalidParameterError

F = TypeVar("F")


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Where a call begins and what it looks like.

    `style`: "tagged" is `opener {object} closer`. "bare" is `{object}` at the answer's start, or behind the opener.
    "list" is `opener [{object}, …]` or `opener name[ARGS]{arguments}`, the latter written where `names_first`, with
    `[CALL_ID]` before `[ARGS]` where `has_call_id`; either is read. An object has members "name" and `arguments_key`.
    """

    name: str
    style: Literal["tagged", "bare", "list"]
    opener: str
    closer: str = ""
    arguments_key: str = "arguments"
    names_first: bool = False
    has_call_id: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """What may be control tokens of the model, and must be seen all the same."""
        more = (ARGS, CALL_ID) if self.style == "list" else ()
        return tuple(marker for marker in (self.opener, self.closer, *more) if marker)


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """`opener` thoughts `closer` answer; `assumed`: the answer begins inside the thoughts, whatever the prompt says."""

    name: str
    opener: str
    closer: str
    assumed: bool = False

    def begins_inside(self, prompt: str) -> bool:
        """Whether what follows the prompt is thought, because the prompt ends with an opened one."""
        end = prompt.rstrip()
        return end.endswith(self.opener) or (self.assumed and not end.endswith(self.closer))


ARGS, CALL_ID = "[ARGS]", "[CALL_ID]"
HERMES = ToolFormat("hermes", "tagged", "<tool_call>", "</tool_call>")
LLAMA3_JSON = ToolFormat("llama3_json", "bare", "<|python_tag|>", arguments_key="parameters")
MISTRAL = ToolFormat("mistral", "list", "[TOOL_CALLS]")
MISTRAL_NAMES = ToolFormat("mistral", "list", "[TOOL_CALLS]", names_first=True)
MISTRAL_IDS = ToolFormat("mistral", "list", "[TOOL_CALLS]", names_first=True, has_call_id=True)
THINK = ReasoningFormat("qwen3", "<think>", "</think>")
THINK_ALWAYS = ReasoningFormat("deepseek_r1", "<think>", "</think>", assumed=True)
THINK_MISTRAL = ReasoningFormat("mistral", "[THINK]", "[/THINK]")

TOOL_PARSERS: Mapping[str, ToolFormat] = {
    "hermes": HERMES,
    "qwen": HERMES,
    "qwen25": HERMES,
    "qwen3": HERMES,
    "llama3_json": LLAMA3_JSON,
    "llama3": LLAMA3_JSON,
    "llama4_json": LLAMA3_JSON,
    "mistral": MISTRAL,
}
REASONING_PARSERS: Mapping[str, ReasoningFormat] = {
    "deepseek_r1": THINK_ALWAYS,
    "deepseek-r1": THINK_ALWAYS,
    "qwen3": THINK,
    "qwen3-thinking": THINK_ALWAYS,
    "mistral": THINK_MISTRAL,
}
AUTO, NONE = "auto", "none"

# Formats that share a marker with one of ours, but write something else between.
_OTHER_CALLS = ("<function=", "<arg_key>", "<parameter=", "<invoke ", "<tool_calls>")


def tool_format(template: str, parser: str = AUTO) -> ToolFormat | None:
    """The format of a model with this chat template; None where it is of no known kind, or `parser` is "none".

    A template that knows no tools at all gets hermes: the conversation is then written to ask for it.
    """
    if parser == NONE:
        return None
    if parser != AUTO:
        named = _named("tool_call_parser", parser, TOOL_PARSERS)
        return _mistral(template) if named is MISTRAL else named
    if not knows_tools(template):
        return HERMES
    if MISTRAL.opener in template:
        return _mistral(template)
    if any(mark in template for mark in _OTHER_CALLS):
        return None
    if HERMES.opener in template:
        return HERMES
    if '"parameters": ' in template and (LLAMA3_JSON.opener in template or "ipython" in template):
        return LLAMA3_JSON
    return None


def reasoning_format(template: str, parser: str = AUTO) -> ReasoningFormat | None:
    """The format of a model with this chat template; None where it has none, or `parser` is "none"."""
    if parser == NONE:
        return None
    if parser != AUTO:
        return _named("reasoning_parser", parser, REASONING_PARSERS)
    for known in (THINK, THINK_MISTRAL):
        if known.opener in template or known.closer in template:
            return known
    return None


def knows_tools(template: str) -> bool:
    """Whether the template writes the tools it is given."""
    return re.search(r"\btools\b", template) is not None


def _mistral(template: str) -> ToolFormat:
    if ARGS not in template:
        return MISTRAL
    return MISTRAL_IDS if CALL_ID in template else MISTRAL_NAMES


def _named(field: str, parser: str, known: Mapping[str, F]) -> F:
    if parser not in known:
        raise InvalidParameterError(field, parser, f"{AUTO}, {NONE}, {', '.join(known)}")
    return known[parser]
