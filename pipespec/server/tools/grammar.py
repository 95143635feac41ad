"""The parts that calls are made of, each a generator that is sent one character at a time.

It returns what it has read once that is certain, and raises Unlike at the first character that
does not fit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from string import ascii_letters, digits
from typing import TypeVar

T = TypeVar("T")
Characters = Generator[None, str, T]
BLANKS = " \t\r\n"
CLOSING = {"{": "}", "[": "]"}
SCALAR = ascii_letters + digits + "+-."  # of numbers, true, false and null


class Unlike(Exception):
    """What was read is no call."""


def solid() -> Characters[str]:
    """The next character that is no whitespace."""
    while (character := (yield)) in BLANKS:
        pass
    return character


def expect(characters: str) -> Characters[None]:
    """These characters, as they stand here."""
    for expected in characters:
        if (yield) != expected:
            raise Unlike


def string() -> Characters[str]:
    """What a JSON string says whose first quote was read."""
    raw, escaped = ['"'], False
    while True:
        character = yield
        raw.append(character)
        if character == '"' and not escaped:
            break
        escaped = character == "\\" and not escaped
    try:
        text: str = json.loads("".join(raw), strict=False)
    except ValueError:
        raise Unlike from None
    return text


def container(opening: str, keep: Callable[[str], None]) -> Characters[None]:
    """A JSON object or list whose first bracket was read. Each character goes to `keep`.

    Brackets and strings alone are looked at: whoever gets the text parses it.
    """
    keep(opening)
    awaited, quoted, escaped = [CLOSING[opening]], False, False
    while awaited:
        character = yield
        if quoted:
            quoted = escaped or character != '"'
            escaped = character == "\\" and not escaped
        elif character == '"':
            quoted = True
        elif character in CLOSING:
            awaited.append(CLOSING[character])
        elif character in CLOSING.values() and character != awaited.pop():
            raise Unlike
        keep(character)


def value(first: str) -> Characters[str]:
    """Any JSON value that begins so; what follows it, other than whitespace."""
    if first in CLOSING:
        yield from container(first, _drop)
    elif first == '"':
        yield from string()
    elif first in SCALAR:
        while (character := (yield)) in SCALAR:
            pass
        return (yield from solid()) if character in BLANKS else character
    else:
        raise Unlike
    return (yield from solid())


def _drop(_: str) -> None:
    pass
