"""What of JSON Schema (draft 2020-12) can be enforced; anything else is refused with its path, never ignored."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from octavo import limits
from octavo.errors import InvalidParameterError
from octavo.grammar.expansion import check_regex

Schema = dict[str, Any] | bool
_MOST_HOPS = 8

_TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")

# Say something about a schema, nothing about a value.
_ANNOTATIONS = {
    *("$schema", "$id", "$comment", "title", "description", "default", "examples", "deprecated", "readOnly"),
    *("writeOnly", "discriminator", "contentEncoding", "contentMediaType", "contentSchema"),
}
_ONE = frozenset(("items", "additionalProperties"))
_LISTED = frozenset(("anyOf", "oneOf", "allOf", "prefixItems"))
_NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions"))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_type(value: Any) -> bool:
    names = value if isinstance(value, list) and value else [value]
    return all(isinstance(name, str) and name in _TYPES for name in names)


_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "type": (_is_type, f"one of {', '.join(_TYPES)}, or a list of these"),
    "const": (lambda value: True, ""),
    "enum": (lambda value: isinstance(value, list) and len(value) > 0, "a list with at least one value"),
    "$ref": (lambda value: isinstance(value, str) and value.split("/")[0] == "#", "a path such as #/$defs/name"),
    **{name: (_is_number, "a number") for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")},
    "multipleOf": (lambda value: _is_number(value) and value > 0, "a number above 0"),
    **{
        name: (_is_count, "an integer from 0")
        for name in ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
    },
    "pattern": (lambda value: isinstance(value, str), "a regular expression"),
    "format": (lambda value: value in FORMATS, f"one of {', '.join(FORMATS)}"),
    "required": (_is_names, "a list of names"),
    "uniqueItems": (lambda value: value is False, "false: that items differ can't be enforced"),
}  # fmt: skip


def checked_schema(text: str) -> dict[str, Any]:
    """The schema without what says nothing.

    Raises InvalidParameterError with the JSON path of a keyword that is not supported, malformed or too costly.
    """
    schema: Schema = json.loads(text)
    if isinstance(schema, bool):
        if not schema:
            raise _refused("$", schema, "a schema that some value satisfies")
        return {}
    _Checker(schema).check()
    return schema


class _Checker:
    def __init__(self, root: Schema) -> None:
        self._root = root
        self._properties = 0
        self._named: list[tuple[str, Any, int]] = []  # by $ref: its path, the schema, how deep it may be in others
        self._weights: dict[int, int] = {}  # by identity of the schema, as below
        self._pattern_counts: dict[int, int] = {}

    def check(self) -> None:
        pending: list[tuple[str, Any, int]] = [("$", self._root, 0)]
        seen: set[int] = set()
        while pending or self._named:
            # Last what $ref names: it may lie where no schema is looked for.
            path, schema, depth = pending.pop() if pending else self._named.pop()
            if isinstance(schema, bool) or id(schema) in seen:
                continue
            seen.add(id(schema))
            if not isinstance(schema, dict):
                raise _refused(path, schema, "a schema: an object, true or false")
            if depth > limits.MAX_SCHEMA_DEPTH:
                raise _refused(path, "a schema", f"schemas at most {limits.MAX_SCHEMA_DEPTH} deep in one another")
            for keyword, value in schema.items():
                self._check_keyword(f"{path}.{keyword}", keyword, value)
            for keyword, value in schema.items():  # looks at several of them
                self._check_value(f"{path}.{keyword}", keyword, value, schema)
            schema.pop("uniqueItems", None)
            if "oneOf" in schema and "anyOf" not in schema and self._exclude_each_other(path, schema["oneOf"]):
                schema["anyOf"] = schema.pop("oneOf")
            pending.extend((where, inner, depth + 1) for where, inner in _inner(path, schema))
        self._weigh(self._root, ())

    def _check_keyword(self, path: str, keyword: str, value: Any) -> None:
        if keyword == "$id" and path != "$.$id":
            raise _refused(path, value, "at the top only: within, it changes what $ref means")
        if keyword in _ANNOTATIONS:
            return
        if keyword in _VALUES:
            holds, allowed = _VALUES[keyword]
            if not holds(value):
                raise _refused(path, value, allowed)
        elif keyword in _LISTED:
            if not isinstance(value, list) or not value:
                raise _refused(path, value, "a list of schemas")
        elif keyword in _NAMED:
            if not isinstance(value, dict):
                raise _refused(path, value, "an object of schemas")
            self._properties += len(value)
            if self._properties > limits.MAX_SCHEMA_PROPERTIES:
                raise _refused(path, f"{self._properties} names", f"at most {limits.MAX_SCHEMA_PROPERTIES} in a schema")
            if keyword == "patternProperties":
                for pattern in value:
                    check_regex(f"structured.json: {path}", pattern)
        elif keyword not in _ONE:
            raise _refused(path, keyword, "a keyword that can be enforced; this one is not supported")

    def _check_value(self, path: str, keyword: str, value: Any, schema: dict[str, Any]) -> None:
        if keyword == "pattern":
            check_regex(f"structured.json: {path}", value)
        elif keyword == "multipleOf":
            digits = repr(value).replace(".", "").lstrip("0")
            digits = digits[:-1] if isinstance(value, float) and value.is_integer() else digits
            if not digits.isdigit() or int(digits) > limits.MAX_SCHEMA_MULTIPLE_OF:
                most = limits.MAX_SCHEMA_MULTIPLE_OF
                raise _refused(path, value, f"a number whose digits, without the decimal point, are at most {most}")
        elif keyword in ("minProperties", "maxProperties") and set(schema.get("properties", ())) - set(
            schema.get("required", ())
        ):
            raise _refused(path, value, "only where every name in properties is required")
        elif keyword == "minProperties" and value > 1 and schema.get("additionalProperties") is not False:
            # A free name may come twice, and then counts once.
            raise _refused(path, value, "0 or 1, unless additionalProperties is false")
        elif keyword == "minProperties" and value > 1 and "patternProperties" in schema:
            raise _refused(path, value, "0 or 1 beside patternProperties")
        elif keyword == "$ref":
            found = self._follow(path, value)
            parts = _parts(value)
            if any(part in ("const", "enum") and above not in _NAMED for above, part in zip(["", *parts], parts)):
                raise _refused(path, value, "a path to a schema, not to a value")
            where = "".join(f"[{part}]" if part.isdecimal() else f".{part}" for part in parts)
            self._named.append((f"${where}", found, len(parts)))

    def _exclude_each_other(self, path: str, alternatives: list[Any]) -> bool:
        """Whether a required property tells them apart, by strings of which each may have its own only."""
        tags = [self._tags(path, alternative) for alternative in alternatives]
        for name in set(tags[0]).intersection(*tags[1:]):
            values = [value for tag in tags for value in tag[name]]
            if len(values) == len(set(values)):
                return True
        return False

    def _tags(self, path: str, schema: Any) -> dict[str, set[str]]:
        for _ in range(_MOST_HOPS):  # references may go round in a circle
            if not (isinstance(schema, dict) and set(schema) == {"$ref"} and isinstance(schema["$ref"], str)):
                break
            schema = self._follow(path, schema["$ref"])
        if not isinstance(schema, dict) or schema.get("type") != "object":
            return {}
        properties, required = schema.get("properties"), schema.get("required")
        if not isinstance(properties, dict) or not isinstance(required, list):
            return {}
        found = {}
        for name, inner in properties.items():
            if name in required and isinstance(inner, dict):
                values = inner.get("enum", [inner.get("const")])
                if isinstance(values, list) and all(isinstance(value, str) for value in values):
                    found[name] = set(values)
        return found

    def _follow(self, path: str, reference: str) -> Any:
        found: Any = self._root
        for part in _parts(reference):
            if isinstance(found, dict) and part in found:
                found = found[part]
            elif isinstance(found, list) and part.isdecimal() and len(part) < 10 and int(part) < len(found):
                found = found[int(part)]
            else:
                raise _refused(path, reference, "a path to a schema in this document")
        if not isinstance(found, (dict, bool)):
            raise _refused(path, reference, "a path to a schema in this document")
        return found

    def _weigh(self, schema: Any, above: tuple[int, ...]) -> int:
        """Characters that a value of the schema may be forced to have, at most; a schema within itself counts once."""
        if not isinstance(schema, dict) or id(schema) in above:
            return 1
        if id(schema) in self._weights:
            return self._weights[id(schema)]
        self._patterns(schema, above)
        if len(above) > 4 * limits.MAX_SCHEMA_DEPTH:
            raise _refused("$", "a chain of $ref", "a shorter one")
        inside = (*above, id(schema))
        weight: int = 1
        for value in (schema.get("const"), *(schema.get("enum") or ())):
            weight = max(weight, len(json.dumps(value)))
        if "$ref" in schema:
            weight += self._weigh(self._follow("$", schema["$ref"]), inside)
        for keyword in ("anyOf", "oneOf", "allOf"):
            weight += sum(self._weigh(inner, inside) for inner in schema.get(keyword, ()))
        for name, inner in schema.get("properties", {}).items():
            weight += len(name) + 4 + self._weigh(inner, inside)
        tuple_weights = [self._weigh(inner, inside) for inner in schema.get("prefixItems", ())]
        weight += sum(tuple_weights)
        for keyword in ("items", "additionalProperties"):
            inner_weight = self._weigh(schema.get(keyword, True), inside)
            weight += inner_weight * (max(schema.get("minItems", 0), 1) if keyword == "items" else 1)
        weight += schema.get("minLength", 0)
        if weight > limits.MAX_SCHEMA_EXPANSION:
            most = limits.MAX_SCHEMA_EXPANSION
            raise _refused("$", "a schema", f"one whose values need at most {most} characters")
        self._weights[id(schema)] = weight
        return weight

    def _patterns(self, schema: Any, above: tuple[int, ...]) -> int:
        """How many patterns and formats may have to hold for one text."""
        if not isinstance(schema, dict) or id(schema) in above:
            return 0
        if id(schema) in self._pattern_counts:
            return self._pattern_counts[id(schema)]
        inside = (*above, id(schema))
        count = ("pattern" in schema) + ("format" in schema)
        count += sum(self._patterns(inner, inside) for inner in schema.get("allOf", ()))
        for keyword in ("anyOf", "oneOf"):
            count += max([self._patterns(inner, inside) for inner in schema.get(keyword, ())], default=0)
        if "$ref" in schema:
            count += self._patterns(self._follow("$", schema["$ref"]), inside)
        if count > limits.MAX_INTERSECTIONS:
            raise _refused("$", f"{count} patterns for one text", f"at most {limits.MAX_INTERSECTIONS}")
        self._pattern_counts[id(schema)] = count
        return count


def _inner(path: str, schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas directly within one, with their paths."""
    for keyword, value in schema.items():
        if keyword in _ONE:
            yield f"{path}.{keyword}", value
        elif keyword in _LISTED:
            yield from ((f"{path}.{keyword}[{i}]", inner) for i, inner in enumerate(value))
        elif keyword in _NAMED:
            yield from ((f"{path}.{keyword}.{name}", inner) for name, inner in value.items())


def _parts(reference: str) -> list[str]:
    """Of a JSON pointer (RFC 6901)."""
    return [part.replace("~1", "/").replace("~0", "~") for part in reference.split("/")[1:]]


def _refused(path: str, value: Any, allowed: str) -> InvalidParameterError:
    return InvalidParameterError(f"structured.json: {path}", value, allowed)
