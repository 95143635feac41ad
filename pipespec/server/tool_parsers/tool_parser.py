"""What the parsers of all model families share: text up to a marker, then what may be a call,
parsed one character at a time.

`Characters` are generators to which characters are sent. Each returns its value once that is
complete, and raises NotAToolCall at the first character that does not match.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from string import ascii_letters, digits
from typing import ClassVar, TypeVar

from pipespec.system.validation import is_whole

T = TypeVar("T")
Characters = Generator[None, str, T]
BLANKS = " \t\r\n"
CLOSING = {"{": "}", "[": "]"}
SCALAR = ascii_letters + digits + "+-."  # of numbers, true, false and null
# The names of a call's arguments that models use.
ARGUMENTS = ("arguments", "parameters")


class NotAToolCall(Exception):
    """The text that was sent is no call."""


# --- JSON ---------------------------------------------------------------------------------------


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


# --- calls --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CallDelta:
    """What is new in the call `index` of a message: first its `name`, then text of its
    arguments."""

    index: int
    name: str | None = None
    arguments: str = ""


# Text of the message, or what is new in a call.
ParsedDelta = str | CallDelta


class ToolParser:
    """Parses one answer, character by character, and never takes back what it has returned.

    Text that begins like a call is held back until its name and the beginning of its arguments are
    known, and is returned as text if it turns out to be none. Arguments are returned as they
    arrive, in the model's own spelling. Each character is looked at once or twice.
    """

    # Texts that begin a call, none of which begins another.
    markers: ClassVar[tuple[str, ...]] = ()
    # Texts that are dropped where they follow a call.
    closers: ClassVar[tuple[str, ...]] = ()
    # Texts of the format that are special tokens in some vocabularies; by default those above.
    special: ClassVar[tuple[str, ...]] = ()

    # Makes an id of the call of this name and number that the model's template accepts when the
    # client sends it back.
    new_id: ClassVar[staticmethod[[str, int], str]] = staticmethod(
        lambda name, number: f"call_{secrets.token_hex(12)}"
    )

    def __init_subclass__(cls) -> None:
        if "special" not in vars(cls):
            cls.special = (*cls.markers, *cls.closers)

    def __init__(self, strings: Mapping[str, frozenset[str]] | None = None) -> None:
        """`strings`: the parameters that are texts, by function, for families that do not write
        JSON."""
        self.strings = strings or {}
        self._deltas: list[ParsedDelta] = []
        self._num_calls = 0
        self.name = ""  # of the last call
        self._num_arguments = 0  # of it, where they are returned one by one
        self._prefix = ""  # perhaps the beginning of a marker or a closer
        self._blank = ""  # whitespace that is returned if text follows
        self._after_call = False  # whether only whitespace has come since the last call
        self._call: Characters[None] | None = None  # parses what may be a call
        self._pending: list[str] = []  # what it was sent, and has not been returned
        self.undecided = False  # whether it may still turn out to be text

    def push(self, text: str) -> list[ParsedDelta]:
        """Parse the next part of the text; what is certain now."""
        for character in text:
            self._push(character)
        return self._take()

    def finish(self) -> list[ParsedDelta]:
        """End the text; what was held back. A call whose name was returned stays a call."""
        closing = self._after_call and any(text.startswith(self._prefix) for text in self.closers)
        if self._call is None and not closing:
            self._add_text(self._prefix)
        elif self.undecided:
            self._add_text("".join(self._pending))
        if not self._after_call:
            self._deltas.append(self._blank)
        return self._take()

    # --- for the families ---------------------------------------------------------------------

    def read(self, marker: str) -> Characters[None]:
        """Parse what follows a marker. Raises NotAToolCall."""
        raise NotImplementedError

    def call(self) -> Characters[None]:
        """Parse an object with a name and arguments, after its first bracket; it is a call as soon
        as both are known."""
        self.undecided = True
        name: str | None = None
        early: list[str] = []  # arguments that came before the name
        known = False
        after = yield from next_nonblank()
        while after != "}" or name is None or not known:
            if after != '"':
                raise NotAToolCall
            key = yield from string()
            if (yield from next_nonblank()) != ":":
                raise NotAToolCall
            first = yield from next_nonblank()
            if key == "name" and name is None:
                if first != '"':
                    raise NotAToolCall
                name = yield from string()
                if early:
                    self.begin(name)
                    self._add_arguments("".join(early))
                after = yield from next_nonblank()
            elif key in ARGUMENTS and not known:
                if first != "{":
                    raise NotAToolCall
                known = True
                if name is None:
                    yield from container("{", early.append)
                else:
                    yield from self.arguments(name)
                after = yield from next_nonblank()
            else:
                after = yield from value(first)
            if after == ",":
                after = yield from next_nonblank()
                if after != '"':
                    raise NotAToolCall
            elif after != "}":
                raise NotAToolCall
        self._pending.clear()

    def listed(self) -> Characters[None]:
        """Parse calls with commas between them, after the opening bracket."""
        after = ","
        while after == ",":
            if (yield from next_nonblank()) != "{":
                raise NotAToolCall
            yield from self.call()
            after = yield from next_nonblank()
        if after != "]":
            raise NotAToolCall

    def arguments(self, name: str) -> Characters[None]:
        """Parse the arguments of a call, after their first bracket."""
        self.begin(name)
        yield from container("{", self._add_arguments)

    def begin(self, name: str) -> None:
        if not name or not is_whole(name):
            raise NotAToolCall
        self._blank, self.name, self._num_arguments = "", name, 0
        self._deltas.append(CallDelta(self._num_calls, name))
        self._num_calls += 1
        self.undecided = False

    def add_argument(self, key: str, value: str) -> None:
        before = ", " if self._num_arguments else "{"
        self._num_arguments += 1
        self._add_arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: {value}")

    def end_arguments(self) -> None:
        self._add_arguments("}" if self._num_arguments else "{}")

    def _add_arguments(self, text: str) -> None:
        self._deltas.append(CallDelta(self._num_calls - 1, arguments=text))
        self._pending.clear()

    # --- text ---------------------------------------------------------------------------------

    def _push(self, character: str) -> None:
        if self._call is None:
            self._find_marker(character)
            return
        self._pending.append(character)
        try:
            self._call.send(character)
        except StopIteration:
            self._call, self._after_call = None, True
        except NotAToolCall:
            self._call = None
            self._after_call = self._after_call or not self.undecided
            # The last character may begin the next call.
            self._add_text("".join(self._pending[:-1]))
            self._find_marker(character)

    def _find_marker(self, character: str) -> None:
        self._prefix += character
        texts = (*self.markers, *(self.closers if self._after_call else ()))
        while self._prefix and not any(text.startswith(self._prefix) for text in texts):
            self._add_text(self._prefix[0])
            self._prefix = self._prefix[1:]
        if self._prefix in self.markers:
            marker, self._prefix = self._prefix, ""
            self._pending, self.undecided = [marker], True
            self._call = self.read(marker)
            next(self._call)
        elif self._prefix in self.closers:
            self._prefix = self._blank = ""

    def _add_text(self, text: str) -> None:
        shown = text.rstrip(BLANKS)
        if shown:
            self._deltas.append(self._blank + shown)
            self._blank, self._after_call = "", False
        self._blank += text[len(shown) :]

    def _take(self) -> list[ParsedDelta]:
        deltas, self._deltas = merge_deltas(delta for delta in self._deltas if delta != ""), []
        return deltas


def merge_deltas(deltas: Iterable[ParsedDelta]) -> list[ParsedDelta]:
    """The same with adjacent deltas of one kind joined. The name of a call stays a delta of its
    own, as in OpenAI's streams."""
    joined: list[ParsedDelta] = []
    for delta in deltas:
        last = joined[-1] if joined else None
        if isinstance(delta, str) and isinstance(last, str):
            joined[-1] = last + delta
        elif (
            isinstance(delta, CallDelta)
            and isinstance(last, CallDelta)
            and delta.name is None is last.name
        ):
            assert delta.index == last.index, "a call that follows another has a name"
            joined[-1] = CallDelta(last.index, arguments=last.arguments + delta.arguments)
        else:
            joined.append(delta)
    return joined
