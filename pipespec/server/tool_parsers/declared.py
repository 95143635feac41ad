"""What the text of an argument means, by the JSON schema that its function declares."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urljoin

KINDS = (
    (type(None), "null"),
    (bool, "boolean"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
)
# Names of types in schemas that were made of Python's annotations.
_PYTHON = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "dict": "object",
}
_PYTHON |= {"list": "array", "tuple": "array"}
MAX_VALUE = 2**16  # characters of a value in Python; a longer one is text
MAX_SCHEMAS = 1000  # that are looked at for one value; others allow it


class Declared:
    """The parameters of a function. What cannot be read of them, a reference that leads nowhere for
    example, allows any value."""

    def __init__(self, parameters: Mapping[str, Any]):
        self._root = parameters
        self._named: dict[str, Any] = {}  # by URI, and anchors behind "#"
        self._bases: dict[int, str] = {}  # the URI of what a schema is a part of
        left: list[tuple[Any, str]] = [(parameters, "")]
        while left:
            part, base = left.pop()
            if isinstance(part, dict):
                own = part.get("$id")
                base = _joined(base, own.rstrip("#")) if isinstance(own, str) else base
                names = [base] if base not in self._named else []
                names += [f"{base}#{part['$anchor']}"] if "$anchor" in part else []
                self._named |= dict.fromkeys(names, part)
                self._bases[id(part)] = base
            children = part.values() if isinstance(part, dict) else part
            left += [(each, base) for each in children if isinstance(each, (dict, list))][::-1]

    def as_json(self, name: str, text: str) -> str:
        """The JSON of an argument: of what its text may mean the first that is declared, in value
        or at least in type. Without a declaration it is what the text is as JSON, else a string."""

        def fits(value: Any, *, exact: bool) -> bool:
            try:
                return self._allows(self._root, {name: value}, exact, {})
            except RecursionError:
                return True

        string = json.dumps(text, ensure_ascii=False)
        found = text if is_json(text) else None
        if not fits(..., exact=True):  # which is no JSON, so it fits what fits all
            quoted = found is not None and found.lstrip().startswith('"')
            meanings = [None if quoted else found, _word(text), string, found, python_as_json(text)]
            known = [(each, json.loads(each)) for each in meanings if each is not None]
            for exact in (True, False):
                for each, value in known:
                    if fits(value, exact=exact):
                        return each
        return found or string

    def _allows(
        self, schema: Any, value: Any, exact: bool, known: dict[tuple[int, int], bool]
    ) -> bool:
        """Whether a schema allows a value as far as types go, and if `exact` the values that are
        listed; `known`: what was found of schemas and values."""
        if not isinstance(schema, dict):
            return schema is not False
        both = id(schema), id(value)
        if both in known or len(known) >= MAX_SCHEMAS:
            return known.get(both, True)
        known[both] = True  # where it refers to itself

        def allows(other: Any) -> bool:
            return self._allows(other, value, exact, known)

        kinds = _listed(schema, "type") or [schema["type"]] if "type" in schema else []
        kinds += ["null"] if kinds and schema.get("nullable") is True else []
        listed = [*_listed(schema, "enum"), *([schema["const"]] if "const" in schema else [])]
        found = not kinds or not _kinds_of(value).isdisjoint(
            _PYTHON.get(str(each), str(each)) for each in kinds
        )
        if listed and found:
            found = any(
                not _kinds_of(each).isdisjoint(_kinds_of(value)) and (not exact or each == value)
                for each in listed
            )
        found = (
            found and allows(self._referred(schema)) and all(map(allows, _listed(schema, "allOf")))
        )
        for key in ("anyOf", "oneOf"):
            found = found and (not _listed(schema, key) or any(map(allows, _listed(schema, key))))
        properties, others = schema.get("properties"), schema.get("additionalProperties", True)
        for name, member in value.items() if isinstance(value, dict) else ():
            own = properties.get(name, others) if isinstance(properties, dict) else others
            found = found and self._allows(own, member, exact, known)
        known[both] = found
        return found

    def _referred(self, schema: Mapping[str, Any]) -> Any:
        """The schema to which one refers; True if to none."""
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return True
        target, _, fragment = reference.partition("#")
        base = self._bases[id(schema)]
        uri = _joined(base, target) if target else base
        if fragment and not fragment.startswith("/"):
            return self._named.get(f"{uri}#{fragment}", True)
        found = self._named.get(uri, True)
        for step in unquote(fragment).split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict):
                found = found.get(name, True)
            elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            else:
                return True
        return found


def _joined(base: str, reference: str) -> str:
    try:
        return urljoin(base, reference)
    except ValueError:  # it is no URI
        return reference


def _listed(schema: Mapping[str, Any], key: str) -> list[Any]:
    found = schema.get(key)
    return [*found] if isinstance(found, list) else []


def _kinds_of(value: Any) -> set[str]:
    if type(value) in (int, float):
        return {"number", "integer"} if value == value // 1 else {"number"}
    return {kind for type_, kind in KINDS if type(value) is type_}


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
