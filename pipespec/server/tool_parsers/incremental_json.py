"""JSON, parsed one character at a time: each parser is a generator to which characters are sent.

It returns its value once that is complete, and raises NotAToolCall at the first character that does
not match.
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


class NotAToolCall(Exception):
    """The text that was sent is no call."""


def next_nonblank() -> Characters[str]:
    """The next character other than whitespace."""
    while (character := (yield)) in BLANKS:
        pass
    return character


def expect(characters: str) -> Characters[None]:
    for expected in characters:
        if (yield) != expected:
            raise NotAToolCall


def expect_next(characters: str) -> Characters[None]:
    """Exactly these characters, after whitespace."""
    if (yield from next_nonblank()) != characters[0]:
        raise NotAToolCall
    yield from expect(characters[1:])


def word(first: str, letters: str) -> Characters[tuple[str, str]]:
    """A word of these letters that begins with `first`, and the character that follows it,
    whitespace aside."""
    read, after = "", first
    while after in letters:
        read += after
        after = yield
    return read, (yield from next_nonblank()) if after in BLANKS else after


def until(end: str) -> Characters[str]:
    """All characters before a text, which follows them."""
    read: list[str] = []
    tail = ""
    while tail != end:
        character = yield
        read.append(character)
        tail = (tail + character)[-len(end) :]
    return "".join(read)[: -len(end)]


def string() -> Characters[str]:
    """The value of a JSON string, after its first quote."""
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
        raise NotAToolCall from None
    return text


def container(opening: str, keep: Callable[[str], None]) -> Characters[None]:
    """A JSON object or list, after its first bracket. Each character goes to `keep`. Only brackets
    and strings are checked; the client parses the JSON."""
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
            raise NotAToolCall
        keep(character)


def value(first: str) -> Characters[str]:
    """Any JSON value that begins with `first`; the character that follows it, whitespace aside."""
    if first in SCALAR:
        return (yield from word(first, SCALAR))[1]
    if first in CLOSING:
        yield from container(first, lambda _: None)
    elif first == '"':
        yield from string()
    else:
        raise NotAToolCall
    return (yield from next_nonblank())
