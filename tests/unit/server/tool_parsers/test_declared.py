"""Arguments that are tagged texts, converted as their function declares them."""

import json
from typing import Any

import pytest

from pipespec.server.tool_parsers.declared import MAX_SCHEMAS, Declared
from pipespec.server.tool_parsers.families import FAMILIES
from pipespec.server.tool_parsers.tool_parser import merged

TEXT, NULL = {"type": "string"}, {"type": "null"}
NUMBERS = {"type": ["integer", "boolean"]}
# How each family writes a call with an argument.
WRITTEN = {
    "qwen3_coder": "<tool_call><function=f><parameter=a>VALUE</parameter></function></tool_call>",
    "seed_oss": "<seed:tool_call><function=f><parameter=a>VALUE</parameter></function>",
    "minimax_m2": '<invoke name="f"><parameter name="a">VALUE</parameter></invoke>',
    "glm45": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>VALUE</arg_value></tool_call>",
}
# What is declared of an argument, and what its texts mean.
CASES: list[tuple[Any, dict[str, Any]]] = [
    (TEXT, {"12345": "12345", "true": "true", "null": "null", '"a"': '"a"', "[1]": "[1]"}),
    ({"anyOf": [TEXT, NULL]}, {"12345": "12345", "null": None, "None": None, "True": "True"}),
    ({"oneOf": [NULL, TEXT]}, {"12345": "12345", "null": None}),
    ({"type": ["string", "null"]}, {"12345": "12345", "a": "a", "null": None, "1e3": "1e3"}),
    (TEXT | {"nullable": True}, {"12345": "12345", "null": None}),
    ({"allOf": [{"minLength": 1}, TEXT]}, {"12345": "12345"}),
    ({"$ref": "#/$defs/size"}, {"1": "1", "2": "2"}),
    ({"$ref": "#/$defs/again"}, {"1": "1"}),
    ({"$ref": "#/properties/b/items"}, {"1": "1"}),
    ({"anyOf": [{"$ref": "#/$defs/size"}, NULL]}, {"1": "1", "null": None}),
    ({"$ref": "#/properties/c/anyOf/1"}, {"1": "1"}),
    ({"$ref": "https://example.org/f#/$defs/size"}, {"1": "1"}),
    *(({"$ref": f"#/properties/c/anyOf/{at}"}, {"1": 1}) for at in ("2", "-1", "9" * 5000, "x")),
    ({"$ref": "#/$defs/none"}, {"1": 1, "a": "a"}),
    ({"$ref": "#/$defs/loop"}, {"1": 1, "a": "a"}),
    ({"$ref": "https://example.org/size"}, {"1": 1}),
    ({"enum": ["1", "2"]}, {"1": "1", "3": "3"}),
    ({"enum": ["1", 2, True]}, {"1": "1", "2": 2, "True": True}),
    ({"enum": ["a", None]}, {"a": "a", '"a"': "a", "None": None}),
    ({"const": "1"}, {"1": "1"}),
    ({"const": 1}, {"1": 1}),
    ({"type": "boolean"}, {"true": True, "True": True, " False\n": False, "yes": "yes"}),
    ({"type": "integer"}, {"5": 5, "5.0": 5.0, "a": "a", "+5": 5}),
    *(({"type": name}, {"5": "5"}) for name in ("str", "STRING", "String", "text", "varchar")),
    ({"type": "INTEGER"}, {"5": 5, "a": "a"}),
    ({"type": "dict"}, {"{'a': 1}": {"a": 1}}),
    ({"type": "number"}, {"5": 5, "-2.5e3": -2500.0, "NaN": "NaN"}),
    (NUMBERS, {"5": 5, "True": True, "None": "None"}),
    ({"type": ["string", "integer"]}, {"5": 5, "5.5": "5.5", "a": "a"}),
    ({"type": ["string", "boolean"]}, {"True": True, "5": "5"}),
    ({"type": "array"}, {"[1, 2]": [1, 2], "['a', None]": ["a", None], "a, b": "a, b"}),
    ({"type": "object"}, {'{"a": 1}': {"a": 1}, "{'a': True}": {"a": True}}),
    ({}, {"5": 5, "True": "True", "['a']": "['a']", '"a"': "a", "null": None}),
    (True, {"5": 5, "True": "True"}),
    ({"description": "Anything."}, {"5": 5, "a": "a"}),
]
DEFINED: dict[str, Any] = {
    "$id": "https://example.org/f",
    "$defs": {
        "size": {"enum": ["1", "2"]},
        "again": {"$ref": "#/$defs/size"},
        "loop": {"anyOf": [{"$ref": "#/$defs/loop"}]},
    },
}


@pytest.mark.parametrize("family", WRITTEN)
@pytest.mark.parametrize(("schema", "means"), CASES, ids=str)
def test_argument_has_the_declared_type(family: str, schema: Any, means: dict[str, Any]) -> None:
    others = {"b": {"items": TEXT}, "c": {"anyOf": [NULL, TEXT]}}
    parameters = DEFINED | {"properties": {"a": schema} | others}
    for text, value in means.items():
        parser = FAMILIES[family]({"f": Declared(parameters)})
        pieces = parser.push(WRITTEN[family].replace("VALUE", text)) + parser.finish()
        name, arguments = merged(pieces)[:2]
        found = json.loads(arguments.text)
        assert (name.name, found, type(found["a"])) == ("f", {"a": value}, type(value)), text


@pytest.mark.parametrize(
    "parameters",
    [
        {"$ref": "#/$defs/all", "$defs": {"all": {"properties": {"a": TEXT}}}},
        {"allOf": [{"properties": {"b": {}}}, {"properties": {"a": TEXT}}]},
        {"anyOf": [{"properties": {"a": TEXT}}, {"properties": {"a": TEXT, "b": {}}}]},
        {"properties": {"b": {}}, "additionalProperties": TEXT},
    ],
)
def test_declaration_is_found_wherever_it_is(parameters: dict[str, Any]) -> None:
    assert Declared(parameters).as_json("a", "1") == '"1"'
    assert Declared({"properties": []}).as_json("a", "1") == "1"


def test_hostile_declarations_end() -> None:
    deep: Any = TEXT
    for _ in range(500):
        deep = {"allOf": [deep]}
    assert Declared({"properties": {"a": deep}}).as_json("a", "5") in ('"5"', "5")
    twice = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)}
    parameters = {"$defs": twice | {"d60": TEXT}, "properties": {"a": {"$ref": "#/$defs/d0"}}}
    assert Declared(parameters).as_json("a", "5") == '"5"'
    many = {"anyOf": [{"const": i} for i in range(100 * MAX_SCHEMAS)]}
    assert Declared({"properties": {"a": many}}).as_json("a", "x") == '"x"'
