"""Grammars that let a model write nothing but the tool calls asked for, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo import limits
from octavo.chat.formats import ARGS, CALL_ID, ReasoningFormat, ToolFormat
from octavo.chat.tools import Tool, Tools
from octavo.errors import InvalidParameterError
from octavo.grammar.embedded import SPACES, lark_choice
from octavo.grammar.expansion import check_regex
from octavo.grammar.json_schema import checked_schema
from octavo.structured import StructuredOutputs

_BLANK = r"[ \n]{0,2}"
_SPACED = {"whitespace_pattern": SPACES}  # where JSON may have some
_ONE_SPACE = {"whitespace_pattern": r"\x20"}  # models write arguments on one line
_SPELLED = {"/": r"\/", "\n": r"\n", "\r": r"\r", "\t": r"\t"}  # in a regular expression between slashes
_CLOSED = ("additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "$ref")


def tool_constraint(
    format_: ToolFormat,
    tools: Tools,
    reasoning: ReasoningFormat | None,
    *,
    thinking: bool,
    control_ids: Mapping[str, int],
) -> StructuredOutputs | None:
    """What holds the output to the calls that `tools` asks for; None where nothing needs to.

    Required calls and named ones are all there is in the answer. Under auto, where a function is strict or only one
    call is wanted, any text may come before each call. thinking: the output begins inside the thoughts; where it does
    not, it may open them itself. control_ids: the markers that are control tokens of the model.
    """
    exact = tools.required or any(tool.strict for tool in tools.callable)
    if not tools.callable or (not exact and tools.parallel):
        return None
    grammar = _Grammar(format_, tools, control_ids)
    rules = [*grammar.bodies(), *(grammar.required() if tools.required else grammar.free())]
    return _behind(rules, "calls" if tools.required else "free", reasoning, thinking, control_ids)


def calls_or(
    structured: StructuredOutputs,
    format_: ToolFormat,
    tools: Tools,
    reasoning: ReasoningFormat | None,
    *,
    thinking: bool,
    control_ids: Mapping[str, int],
) -> StructuredOutputs:
    """What holds an answer under auto to be either calls or what `structured` asks for.

    Raises InvalidParameterError for what can't be told apart: a bare call from other JSON, a grammar of the user's own.
    """
    if format_.style == "bare" or structured.grammar is not None or structured.start_after is not None:
        allowed = "none beside this structured output: what is a call could not be told apart from it"
        raise InvalidParameterError("tools", [tool.name for tool in tools.callable], allowed)
    grammar = _Grammar(format_, tools, control_ids)
    rules = [*grammar.bodies(), *grammar.required(), *_answer(structured), "either: calls | answer"]
    return _behind(rules, "either", reasoning, thinking, control_ids)


def behind_thoughts(
    structured: StructuredOutputs, reasoning: ReasoningFormat, *, thinking: bool, control_ids: Mapping[str, int]
) -> StructuredOutputs:
    """The same constraint on the answer alone, which thoughts may come before.

    A grammar of the user's own cannot be put behind thoughts that may or may not come: it then holds from the start.
    """
    if structured.start_after is not None:
        return structured
    if structured.grammar is not None:
        return replace(structured, start_after=reasoning.closer) if thinking else structured
    return _behind(_answer(structured), "answer", reasoning, thinking, control_ids)


def _answer(structured: StructuredOutputs) -> list[str]:
    """The rule `answer` for any constraint but a grammar."""
    if structured.regex is not None:
        check_regex("structured.regex", structured.regex)
        return ["answer: ANSWER", f"ANSWER: /{_between_slashes(structured.regex)}/"]
    if structured.choice is not None:
        return [f"answer: {lark_choice(structured.choice)}"]
    schema = checked_schema(structured.json if isinstance(structured.json, str) else '{"type": "object"}')
    spaces: dict[str, Any] = {"whitespace_flexible": False} if structured.disable_any_whitespace else _SPACED
    return [f"answer: %json {json.dumps({**_without_words(schema), 'x-guidance': spaces})}"]


def _between_slashes(regex: str) -> str:
    """The same expression as Lark writes one; what is escaped already is not escaped twice."""
    return re.sub(r"\\?(.)", lambda found: _SPELLED.get(found[1], found[0]), regex, flags=re.DOTALL)


def _behind(
    rules: list[str], start: str, reasoning: ReasoningFormat | None, thinking: bool, control_ids: Mapping[str, int]
) -> StructuredOutputs:
    """The rules as a grammar that begins with the rule `start`, behind thoughts where there are some."""
    rules = ["%llguidance {}", *rules, f"BLANK: /{_BLANK}/"]
    if reasoning is None:
        return StructuredOutputs(grammar="\n".join([*rules, f"start: {start}"]))
    if thinking:
        return StructuredOutputs(grammar="\n".join([*rules, f"start: BLANK {start}"]), start_after=reasoning.closer)
    rules += [f"start: thoughts? {start}", *_thoughts(reasoning, control_ids)]
    return StructuredOutputs(grammar="\n".join(rules))


class _Grammar:
    """The rules `calls` (nothing but calls) and `free` (text with calls in it) for one format."""

    def __init__(self, format_: ToolFormat, tools: Tools, control_ids: Mapping[str, int]) -> None:
        self._format = format_
        self._tools = tools
        self._ids = control_ids

    def bodies(self) -> list[str]:
        names = [f"call_{i}" for i in range(len(self._tools.callable))]
        bodies: list[str] = []
        room = limits.MAX_GRAMMAR_CHARS
        for name, tool in zip(names, self._tools.callable):
            bodies.append(f"{name}: {self._body(tool)}")
            room -= len(bodies[-1])
            if room < 0:  # before more of them are looked at
                allowed = (
                    f"tools whose schemas, without descriptions, have {limits.MAX_GRAMMAR_CHARS} characters in all"
                )
                raise InvalidParameterError("tools", f"{len(self._tools.callable)} tools", allowed)
        return [f"call: {' | '.join(names)}", *bodies]

    def required(self) -> list[str]:
        format_, several = self._format, self._tools.parallel
        opener = self._mark(format_.opener)
        most = limits.MAX_TOOL_CALLS - 1
        if format_.style == "bare":
            return ["calls: call"]  # those templates take one call in a message
        if format_.style == "tagged":
            whole = f'{opener} "\\n" call "\\n" {self._mark(format_.closer)}'
            more = f' ("\\n" tagged){{0,{most}}}' if several else ""
            return [f"tagged: {whole}", f"calls: tagged{more}"]
        if format_.names_first:
            return [f"calls: ({opener} call){{1,{most + 1 if several else 1}}}"]
        more = f' (", " call){{0,{most}}}' if several else ""
        return [f'calls: {opener} "[" call{more} "]"']

    def free(self) -> list[str]:
        """Text up to the opener, then a call; in the end text again, unless only one call was wanted."""
        format_ = self._format
        repeat = f"{{1,{limits.MAX_TOOL_CALLS}}}" if self._tools.parallel else ""
        rules = ["text: TEXT", "TEXT: /(.|\\n)*/"]
        if format_.style == "bare":
            return [*rules[1:], "free: prose | call", "prose: PROSE", "PROSE: /([^{ \\n\\t\\r](.|\\n)*)?/"]
        opener = self._mark(format_.opener)
        if opener.startswith("<["):
            before = f"text {opener}"
        else:
            rules.append(f"before[lazy]: TEXT {opener}")
            before = "before"
        if format_.style == "tagged":
            one = f'{before} "\\n" call "\\n" {self._mark(format_.closer)}'
        elif format_.names_first:
            one = f"{before} call"
        else:
            more = f' (", " call){{0,{limits.MAX_TOOL_CALLS - 1}}}' if repeat else ""
            one = f'{before} "[" call{more} "]"'
        rules.append(f"one: {one}")
        return [*rules, f"free: one{repeat} text | text" if repeat else "free: one | text"]

    def _body(self, tool: Tool) -> str:
        schema = self._schema(tool)
        if self._format.names_first:
            call_id = f"({self._mark(CALL_ID)} /[a-zA-Z0-9]{{9}}/)? " if self._format.has_call_id else ""
            return f"{json.dumps(tool.name)} {call_id}{self._mark(ARGS)} {schema}"
        head = f'{{"name": {json.dumps(tool.name)}, {json.dumps(self._format.arguments_key)}: '
        return f'{json.dumps(head)} {schema} "}}"'

    def _schema(self, tool: Tool) -> str:
        """Of its arguments; under auto those of a function that is not strict may be anything."""
        schema = arguments_schema(tool) if self._tools.required or tool.strict else {"type": "object"}
        return f"%json {json.dumps({**schema, 'x-guidance': _ONE_SPACE})}"

    def _mark(self, marker: str) -> str:
        return _mark(marker, self._ids)


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """The parameters as a schema of an object; one that lists its properties has no others unless it says so.

    Raises InvalidParameterError with the path of what cannot be enforced.
    """
    try:
        schema = checked_schema(json.dumps({"type": "object", **tool.parameters}))
    except InvalidParameterError as error:
        _, _, path = error.field.partition("$")
        raise InvalidParameterError(f"{tool.where}.parameters{path}", error.value, error.allowed) from None
    if "properties" in schema and not any(name in schema for name in _CLOSED):
        schema["additionalProperties"] = False
    found: dict[str, Any] = _without_words(schema)
    return found


def _without_words(schema: Any) -> Any:
    """The schema without what only describes it: a grammar has no use for it, and its length is bounded."""
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in ("properties", "patternProperties", "$defs", "definitions"):
            found[keyword] = {name: _without_words(inner) for name, inner in value.items()}
        elif keyword in ("anyOf", "oneOf", "allOf", "prefixItems"):
            found[keyword] = [_without_words(inner) for inner in value]
        elif keyword in ("items", "additionalProperties"):
            found[keyword] = _without_words(value)
        elif keyword not in ("description", "title", "default", "examples", "$comment", "$schema", "$id"):
            found[keyword] = value
    return found


def _mark(marker: str, control_ids: Mapping[str, int]) -> str:
    """A marker as a control token, which no text can spell, or as text."""
    return f"<[{control_ids[marker]}]>" if marker in control_ids else json.dumps(marker)


def _thoughts(reasoning: ReasoningFormat, control_ids: Mapping[str, int]) -> list[str]:
    opener, closer = _mark(reasoning.opener, control_ids), _mark(reasoning.closer, control_ids)
    if closer.startswith("<["):
        return [f"thoughts: {opener} THOUGHT {closer} BLANK", "THOUGHT: /(.|\\n)*/"]
    return [f"thoughts: {opener} thought BLANK", f"thought[lazy]: /(.|\\n)*/ {closer}"]
