"""The parser of calls of tools in generated text, for which a family of models gives patterns.

Partial matches of these tell, wherever the text is cut, what may still become a call.
"""

from __future__ import annotations

import json
import secrets
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Literal

import regex

from pipespec.server.tool_parsers.declared import Declared
from pipespec.system.validation import is_whole

BLANKS = " \t\r\n"
CLOSING = {"{": "}", "[": "]"}
# A longer beginning of a call, or end, is text, so that no match takes long.
MAX_LENGTH = 2**12
# How deep lists and objects may be beside the arguments of a call, and in those before its name.
MAX_DEPTH = 4

# Parts of patterns: whitespace, a JSON string, a list or object of which only brackets and strings
# are checked, any JSON value, and a member of an object.
WS = r"[ \t\r\n]*+"
STRING = r'"(?:[^"\\]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+"'
_BOX = r"(?!)"
for _ in range(MAX_DEPTH):
    _INSIDE = rf'(?:[^][{{}}"]|"(?:[^"\\]|\\.)*+"|{_BOX})*+'
    _BOX = rf"(?:\{{{_INSIDE}\}}|\[{_INSIDE}\])"
VALUE = rf"(?:{STRING}|{_BOX}|[-+.a-zA-Z0-9]++)"
MEMBER = rf"{STRING}{WS}:{WS}{VALUE}"
# An object up to the bracket of its arguments, whose name comes first, or after them.
_ARGUMENTS = rf'"(?:arguments|parameters)"{WS}:{WS}'
_BEFORE = rf'(?:(?!"(?:name|arguments|parameters)"){MEMBER}{WS},{WS})*+'
_NAME = rf'"name"{WS}:{WS}(?P<name>{STRING})'
_BETWEEN = rf'{WS},{WS}(?:(?!"(?:arguments|parameters)"){MEMBER}{WS},{WS})*+'
_AFTER = rf'{WS},{WS}(?:(?!"name"){MEMBER}{WS},{WS})*+'
OBJECT = (
    rf"(?P<object>\{{){WS}{_BEFORE}"
    rf"(?:{_NAME}{_BETWEEN}{_ARGUMENTS}(?P<next>\{{)"
    rf"|{_ARGUMENTS}(?P<early>(?=\{{){_BOX}){_AFTER}{_NAME})"
)
_OBJECT_END = rf"(?:{WS},{WS}{MEMBER})*+{WS}\}}"


BlockKind = Literal["reasoning", "text", "call"]


@dataclass(frozen=True)
class Piece:
    """What is new in an answer: text of a kind. A call begins with a piece that is its `name`; text
    of its arguments follows."""

    kind: BlockKind
    text: str = ""
    name: str = ""


class ToolParser:
    """Parses one answer, and never takes back what it has returned.

    Text that begins like a call is held back until its name and the beginning of its arguments are
    known, and is returned as text if it turns out to be none. JSON arguments are returned as they
    arrive, in the model's own spelling, others (`key`) one by one, as JSON.
    """

    # Texts that begin a call, none of which begins another.
    markers: ClassVar[tuple[str, ...]] = ()
    # Texts that are dropped where they follow a call.
    closers: ClassVar[tuple[str, ...]] = ()
    # Texts of the format that are special tokens in some vocabularies; by default those above.
    special: ClassVar[tuple[str, ...]] = ()
    # A call from its marker to its arguments, which begin with the group `next`, or behind it. With
    # the group `list` more calls may follow.
    first: ClassVar[str] = r"(?!)"
    another: ClassVar[str] = r"(?!)"  # such a call
    end: ClassVar[str] = ""  # of a call, after its arguments, unless it is an `OBJECT`
    # Of arguments that are returned one by one: what precedes a value, and what ends the last one.
    key: ClassVar[str] = ""
    last: ClassVar[str] = ""

    # Makes an id of the call of this name and number that the model's template accepts when the
    # client sends it back.
    new_id: ClassVar[staticmethod[[str, int], str]] = staticmethod(
        lambda name, number: f"call_{secrets.token_hex(12)}"
    )

    def __init_subclass__(cls) -> None:
        if "special" not in vars(cls):
            cls.special = (*cls.markers, *cls.closers)

    @classmethod
    @cache
    def patterns(cls) -> Mapping[str, Any]:
        """All patterns by name; the first call takes some milliseconds."""
        closers, markers = ("|".join(map(regex.escape, t)) for t in (cls.closers, cls.markers))
        sources = {"closers": closers or "(?!)", "markers": markers or "(?!)", "first": cls.first}
        sources |= {"another": f"{WS},{WS}{cls.another}", "list_end": rf"{WS}\]"}
        sources |= {"object_end": _OBJECT_END, "end": cls.end, "key": cls.key, "last": cls.last}
        return {name: regex.compile(source, regex.DOTALL) for name, source in sources.items()}

    def __init__(self, declared: Mapping[str, Declared] | None = None) -> None:
        """`declared`: the parameters of functions, for families that do not write JSON."""
        self.declared = declared or {}
        self.name = ""  # of the last call
        self._pieces: list[Piece] = []
        self._num_arguments = 0  # of the last call, where they are returned one by one
        self._held = ""  # what is not certain yet
        self._blank = ""  # whitespace that is returned if text follows
        self._after_call = False  # whether only whitespace has come since the last call
        self._listed = False  # whether more calls may follow in a list
        self._end = ""  # the pattern of the end of the last call
        self._awaited: list[str] = []  # brackets of JSON arguments, or of a value in Python
        self._quoted = self._escaped = False  # in these
        self._num_read = 0  # how much of what is held has been read for such a value
        self._step: Callable[[], bool] = self._find_marker

    def push(self, text: str) -> list[Piece]:
        """Parse the next part of the text; what is certain now."""
        self._held += text
        while self._held and self._step():
            pass
        return self._take()

    def finish(self) -> list[Piece]:
        """End the text; what was held back. A call whose name was returned stays a call."""
        held, self._held = self._held, ""
        if self._step == self._find_marker:
            if not (self._after_call and any(text.startswith(held) for text in self.closers)):
                self._add_text(held)
        elif self._step == self._find_call and (not self._listed or held.strip(BLANKS + ",")):
            self._add_text(held)
        if not self._after_call:
            self._pieces.append(Piece("text", self._blank))
        return self._take()

    def read_value(self, key: str, start: int) -> tuple[int, str | None] | None:
        """Where in the text that is held an argument has ended that begins at `start`, and its
        JSON, or None if it is no value. None: it may go on."""
        raise NotImplementedError

    # --- steps: each returns whether there is more to do with what is held --------------------

    def _find_marker(self) -> bool:
        if self._after_call:
            self._blank += self._held[: -len(self._held.lstrip(BLANKS)) or None]
            self._held = self._held.lstrip(BLANKS)
            closer = self._match("closers")
            if closer and not closer.partial:
                self._blank, self._held = "", self._held[closer.end() :]
            if closer:
                return not closer.partial
        found = self.patterns()["markers"].search(self._held, partial=True)
        self._release(found.start() if found else len(self._held))
        if not found or found.partial:
            return False
        self._step = self._find_call
        return True

    def _find_call(self) -> bool:
        pattern, end = "another" if self._listed else "first", self._match("list_end")
        if self._listed and end and not end.partial:
            self._held = self._held[end.end() :]
            return self._ended()
        found = self._match(pattern)
        if found is None or found.partial:
            return self._wait(found, pattern)
        groups, start = found.groupdict(), found.end()
        # The first value, if there is one, decides whether it is a call.
        read = self.read_value("", start) if groups.get("assigned") else (start - 1, "")
        if read is None:
            return False
        certain, value = read
        name = _unquoted(groups["name"])
        if not name or value is None:
            self._ended(self._after_call or self._listed)
            self._release(certain)
            return True
        self._blank, self.name, self._num_arguments = "", name, 0
        self._awaited, self._quoted, self._escaped = [], False, False
        self._pieces.append(Piece("call", name=name))
        self._listed = self._listed or groups.get("list") is not None
        self._end = "object_end" if groups.get("object") else "end"
        self._held = self._held[found.start("next") if groups.get("next") else found.end() :]
        self._step = self._read_values if self.key else self._read_json
        if groups.get("early"):
            self._add_arguments(groups["early"])
            self._step = self._find_end
        return True

    def _read_json(self) -> bool:
        """Return JSON arguments, of which only brackets and strings are checked; the client parses
        them."""
        for place, character in enumerate(self._held):
            if self._quoted:
                self._quoted = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
            elif character == '"':
                self._quoted = True
            elif character in CLOSING:
                self._awaited.append(CLOSING[character])
            elif character in "]}":
                wrong = character != self._awaited.pop()
                if wrong or not self._awaited:
                    end = place + (not wrong)
                    self._add_arguments(self._held[:end])
                    self._held, self._step = self._held[end:], self._find_end
                    return self._ended() if wrong else True
        self._add_arguments(self._held)
        self._held = ""
        return False

    def _read_values(self) -> bool:
        last, key = self._match("last"), self._match("key")
        if last and not last.partial:
            self._add_arguments("}" if self._num_arguments else "{}")
            self._held, self._step = self._held[last.end() :], self._find_end
            return True
        if key and not key.partial:
            name = key["key"].strip()
            read = self.read_value(name, key.end())
            if read is None:
                return False
            end, value = read
            if value is None:
                self._ended()
                self._release(end)
                return True
            before = ", " if self._num_arguments else "{"
            self._num_arguments += 1
            self._add_arguments(f"{before}{json.dumps(name, ensure_ascii=False)}: {value}")
            self._held = self._held[end:]
            return True
        return self._wait(last or key, "key")

    def _find_end(self) -> bool:
        found = self._match(self._end)
        if found is None or found.partial:
            return self._wait(found, self._end)
        self._held = self._held[found.end() :]
        if not self._listed:
            return self._ended()
        self._step = self._find_call
        return True

    def _match(self, pattern: str) -> Any:
        return self.patterns()[pattern].match(self._held, partial=True)

    def _ended(self, after_call: bool = True) -> bool:
        self._step, self._after_call, self._listed = self._find_marker, after_call, False
        return True

    def _wait(self, found: Any, pattern: str) -> bool:
        """Wait for more text; if what is held cannot be part of a call, or is too long, it is text
        up to where it differs from one."""
        if found is not None and len(self._held) <= MAX_LENGTH:
            return False
        match, held = self.patterns()[pattern].match, self._held[:MAX_LENGTH]
        lengths = range(1, len(held) + 1)
        fits = bisect_left(
            lengths, True, key=lambda length: match(held[:length], partial=True) is None
        )
        self._ended(self._after_call or self._listed or self._step != self._find_call)
        self._release(fits)
        return True

    # --- what is certain ----------------------------------------------------------------------

    def _add_arguments(self, text: str) -> None:
        self._pieces.append(Piece("call", text))

    def _release(self, length: int) -> None:
        """So much of what is held is text."""
        self._add_text(self._held[:length])
        self._held = self._held[length:]

    def _add_text(self, text: str) -> None:
        shown = text.rstrip(BLANKS)
        if shown:
            self._pieces.append(Piece("text", self._blank + shown))
            self._blank, self._after_call = "", False
        self._blank += text[len(shown) :]

    def _take(self) -> list[Piece]:
        pieces, self._pieces = merged(self._pieces), []
        return pieces


def _unquoted(name: str) -> str:
    """A function's name, which may be a JSON string; "": there can be no such name."""
    found: str = json.loads(name, strict=False) if name.startswith('"') else name
    return found if is_whole(found) else ""


def merged(pieces: Iterable[Piece]) -> list[Piece]:
    """The same with adjacent pieces of one kind joined. The name of a call stays a piece of its
    own, as in OpenAI's streams."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last and last.kind == piece.kind and not last.name and not piece.name:
            joined[-1] = Piece(piece.kind, last.text + piece.text)
        elif piece.text or piece.name:
            joined.append(piece)
    return joined
