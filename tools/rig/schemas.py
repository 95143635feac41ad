"""Twenty JSON schemas: nested, enums, arrays, patterns, numbers, unions, references."""

from __future__ import annotations

from typing import Any

WORD = {"type": "string", "maxLength": 12}
SMALL = {"type": "integer", "minimum": 0, "maximum": 999}


def _object(required: bool = True, **properties: Any) -> dict[str, Any]:
    names = [*properties] if required else []
    return {
        "type": "object",
        "properties": properties,
        "required": names,
        "additionalProperties": False,
    }


SCHEMAS: dict[str, dict[str, Any]] = {
    "object": _object(name=WORD, age={"type": "integer", "minimum": 0, "maximum": 120}),
    "optional": _object(required=False, name=WORD, likes=WORD),
    "nested": _object(
        person=_object(name=WORD, home=_object(street=WORD, number=SMALL)),
        friend={"anyOf": [WORD, {"type": "null"}]},
    ),
    "enum": {"enum": ["red", "green", 3, None, True]},
    "const": _object(kind={"const": "cat"}, name=WORD),
    "array": {"type": "array", "items": WORD, "minItems": 1, "maxItems": 3},
    "of objects": {
        "type": "array",
        "items": _object(x={"type": "boolean"}, y={"enum": ["a", "b"]}),
        "minItems": 2,
        "maxItems": 3,
    },
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "boolean"}, WORD],
        "items": False,
        "minItems": 2,
    },
    "pattern": {"type": "string", "pattern": "^[a-z]{2,5}-[0-9]{2}$"},
    "date": _object(day={"type": "string", "format": "date"}),
    "uuid": {"type": "string", "format": "uuid"},
    "whole number": {"type": "integer", "minimum": -5, "maximum": 99},
    "number": _object(x={"type": "number", "minimum": 0, "maximum": 10, "multipleOf": 0.25}),
    "multiple": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 500},
    "length": {"type": "string", "minLength": 3, "maxLength": 9},
    "union": {
        "anyOf": [
            _object(circle={"type": "integer", "minimum": 0, "maximum": 9}),
            _object(name=WORD, sides={"type": "integer", "minimum": 3, "maximum": 8}),
        ]
    },
    "types": _object(value={"type": ["integer", "boolean", "null"], "minimum": -9, "maximum": 9}),
    "all of": {
        "allOf": [
            {"type": "object", "properties": {"a": WORD}, "required": ["a"]},
            {"properties": {"b": {"type": "boolean"}}, "required": ["b"]},
        ],
        "properties": {"a": {}, "b": {}},
        "additionalProperties": False,
    },
    "reference": {
        "$defs": {"point": _object(x={"enum": [0, 1]}, y={"enum": [0, 1]})},
        **_object(**{"from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}}),
    },
    "recursive": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "name": {"enum": ["a", "b"]},
                    "below": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1},
                },
                "required": ["name"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
}
