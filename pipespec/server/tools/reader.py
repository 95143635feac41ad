"""What the parsers of all families have in common: text until a marker, then what may be a call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from pipespec.server.tools.deltas import CallDelta, Delta, merged
from pipespec.server.tools.grammar import (
    BLANKS,
    Characters,
    Unlike,
    container,
    solid,
    string,
    value,
)
from pipespec.system.reading import is_whole

# What models call the arguments of a call.
ARGUMENTS = ("arguments", "parameters")


class Reader(ABC):
    """Reads an answer character by character.

    What begins like a call is held back until its name and the beginning of its arguments are
    known; then it is a call, and its arguments are told as they come, in the model's own spelling.
    What turns out to be none is text, whole. Each character is looked at once or twice.
    """

    # Texts that begin a call, none of which begins another.
    markers: ClassVar[tuple[str, ...]]
    # Texts that do not show where they follow a call.
    closers: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        self._told: list[Delta] = []
        self._calls = 0
        self._begun = ""  # perhaps a marker
        self._blank = ""  # whitespace that shows if text follows
        self._after_call = False  # nothing but whitespace since the last one
        self._reading: Characters[None] | None = None  # of what may be a call
        self._raw: list[str] = []  # what was read of it, and not told
        self._open = False  # it is not known yet whether this is a call

    def feed(self, text: str) -> list[Delta]:
        """What the next piece of the text makes certain."""
        for character in text:
            self._push(character)
        return self._tell()

    def finish(self) -> list[Delta]:
        """What was held back. A call that was told stays one, however it ends."""
        ends = self._after_call and any(text.startswith(self._begun) for text in self.closers)
        if self._reading is None and not ends:
            self._say(self._begun)
        elif self._open:
            self._say("".join(self._raw))
        if not self._after_call:
            self._told.append(self._blank)
        return self._tell()

    @abstractmethod
    def read(self, marker: str) -> Characters[None]:
        """What follows a marker. Raises Unlike where it is no call."""

    # --- for the families ---------------------------------------------------------------------

    def call(self) -> Characters[None]:
        """An object with a name and arguments, whose first bracket was read; as soon as both are
        known, it is a call."""
        self._open = True
        name: str | None = None
        early: list[str] = []  # arguments that came before the name
        known = False
        after = yield from solid()
        while after != "}" or name is None or not known:
            if after != '"':
                raise Unlike
            key = yield from string()
            if (yield from solid()) != ":":
                raise Unlike
            first = yield from solid()
            if key == "name" and name is None:
                if first != '"':
                    raise Unlike
                name = yield from string()
                if early:
                    self.begin(name)
                    self._argue("".join(early))
                after = yield from solid()
            elif key in ARGUMENTS and not known:
                if first != "{":
                    raise Unlike
                known = True
                if name is None:
                    yield from container("{", early.append)
                else:
                    yield from self.arguments(name)
                after = yield from solid()
            else:
                after = yield from value(first)
            if after == ",":
                after = yield from solid()
                if after != '"':
                    raise Unlike
            elif after != "}":
                raise Unlike
        self._raw.clear()

    def listed(self) -> Characters[None]:
        """Calls with commas between them, whose opening bracket was read."""
        after = ","
        while after == ",":
            if (yield from solid()) != "{":
                raise Unlike
            yield from self.call()
            after = yield from solid()
        if after != "]":
            raise Unlike

    def arguments(self, name: str) -> Characters[None]:
        """The arguments of a call, whose first bracket was read."""
        self.begin(name)
        yield from container("{", self._argue)

    def begin(self, name: str) -> None:
        """This is a call."""
        if not name or not is_whole(name):
            raise Unlike
        self._blank = ""
        self._told.append(CallDelta(self._calls, name))
        self._calls += 1
        self._open = False

    def _argue(self, text: str) -> None:
        self._told.append(CallDelta(self._calls - 1, arguments=text))
        self._raw.clear()

    # --- text ---------------------------------------------------------------------------------

    def _push(self, character: str) -> None:
        if self._reading is None:
            self._look(character)
            return
        self._raw.append(character)
        try:
            self._reading.send(character)
        except StopIteration:
            self._reading, self._after_call = None, True
        except Unlike:
            self._reading = None
            self._after_call = self._after_call or not self._open
            # What does not fit may begin the next call.
            self._say("".join(self._raw[:-1]))
            self._look(character)

    def _look(self, character: str) -> None:
        """Text, in which a marker may begin."""
        self._begun += character
        texts = (*self.markers, *(self.closers if self._after_call else ()))
        while self._begun and not any(text.startswith(self._begun) for text in texts):
            self._say(self._begun[0])
            self._begun = self._begun[1:]
        if self._begun in self.markers:
            marker, self._begun = self._begun, ""
            self._raw, self._open = [marker], True
            self._reading = self.read(marker)
            next(self._reading)
        elif self._begun in self.closers:
            self._begun = self._blank = ""

    def _say(self, text: str) -> None:
        shown = text.rstrip(BLANKS)
        if shown:
            self._told.append(self._blank + shown)
            self._blank, self._after_call = "", False
        self._blank += text[len(shown) :]

    def _tell(self) -> list[Delta]:
        told, self._told = merged(delta for delta in self._told if delta != ""), []
        return told
