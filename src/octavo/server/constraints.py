"""The fields by which OpenAI's, vLLM's, SGLang's and TGI's clients ask for structured output, as StructuredOutputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from octavo.errors import InvalidParameterError
from octavo.server.errors import ApiError, invalid, unsupported
from octavo.structured import KINDS, StructuredOutputs

# vLLM's former names and SGLang's. `grammar` with a type is TGI's, as a text it is llama.cpp's.
_PLAIN = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
}
FIELDS = ("response_format", "structured_outputs", "grammar", *_PLAIN)
_FORMATS = '{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"schema": {…}}}'
_TGI_FORMATS = '{"type": "json" or "json_schema", "value": schema} or {"type": "regex", "value": text}'
# Of vLLM's structured_outputs: what we have no equal of, with the values that change nothing.
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "structural_tag": (),
    "whitespace_pattern": (),
    "disable_additional_properties": (False,),
    "disable_fallback": (True, False),
    "backend": (),
}


@dataclass(frozen=True, slots=True)
class Constraint:
    """`field`: where in the body it is, which errors name."""

    structured: StructuredOutputs
    field: str


def read_constraint(fields: Any) -> Constraint | None:
    """From a request's struct with FIELDS among its fields. Raises ApiError (400), which names both where two are."""
    found = [made for name in FIELDS if (made := _read(name, getattr(fields, name))) is not None]
    if len(found) > 1:
        names = [each[0] for each in found]
        raise invalid(names[1], f"{names[0]} and {names[1]} both ask for a structured output: give one of them")
    return _made(*found[0]) if found else None


def _made(field: str, options: dict[str, Any]) -> Constraint:
    try:
        return Constraint(StructuredOutputs(**options), field)
    except InvalidParameterError as error:
        raise named(error, field) from None


def named(error: InvalidParameterError, field: str) -> ApiError:
    """What is said of a constraint, in the words of the body.

    `structured.json: $.properties.a` becomes the field with the path behind it.
    """
    kind, _, path = error.field.partition("$")
    name = kind.rstrip(": ").removeprefix("structured").lstrip(".")
    param = field + (f".{name}" if field == "structured_outputs" and name in KINDS else "") + path
    return invalid(param, str(error).replace(error.field, param, 1))


def _read(name: str, value: Any) -> tuple[str, dict[str, Any]] | None:
    """The place in the body, and the fields of StructuredOutputs; None for a value that asks for nothing."""
    if value is None:
        return None
    if name == "response_format":
        return _response_format(value)
    if name == "structured_outputs":
        return _structured_outputs(value)
    if name == "grammar" and not isinstance(value, str):
        return _tgi_grammar("grammar", value)
    return name, {_PLAIN.get(name, "grammar"): value}


def _response_format(value: Any) -> tuple[str, dict[str, Any]] | None:
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return None
    if isinstance(value, Mapping) and kind in ("json", "json_object", "json_schema", "regex"):
        if value.get("value") is not None:
            return _tgi_grammar("response_format", value)
        if kind == "json_object":  # with a schema, as llama.cpp and Together take it
            schema = value.get("schema")
            if schema is None:
                return "response_format", {"json_object": True}
            return "response_format.schema", {"json": schema}
        if kind == "json_schema":
            wrapper = value.get("json_schema")
            schema = wrapper.get("schema") if isinstance(wrapper, Mapping) else None
            where = "response_format.json_schema"
            if schema is None:
                raise invalid(where, f"{where}.schema is required", "missing_required_parameter")
            return f"{where}.schema", {"json": schema}
    if kind in ("structural_tag", "grammar", "python"):
        raise unsupported("response_format.type", f"response_format.type={kind!r} is not supported by this server")
    raise invalid("response_format", f"response_format: expected {_FORMATS}", "invalid_type")


def _structured_outputs(value: Any) -> tuple[str, dict[str, Any]] | None:
    if not isinstance(value, Mapping):
        raise invalid("structured_outputs", f"structured_outputs: expected an object with one of {', '.join(KINDS)}")
    options = {name: given for name, given in value.items() if given is not None and not name.startswith("_")}
    for name, harmless in _REFUSED.items():
        if name in options and options.pop(name) not in harmless:
            raise unsupported(f"structured_outputs.{name}")
    known = (*KINDS, "disable_any_whitespace", "start_after")
    unknown = [name for name in options if name not in known]
    if unknown:
        raise invalid(f"structured_outputs.{unknown[0]}", f"structured_outputs has no field {unknown[0]!r}: {known}")
    kinds = [name for name in KINDS if options.get(name) not in (None, False)]
    if len(kinds) > 1:
        first, second = (f"structured_outputs.{name}" for name in kinds[:2])
        raise invalid(second, f"{first} and {second} both ask for a structured output: give one of them")
    return "structured_outputs", options


def _tgi_grammar(field: str, value: Any) -> tuple[str, dict[str, Any]]:
    kind = value.get("type") if isinstance(value, Mapping) else None
    given = value.get("value") if isinstance(value, Mapping) else None
    if given is None or kind not in ("json", "json_object", "json_schema", "regex"):
        raise invalid(field, f"{field}: expected {_TGI_FORMATS}", "invalid_type")
    if kind == "json_schema" and isinstance(given, Mapping) and isinstance(given.get("schema"), (Mapping, bool)):
        return f"{field}.value.schema", {"json": given["schema"]}  # with a name, as TGI's newer clients send it
    return f"{field}.value", {"regex" if kind == "regex" else "json": given}


def tgi_constraint(grammar: Any) -> Constraint | None:
    """From the parameter `grammar` of TGI's routes."""
    return None if grammar is None else _made(*_tgi_grammar("grammar", grammar))


@contextmanager
def naming(field: str | None) -> Iterator[None]:
    """What the engine or a builder of grammars says of a constraint is told under the body's name of it."""
    try:
        yield
    except InvalidParameterError as error:
        if field is None or not error.field.startswith("structured"):
            raise
        raise named(error, field) from None
