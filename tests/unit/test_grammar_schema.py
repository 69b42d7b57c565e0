"""Each keyword of JSON Schema: what it allows can be said, what it forbids can not; what is not enforced is refused.

The cases are in the manner of the JSON-Schema-Test-Suite, draft 2020-12; the suite's verdicts are `jsonschema`'s.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from octavo.errors import InvalidParameterError, RequestFailedError
from octavo.grammar import Constraint, GrammarCompiler
from octavo.grammar.json_schema import _ANNOTATIONS, _LISTED, _NAMED, _ONE, _VALUES, FORMATS, checked_schema
from octavo.grammar.vocabulary import Vocabulary
from octavo.structured import StructuredOutputs
from octavo.tokenizer import Tokenizer
from tests.support.engines import EOS, load_tiny


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tiny(tmp_path_factory.mktemp("tiny")).tokenizer


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(lambda: Vocabulary(tokenizer, tokenizer.vocab_size, {EOS}))


def takes(compiler: GrammarCompiler, tokenizer: Tokenizer, text: str, **structured: Any) -> bool:
    """Whether the text, whole, is in the grammar's language."""
    constraint = Constraint(compiler.compile(StructuredOutputs(**structured)))
    try:
        for token_id in tokenizer.encode(text, add_special_tokens=False):
            constraint.append(token_id)
    except RequestFailedError:
        return False
    return bool(constraint.matcher.is_accepting())


# Schema, values it allows, values it forbids.
CASES: dict[str, list[tuple[Any, list[Any], list[Any]]]] = {
    "type": [
        ({"type": "string"}, ["", "a b", "é€", 'q"\\/\n'], [1, None, True, [], {}]),
        ({"type": "integer"}, [0, -7, 123456789], [1.5, "1", None]),
        ({"type": "number"}, [0, -1.5, 2e10, 0.001], ["1", True]),
        ({"type": "boolean"}, [True, False], [0, "true", None]),
        ({"type": "null"}, [None], [0, "", False]),
        ({"type": "array"}, [[], [1, "a", [None]]], [{}, "[]"]),
        ({"type": "object"}, [{}, {"a": {"b": [1]}}], [[], "x"]),
        ({"type": ["integer", "null"]}, [3, None], ["a", 2.5]),
    ],
    "const": [
        ({"const": 7}, [7], [8, "7"]),
        ({"const": 'a"b'}, ['a"b'], ["ab"]),
        ({"const": [1, None]}, [[1, None]], [[1], []]),
        ({"const": {"a": True}}, [{"a": True}], [{}, {"a": False}]),
    ],
    "enum": [
        ({"enum": ["red", 2, None, [1]]}, ["red", 2, None, [1]], ["blue", 3, []]),
        ({"enum": ["ab", "abcd"], "minLength": 3}, ["abcd"], ["ab"]),
    ],
    "minLength": [({"type": "string", "minLength": 2}, ["ab", "é€"], ["", "é"])],
    "maxLength": [({"type": "string", "maxLength": 2}, ["", "é€", '"\n'], ["abc"])],
    "pattern": [
        ({"type": "string", "pattern": "^a+$"}, ["a", "aaa"], ["", "ab", "ba"]),
        ({"type": "string", "pattern": "b"}, ["b", "abc"], ["", "ac"]),
        ({"type": "string", "pattern": "^\\d{2}$"}, ["07"], ["7", "ab"]),
        ({"type": "string", "pattern": "^a", "minLength": 3}, ["abc"], ["ab", "bbb"]),
    ],
    "format": [
        ({"type": "string", "format": "date"}, ["2024-02-28"], ["2024-13-01", "x"]),
        ({"type": "string", "format": "time"}, ["12:30:00Z"], ["25:00:00Z", "noon"]),
        ({"type": "string", "format": "date-time"}, ["2024-02-28T12:30:00Z"], ["2024-02-28"]),
        ({"type": "string", "format": "duration"}, ["P1D"], ["1 day"]),
        ({"type": "string", "format": "email"}, ["a@b.org"], ["a", "@b"]),
        ({"type": "string", "format": "hostname"}, ["a.example"], ["a b"]),
        ({"type": "string", "format": "ipv4"}, ["10.0.0.255"], ["10.0.0.256", "1.2.3"]),
        ({"type": "string", "format": "ipv6"}, ["::1"], ["1", "g::"]),
        ({"type": "string", "format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123"]),
        ({"type": "string", "format": "uri"}, ["http://a.b/c"], ["a b"]),
    ],
    "minimum": [
        ({"type": "integer", "minimum": 3}, [3, 40], [2, -5]),
        ({"type": "number", "minimum": 0.5}, [0.5, 7], [0.4]),
    ],
    "maximum": [
        ({"type": "integer", "maximum": 3}, [3, -40], [4, 30]),
        ({"type": "number", "maximum": 0.5}, [0.5, -7], [0.6]),
    ],
    "exclusiveMinimum": [({"type": "integer", "exclusiveMinimum": 3}, [4], [3])],
    "exclusiveMaximum": [({"type": "number", "exclusiveMaximum": 2}, [1.9], [2, 2.5])],
    "multipleOf": [
        ({"type": "integer", "multipleOf": 3}, [0, 9, -3], [4]),
        ({"type": "number", "multipleOf": 0.5}, [1.5], [0.3]),
    ],
    "items": [({"type": "array", "items": {"type": "integer"}}, [[], [1, 2]], [["a"], [1, None]])],
    "prefixItems": [
        (
            {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]},
            [[], [1], [1, "a", None]],
            [["a"], [1, 2]],
        ),
        ({"type": "array", "prefixItems": [{"type": "integer"}], "items": False}, [[1]], [[1, 2]]),
    ],
    "minItems": [({"type": "array", "minItems": 2, "items": {"type": "null"}}, [[None, None]], [[], [None]])],
    "maxItems": [({"type": "array", "maxItems": 1}, [[], [1]], [[1, 2]])],
    "uniqueItems": [({"type": "array", "uniqueItems": False}, [[1, 1]], [3])],
    "properties": [
        (
            {"type": "object", "properties": {"a": {"type": "integer"}}},
            [{}, {"a": 1}, {"a": 1, "z": "b"}],
            [{"a": "x"}],
        ),
        ({"type": "object", "properties": {"a": False}}, [{}, {"b": 1}], [{"a": 1}]),
    ],
    "required": [
        (
            {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["b"]},
            [{"b": 1}, {"a": 1, "b": 2}],
            [{}, {"a": 1}],
        )
    ],
    "additionalProperties": [
        ({"type": "object", "properties": {"a": {}}, "additionalProperties": False}, [{}, {"a": 1}], [{"b": 1}]),
        ({"type": "object", "additionalProperties": {"type": "null"}}, [{"x": None}], [{"x": 1}]),
    ],
    "patternProperties": [
        ({"type": "object", "patternProperties": {"^n": {"type": "null"}}}, [{"n1": None}, {"m": 3}], [{"n1": 3}]),
        ({"type": "object", "patternProperties": {"^n": {}}, "additionalProperties": False}, [{"n": 1}], [{"m": 1}]),
    ],
    "minProperties": [({"type": "object", "minProperties": 1}, [{"a": 1}], [{}])],
    "maxProperties": [({"type": "object", "maxProperties": 1}, [{}, {"a": 1}], [{"a": 1, "b": 2}])],
    "anyOf": [({"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 1}]}, [1, "a"], ["ab", None])],
    "oneOf": [
        ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, [1, None], ["a"]),
        (
            {
                "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
                "discriminator": {"propertyName": "kind"},
                "$defs": {
                    "cat": {"type": "object", "properties": {"kind": {"const": "cat"}}, "required": ["kind"]},
                    "dog": {
                        "type": "object",
                        "properties": {"kind": {"enum": ["dog", "pup"]}, "age": {"type": "integer"}},
                        "required": ["kind", "age"],
                    },
                },
            },
            [{"kind": "cat"}, {"kind": "pup", "age": 1}],
            [{"kind": "dog"}, {"kind": "cow"}, {}],
        ),
    ],
    "allOf": [({"allOf": [{"type": "integer", "minimum": 2}, {"maximum": 4}]}, [2, 4], [1, 5])],
    "$ref": [
        ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "integer"}}}, [1], ["a"]),
        (
            {
                "type": "object",
                "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
                "required": ["next"],
                "additionalProperties": False,
            },
            [{"next": None}, {"next": {"next": None}}],
            [{}, {"next": 1}],
        ),
        ({"$ref": "#/definitions/a", "maximum": 5, "definitions": {"a": {"type": "integer"}}}, [5], [6, "a"]),
    ],
    "annotations": [
        (
            {
                "title": "t",
                "description": "d",
                "default": 1,
                "examples": [2],
                "$comment": "c",
                "deprecated": True,
                "readOnly": True,
                "type": "integer",
            },
            [3],
            ["a"],
        )
    ],
    "boolean schemas": [(True, [1, "a", None, [1], {"a": 1}], [])],
}


@pytest.mark.parametrize("keyword", CASES)
def test_a_keyword_is_enforced(compiler: GrammarCompiler, tokenizer: Tokenizer, keyword: str) -> None:
    for schema, allowed, forbidden in CASES[keyword]:
        check = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
        for value, wanted in [*((value, True) for value in allowed), *((value, False) for value in forbidden)]:
            if wanted or "format" not in str(schema):
                assert check.is_valid(value) is wanted, (schema, value)
            text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
            got = takes(compiler, tokenizer, text, json=schema, disable_any_whitespace=True)
            assert got is wanted, (schema, value)
            if wanted and "const" not in str(schema) and "enum" not in str(schema):
                spaced = json.dumps(value, ensure_ascii=False, indent=2)
                assert takes(compiler, tokenizer, spaced, json=schema), (schema, spaced)


def test_every_format_has_a_case() -> None:
    assert {schema["format"] for schema, _, _ in CASES["format"]} == set(FORMATS)


REFUSED: list[tuple[Any, str]] = [
    ({"not": {}}, "$.not"),
    ({"if": {}, "then": {}}, "$.if"),
    ({"type": "array", "contains": {}}, "$.contains"),
    ({"type": "array", "uniqueItems": True}, "$.uniqueItems"),
    ({"properties": {"a": {"propertyNames": {}}}}, "$.properties.a.propertyNames"),
    ({"items": {"dependentRequired": {}}}, "$.items.dependentRequired"),
    ({"anyOf": [{}, {"dependentSchemas": {}}]}, "$.anyOf[1].dependentSchemas"),
    ({"unevaluatedProperties": False}, "$.unevaluatedProperties"),
    ({"unevaluatedItems": False}, "$.unevaluatedItems"),
    ({"$dynamicRef": "#a"}, "$.$dynamicRef"),
    ({"$anchor": "a"}, "$.$anchor"),
    ({"$defs": {"a": {"$id": "http://example.org/a"}}}, "$.$defs.a.$id"),
    ({"$defs": {"x": {"additionalItems": False}}}, "$.$defs.x.additionalItems"),
    ({"items": [{"type": "integer"}]}, "$.items"),
    ({"nullable": True, "type": "string"}, "$.nullable"),
    ({"minimun": 3}, "$.minimun"),
    ({"x-guidance": {}}, "$.x-guidance"),
    ({"type": "string", "format": "color"}, "$.format"),
    ({"type": "any"}, "$.type"),
    ({"type": []}, "$.type"),
    ({"enum": []}, "$.enum"),
    ({"anyOf": []}, "$.anyOf"),
    ({"properties": []}, "$.properties"),
    ({"properties": {"a": 3}}, "$.properties.a"),
    ({"minimum": "3"}, "$.minimum"),
    ({"exclusiveMinimum": True, "minimum": 3}, "$.exclusiveMinimum"),
    ({"minLength": -1}, "$.minLength"),
    ({"required": "a"}, "$.required"),
    ({"multipleOf": 0}, "$.multipleOf"),
    ({"type": "integer", "multipleOf": 99_991}, "$.multipleOf"),
    ({"$ref": "http://example.org/x"}, "$.$ref"),
    ({"$ref": "#/$defs/none"}, "$.$ref"),
    ({"type": "object", "minProperties": 2}, "$.minProperties"),
    ({"type": "object", "properties": {"a": {}}, "maxProperties": 1}, "$.maxProperties"),
    ({"prefixItems": [{"allOf": [{"pattern": "(" * 200 + ")" * 200}]}]}, "$.prefixItems[0].allOf[0].pattern"),
]


@pytest.mark.parametrize(("schema", "path"), REFUSED, ids=[path for _, path in REFUSED])
def test_what_is_not_enforced_is_refused_with_its_path(compiler: GrammarCompiler, schema: Any, path: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        compiler.compile(StructuredOutputs(json=schema))
    assert caught.value.field == f"structured.json: {path}"
    assert path in str(caught.value)


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"type": "integer", "minimum": 3, "maximum": 2},
        {"type": "string", "const": 1},
        {"type": "object", "required": ["a"], "additionalProperties": False},
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"oneOf": [{"type": "object", "properties": {"a": {"const": "x"}}}] * 2},
        {"oneOf": [{"$ref": "#"}, {"$ref": "#/oneOf/1"}]},
        {"oneOf": [{"$ref": "#/oneOf/1"}, {"$ref": "#/oneOf/0"}]},
        {"type": "string", "pattern": "(?=a)"},
        {"$ref": "#"},
        {"allOf": [{"$ref": "#"}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    ],
)
def test_what_nothing_satisfies_or_can_not_be_built_is_refused(compiler: GrammarCompiler, schema: Any) -> None:
    with pytest.raises(InvalidParameterError, match=r"structured\.json"):
        compiler.compile(StructuredOutputs(json=schema))


def test_whitespace_is_bounded(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    schema = {"type": "array"}
    assert takes(compiler, tokenizer, "[" + " " * 32 + "1]", json=schema)
    assert takes(compiler, tokenizer, "[\n" + " " * 31 + "1\n]", json=schema)
    assert not takes(compiler, tokenizer, "[" + " " * 33 + "1]", json=schema)
    assert not takes(compiler, tokenizer, "[1" + "\n" * 33 + "]", json=schema)
    assert not takes(compiler, tokenizer, "[ 1]", json=schema, disable_any_whitespace=True)
    for text in (" [1]", "[1] "):
        assert not takes(compiler, tokenizer, text, json=schema)


def test_a_property_comes_once(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert takes(compiler, tokenizer, '{"a":1}', json=schema)
    assert not takes(compiler, tokenizer, '{"a":1,"a":2}', json=schema)


def test_a_text_is_a_schema_too(compiler: GrammarCompiler, tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert takes(compiler, tokenizer, "3", json='{"type": "integer"}')
    assert takes(compiler, tokenizer, '{"a": 1}', json_object=True)
    assert not takes(compiler, tokenizer, "[1]", json_object=True)


GARBAGE: list[Any] = [
    *(None, True, False, 0, 1, 2, -1, 1.5, 1e300, 10**400, "", "x", "#", "#/", "#/default", "#/examples/0", "#/²"),
    *("#/const", "#/enum/0"),
    *("#/properties/a", "#/anyOf/0", "#/" + "9" * 5000, "[", "object", [], [1], [[1]], [None], ["a"]),
    *([{}], [{"a": 5}], {}, {"a": 5}, {"a": {}}, {"a": [1]}, {"": None}, {"properties": 5}, {"minLength": "x"}),
    *({"oneOf": 5}, {"enum": 5}, {"$ref": 5}, {"$ref": "#"}, {"$ref": "#/default"}, {"const": {"$ref": []}}),
    {"required": [[1]]},
    {"type": "object", "properties": {"a": {"enum": [[1], {}]}}, "required": ["a", []]},
    [{"type": "object", "properties": {"a": {"enum": 5}}, "required": ["a"]}] * 2,
    [{"type": "object", "properties": {"a": {"const": "x"}}, "required": ["a", {}]}] * 2,
    [{"$ref": "#/default"}, {"$ref": "#/examples/0"}],
]  # fmt: skip
KEYWORDS = sorted({*_VALUES, *_ANNOTATIONS, *_ONE, *_LISTED, *_NAMED, "x-guidance", "not"})


def test_garbage_at_any_keyword_is_refused_or_taken_and_nothing_else() -> None:
    rng = random.Random(7)
    schemas = [{keyword: value} for keyword in KEYWORDS for value in GARBAGE]
    schemas += [{one: rng.choice(GARBAGE), **schema} for schema in schemas for one in rng.sample(KEYWORDS, 5)]
    for _ in range(3000):
        schema = {keyword: rng.choice(GARBAGE) for keyword in rng.sample(KEYWORDS, rng.randint(1, 6))}
        schemas += [schema, {"properties": {"a": schema}, "default": rng.choice(GARBAGE), "$ref": "#/default"}]
    taken = 0
    for schema in schemas:
        try:
            checked_schema(json.dumps(schema))
            taken += 1
        except InvalidParameterError:
            pass
        except ValueError as error:  # json's, of a number with too many digits
            raise AssertionError(schema) from error
    assert len(schemas) // 20 < taken < len(schemas)


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"minProperties": 1, "properties": 5}, "$.properties"),
        ({"minProperties": 1, "required": [[1]]}, "$.required"),
        ({"$ref": "#/default", "default": {"properties": 5}}, "$.default.properties"),
        ({"$ref": "#/examples/0", "examples": [{"minLength": "x"}]}, "$.examples[0].minLength"),
        ({"$ref": "#/default", "default": {"not": {}, "type": "string"}}, "$.default.not"),
        ({"items": {"$ref": "#/examples/0/a~1b"}, "examples": [{"a/b": {"if": True}}]}, "$.examples[0].a/b.if"),
        ({"$ref": "#/default", "default": {"$ref": "#/examples/0"}, "examples": [{"not": {}}]}, "$.examples[0].not"),
        ({"$ref": "#/default", "default": {"items": {"pattern": "(" * 200}}}, "$.default.items.pattern"),
        ({"$ref": "#/enum/0", "enum": [{"type": "null"}]}, "$.$ref"),
        ({"$ref": "#/properties/a/const", "properties": {"a": {"const": {}}}}, "$.$ref"),
    ],
)
def test_what_a_reference_names_is_checked_like_any_schema(schema: Any, path: str) -> None:
    with pytest.raises(InvalidParameterError) as refused:
        checked_schema(json.dumps(schema))
    assert refused.value.field == f"structured.json: {path}"


def test_what_fails_in_the_compiler_is_the_requests_error(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(_: str) -> Any:
        raise KeyError("unforeseen")

    monkeypatch.setattr("octavo.grammar.compiler.checked_schema", fails)
    with pytest.raises(InvalidParameterError, match=r"structured\.json"):
        compiler.compile(StructuredOutputs(json={"title": "unforeseen"}))
    assert "unforeseen" in caplog.text
