"""Random JSON schemas out of every keyword that can be enforced; most of their values are short."""

from __future__ import annotations

import random
from typing import Any

LETTERS = "abcdxyz"
PATTERNS = ("^[a-c]{1,3}$", "b", "^x", "[0-9]{2}$", "^(ab|cd)?$", r"^\d+-\w$", "^[^a]{2}$")
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")


class SchemaMaker:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.defs: dict[str, Any] = {}

    def schema(self) -> dict[str, Any]:
        schema = self.value(0)
        return {**schema, "$defs": self.defs} if self.defs else schema

    def value(self, depth: int) -> dict[str, Any]:
        kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "type list"]
        if depth < 3:
            kinds += ["object"] * 4 + ["array"] * 3 + ["anyOf", "oneOf", "allOf", "ref", "tuple"]
        kind = self.rng.choice(kinds)
        made: dict[str, Any] = getattr(self, "_" + kind.replace(" ", "_").lower(), lambda _: {"type": kind})(depth)
        if self.rng.random() < 0.1:
            made["description"] = "says nothing about a value"
        return made

    def name(self) -> str:
        return "".join(self.rng.choices(LETTERS, k=self.rng.randint(1, 3)))

    def _string(self, _: int) -> dict[str, Any]:
        match self.rng.randint(0, 4):
            case 0:
                return {"type": "string", "pattern": self.rng.choice(PATTERNS), "maxLength": 8}
            case 1:
                return {"type": "string", "format": self.rng.choice(FORMATS)}
            case _:
                low = self.rng.randint(0, 3)
                return {"type": "string", "minLength": low, "maxLength": low + self.rng.randint(0, 4)}

    def _integer(self, _: int) -> dict[str, Any]:
        low = self.rng.randint(-200, 200)
        made: dict[str, Any] = {"type": "integer", "minimum": low, "maximum": low + self.rng.randint(6, 300)}
        if self.rng.random() < 0.3:
            made["multipleOf"] = self.rng.choice((2, 3, 5))
        if self.rng.random() < 0.3:
            made["exclusiveMinimum"] = made.pop("minimum")
        return made

    def _number(self, _: int) -> dict[str, Any]:
        low = round(self.rng.uniform(-50, 50), 2)
        made = {"type": "number", "minimum": low, "maximum": round(low + self.rng.uniform(1, 90), 1)}
        if self.rng.random() < 0.3:
            made["exclusiveMaximum"] = made.pop("maximum")
        return made

    def _enum(self, _: int) -> dict[str, Any]:
        return {"enum": self.rng.sample(["red", "né", 1, 2.5, None, True, [1, "a"], {"k": 0}, 'a"b\\c\n'], 3)}

    def _const(self, _: int) -> dict[str, Any]:
        return {"const": self.rng.choice(["fixed", 7, -1.5, None, False, [], {"a": [1]}])}

    def _type_list(self, _: int) -> dict[str, Any]:
        return {"type": ["boolean", "null"]}

    def _object(self, depth: int) -> dict[str, Any]:
        names = list(dict.fromkeys(self.name() for _ in range(self.rng.randint(1, 4))))
        made: dict[str, Any] = {"type": "object", "properties": {name: self.value(depth + 1) for name in names}}
        made["required"] = [name for name in names if self.rng.random() < 0.6]
        match self.rng.randint(0, 5):
            case 0:
                made["additionalProperties"] = self.value(3)
                made["required"] = names  # what maxProperties asks for
                made["maxProperties"] = len(names) + 1
            case 1:
                made["patternProperties"] = {"^q": self.value(3)}
                made["additionalProperties"] = False
                made["required"] = names
                made["maxProperties"] = len(names) + 1
            case _:
                made["additionalProperties"] = False
                if made["required"] == names:
                    made["minProperties"] = len(names)
        return made

    def _array(self, depth: int) -> dict[str, Any]:
        low = self.rng.randint(0, 2)
        return {"type": "array", "items": self.value(depth + 1), "minItems": low, "maxItems": low + 1}

    def _tuple(self, depth: int) -> dict[str, Any]:
        items = [self.value(depth + 1) for _ in range(self.rng.randint(1, 3))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": self.rng.randint(0, len(items))}

    def _anyof(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self.value(depth + 1) for _ in range(2)]}

    def _oneof(self, depth: int) -> dict[str, Any]:
        return {"oneOf": [self._string(depth), self.rng.choice((self._integer, self._number, self._object))(depth + 1)]}

    def _allof(self, depth: int) -> dict[str, Any]:
        first = self.value(3)
        names = ["p", "q"]
        return self.rng.choice(
            (
                {"allOf": [self._integer(depth), {"minimum": -1000}]},
                {"allOf": [{"type": "string", "maxLength": 4}, {"pattern": "^[ab]*$"}]},
                {
                    "type": "object",
                    "allOf": [{"properties": {"p": first}}, {"properties": {"q": self.value(3)}, "required": names}],
                },
            )
        )

    def _ref(self, depth: int) -> dict[str, Any]:
        name = f"d{len(self.defs)}"
        self.defs[name] = {}
        self.defs[name] = self.value(depth + 1)
        return {"$ref": f"#/$defs/{name}"}
