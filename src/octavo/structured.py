"""What an output must be: a JSON value of a schema, a text of a regular expression, one of some choices, or a sentence
of a grammar. Checked here for shape and size; grammar.compile refuses what cannot be enforced."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from octavo import limits
from octavo.errors import InvalidParameterError

KINDS = ("json", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """A constraint on the output: exactly one of the first five. Violations raise InvalidParameterError with the field.

    json: a JSON schema, as an object or its text (a text once constructed). json_object: any JSON object.
    regex: of the whole output, in the syntax of Rust's regex crate, without look-around and back-references.
    choice: texts, one of which is the output. grammar: in llguidance's dialect of Lark, or in GBNF or EBNF with `::=`.
    disable_any_whitespace: JSON on one line without a space; otherwise with a bounded number of them.
    start_after: the constraint begins behind the first appearance of this text in the output, such as </think>.
    """

    json: dict[str, Any] | str | bool | None = None
    json_object: bool = False
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool = False
    start_after: str | None = None

    def __post_init__(self) -> None:
        for name in ("json_object", "disable_any_whitespace"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidParameterError(_field(name), getattr(self, name), "true or false")
        given = {"json_object": self.json_object}
        kinds = [name for name in KINDS if given.get(name, getattr(self, name) is not None)]
        if len(kinds) != 1:
            raise InvalidParameterError("structured", kinds, f"exactly one of {', '.join(KINDS)}")
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.regex is not None:
            _text("regex", self.regex, limits.MAX_REGEX_CHARS)
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        if self.grammar is not None:
            _text("grammar", self.grammar, limits.MAX_GRAMMAR_CHARS)
        if self.disable_any_whitespace and kinds[0] not in ("json", "json_object"):
            raise InvalidParameterError(_field("disable_any_whitespace"), True, "only with json or json_object")
        if self.start_after is not None:
            _text("start_after", self.start_after, limits.MAX_START_AFTER_CHARS)

    @staticmethod
    def of(value: Any) -> StructuredOutputs | None:
        """From None, one of its own kind, or a mapping of its fields."""
        if value is None or isinstance(value, StructuredOutputs):
            return value
        if not isinstance(value, Mapping):
            raise InvalidParameterError("structured", value, f"StructuredOutputs, or a mapping with one of {KINDS}")
        names = [field.name for field in fields(StructuredOutputs)]
        for name in value:
            if name not in names:
                raise InvalidParameterError("structured", name, f"fields of these names: {', '.join(names)}")
        return StructuredOutputs(**value)


def _field(name: str) -> str:
    return f"structured.{name}"


def _text(name: str, value: Any, longest: int) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= longest:
        shown = f"a text of {len(value)} characters" if isinstance(value, str) and value else value
        raise InvalidParameterError(_field(name), shown, f"a text of 1 to {longest} characters")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidParameterError(_field(name), value, "a text without lone surrogates") from None
    return value


def _choices(value: Any) -> list[str]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise InvalidParameterError(_field("choice"), value, "a list of texts")
    choices = list(value)
    if not 1 <= len(choices) <= limits.MAX_CHOICES:
        raise InvalidParameterError(_field("choice"), f"{len(choices)} texts", f"1 to {limits.MAX_CHOICES} texts")
    return list(dict.fromkeys(_text("choice", choice, limits.MAX_CHOICE_CHARS) for choice in choices))


def _schema_text(value: Any) -> str:
    """The schema as JSON text without spaces, its keys in their order."""
    name, allowed = _field("json"), "a JSON schema: an object, true, false, or the text of one"
    if isinstance(value, str):
        if len(value) > limits.MAX_SCHEMA_CHARS:
            raise InvalidParameterError(name, f"{len(value)} characters", f"at most {limits.MAX_SCHEMA_CHARS}")
        try:
            value = json.loads(value, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise InvalidParameterError(name, value, f"{allowed} ({error})") from None
    if not isinstance(value, (dict, bool)):
        raise InvalidParameterError(name, value, allowed)
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidParameterError(name, value, f"{allowed} ({error})") from None
    if len(text) > limits.MAX_SCHEMA_CHARS:
        raise InvalidParameterError(name, f"{len(text)} characters", f"at most {limits.MAX_SCHEMA_CHARS}")
    return text


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
