"""The tools of a request, checked: which functions there are, and which the answer may, must or must not call."""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from octavo import limits
from octavo.errors import InvalidParameterError

_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}
_CHOICE = '"auto", "none", "required", or {"type": "function", "function": {"name": …}} with the name of a tool'
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"

Mode = Literal["auto", "none", "required"]


@dataclass(frozen=True, slots=True)
class Tool:
    """One function. `where`: how errors name its place. `strict`: calls of it keep to the schema also under auto."""

    where: str
    name: str
    description: str | None
    parameters: Mapping[str, Any]
    strict: bool

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it; what is about decoding is left out."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": {**function, "parameters": self.parameters}}


@dataclass(frozen=True, slots=True)
class Tools:
    """`offered`: what the prompt tells of. `callable`: those of them that may be called.

    required: the answer is nothing but calls. parallel: there may be several calls.
    """

    offered: tuple[Tool, ...] = ()
    callable: tuple[Tool, ...] = ()
    required: bool = False
    parallel: bool = True

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool.name for tool in self.callable)


def read_tools(tools: Any, choice: Any = None, parallel: bool | None = None) -> Tools:
    """From `tools`, `tool_choice` and `parallel_tool_calls` of a chat request.

    A tool_choice that is the bare name of a function, as TGI has it, means that function. With "none" the prompt has no
    tools either. Raises InvalidParameterError.
    """
    found = _read_all(tools)
    mode, name = _read_choice(choice)
    if name is not None:
        chosen = tuple(tool for tool in found if tool.name == name)
        if not chosen:
            listed = ", ".join(tool.name for tool in found) or "there are none"
            raise InvalidParameterError("tool_choice", name, f"the name of one of the tools: {listed}")
        return Tools(found, chosen, required=True, parallel=False)
    if mode == "required" and not found:
        raise InvalidParameterError("tool_choice", choice, '"auto" or "none" when there are no tools')
    if mode == "none" or not found:
        return Tools()
    return Tools(found, found, required=mode == "required", parallel=parallel is not False)


def _read_all(tools: Any) -> tuple[Tool, ...]:
    if tools is None:
        return ()
    if not isinstance(tools, Sequence) or isinstance(tools, (str, bytes)):
        raise InvalidParameterError("tools", tools, "a list of tools")
    if len(tools) > limits.MAX_TOOLS:
        raise InvalidParameterError("tools", f"{len(tools)} tools", f"at most {limits.MAX_TOOLS}")
    found: dict[str, Tool] = {}
    for i, given in enumerate(tools):
        tool = _read(given, f"tools[{i}]")
        if tool.name in found:
            raise InvalidParameterError(f"tools[{i}].function.name", tool.name, "a name that no other tool has")
        found[tool.name] = tool
    return tuple(found.values())


def _read(given: Any, where: str) -> Tool:
    if not isinstance(given, Mapping):
        raise InvalidParameterError(where, given, '{"type": "function", "function": {"name": …, "parameters": {…}}}')
    if given.get("type", "function") != "function":
        raise InvalidParameterError(f"{where}.type", given["type"], '"function"; there are no other kinds of tools')
    function, where = given.get("function"), f"{where}.function"
    if not isinstance(function, Mapping):
        raise InvalidParameterError(where, function, "an object with the name of a function")
    name = function.get("name")
    if not isinstance(name, str) or len(name) > limits.MAX_TOOL_NAME_CHARS or not _NAME.fullmatch(name):
        allowed = f"1 to {limits.MAX_TOOL_NAME_CHARS} of the characters a-z, A-Z, 0-9, _, . and -"
        raise InvalidParameterError(f"{where}.name", name, allowed)
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise InvalidParameterError(f"{where}.description", description, "a text")
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidParameterError(f"{where}.strict", strict, "true or false")
    parameters = _read_parameters(function, where)
    return Tool(where, name, description, parameters, bool(strict))


def _read_parameters(function: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """`arguments` is what early clients of TGI call it."""
    parameters = function.get("parameters")
    if parameters is None:
        parameters = function.get("arguments")
    where = f"{where}.parameters"
    if parameters is None:
        return _NO_PARAMETERS
    if not isinstance(parameters, Mapping):
        raise InvalidParameterError(where, parameters, "a JSON schema of an object")
    if parameters.get("type", "object") != "object":
        raise InvalidParameterError(f"{where}.type", parameters["type"], '"object": arguments have names')
    try:
        size = len(json.dumps(parameters, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidParameterError(where, parameters, f"a JSON schema ({error})") from None
    if size > limits.MAX_TOOL_SCHEMA_CHARS:
        raise InvalidParameterError(
            where, f"{size} characters", f"a schema of at most {limits.MAX_TOOL_SCHEMA_CHARS} characters"
        )
    return parameters


def _read_choice(choice: Any) -> tuple[Mode, str | None]:
    """(mode, None) or (_, the name of a function)."""
    if choice is None:
        return "auto", None
    if choice == "auto" or choice == "none" or choice == "required":
        return choice, None
    if isinstance(choice, str):
        return "required", choice
    if isinstance(choice, Mapping) and choice.get("type", "function") == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(name, str):
            return "required", name
    raise InvalidParameterError("tool_choice", choice, _CHOICE)


def call_ids(prompt_ids: Sequence[int], seed: int | None, choice: int, *, short: bool) -> Callable[[int], str]:
    """The id of each tool call of an answer: the same request always has the same ones.

    `short`: nine letters and digits, which is what Mistral's templates insist on.
    """
    key = hashlib.blake2b(array("q", prompt_ids).tobytes() + f"{seed} {choice}".encode(), digest_size=32).digest()

    def call_id(index: int) -> str:
        return short_id(f"{index}", key) if short else f"call_{_letters(hashlib.blake2b(b'%d' % index, key=key), 24)}"

    return call_id


def short_id(text: str, key: bytes = b"") -> str:
    """Nine letters and digits that stand for the text."""
    return _letters(hashlib.blake2b(text.encode("utf-8", "replace"), key=key), 9)


def _letters(digest: hashlib.blake2b, count: int) -> str:
    number = int.from_bytes(digest.digest(), "big")
    letters = []
    for _ in range(count):
        number, rest = divmod(number, len(_LETTERS))
        letters.append(_LETTERS[rest])
    return "".join(letters)
