"""What the text of an argument means, by the JSON schema that its function declares."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

KINDS = (
    (type(None), "null"),
    (bool, "boolean"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
)
# Names that schemas have for types, in small letters: those of Python, and of databases.
_OTHER_NAMES = {
    **dict.fromkeys(("str", "text", "char", "varchar"), "string"),
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "dict": "object",
    **dict.fromkeys(("list", "tuple"), "array"),
}
MAX_VALUE = 2**16  # characters of a value in Python; a longer one is text
MAX_SCHEMAS = 1000  # that are looked at for one value
MAX_DIGITS = 9  # of a place in a list
COMBINING = ("allOf", "anyOf", "oneOf")  # keywords with lists of schemas


class Declared:
    """The parameters of a function. What cannot be read of them, a reference that leads nowhere for
    example, says nothing of a value."""

    def __init__(self, parameters: Mapping[str, Any]):
        self._parameters = parameters

    def as_json(self, name: str, text: str) -> str:
        """The JSON of an argument: of what its text may mean the first that is declared, in value
        or at least in type. Without a declaration it is what the text is as JSON, else a string."""
        string = json.dumps(text, ensure_ascii=False)
        found = text if is_json(text) else None
        kinds, listed = self._declaration(name)
        if kinds or listed:
            quoted = found is not None and found.lstrip().startswith('"')
            meanings = [None if quoted else found, _word(text), string, found, python_as_json(text)]
            known = [(each, json.loads(each)) for each in meanings if each is not None]
            for each, value in known:
                if kinds & _kinds_of(value) or any(_same(value, other) for other in listed):
                    return each
            for each, value in known:
                if any(_kinds_of(value) & _kinds_of(other) for other in listed):
                    return each
        return found or string

    def _declaration(self, name: str) -> tuple[set[str], list[Any]]:
        """The types that an argument may have, and the values that it may be; neither: any."""
        kinds: set[str] = set()
        listed: list[Any] = []
        for holder in self._parts(self._parameters):
            properties, others = holder.get("properties"), holder.get("additionalProperties")
            own = properties.get(name, others) if isinstance(properties, dict) else others
            for part in self._parts(own):
                values = [*_listed(part, "enum"), *([part["const"]] if "const" in part else [])]
                listed += values
                if "type" in part and not values:
                    types = _listed(part, "type") or [part["type"]]
                    types += ["null"] if part.get("nullable") is True else []
                    names = [str(each).lower() for each in types]
                    kinds |= {_OTHER_NAMES.get(name, name) for name in names}
        return kinds, listed

    def _parts(self, schema: Any) -> Iterator[Mapping[str, Any]]:
        """A schema, and those that it consists of or refers to."""
        left, seen = [schema], set[int]()
        while left and len(seen) < MAX_SCHEMAS:
            part = left.pop()
            if isinstance(part, Mapping) and id(part) not in seen:
                seen.add(id(part))
                yield part
                left.append(self._referred(part.get("$ref")))
                left += [each for key in COMBINING for each in _listed(part, key)]

    def _referred(self, reference: Any) -> Any:
        """The part of the parameters to which a reference points; None: to none."""
        own = str(self._parameters.get("$id", "")).removesuffix("#")
        if not isinstance(reference, str) or reference.partition("#")[0] not in ("", own):
            return None
        found: Any = self._parameters
        for step in unquote(reference.partition("#")[2]).split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list):
                at = int(name) if name.isdecimal() and len(name) < MAX_DIGITS else len(found)
                found = found[at] if at < len(found) else None
            else:
                found = found.get(name) if isinstance(found, Mapping) else None
        return found


def _listed(schema: Mapping[str, Any], key: str) -> list[Any]:
    found = schema.get(key)
    return [*found] if isinstance(found, list) else []


def _kinds_of(value: Any) -> set[str]:
    if type(value) in (int, float):
        return {"number", "integer"} if value == value // 1 else {"number"}
    return {kind for type_, kind in KINDS if type(value) is type_}


def _same(value: Any, other: Any) -> bool:
    """Whether two values are equal in JSON, where true is no number."""
    return value == other and bool(_kinds_of(value) & _kinds_of(other))


def _word(text: str) -> str | None:
    """True, False and None as Python writes them, and some models."""
    word = text.strip()
    if word.lower() in ("true", "false"):
        return word.lower()
    return "null" if word == "None" else None


def is_json(text: str) -> bool:
    def refuse(constant: str) -> None:
        raise ValueError(constant)  # NaN and infinities are no JSON

    try:
        json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return False
    return True


def python_as_json(text: str) -> str | None:
    """The JSON of a value that Python writes so; None: it is none."""
    if len(text) > MAX_VALUE:
        return None
    try:
        # Escapes of Python can name half characters, which JSON writes as escapes.
        return json.dumps(ast.literal_eval(text.strip()), allow_nan=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None
