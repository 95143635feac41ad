"""Detokenizes a stream of tokens: pieces of text that are final, up to the first stop string."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# How tokenizers with byte fallback write a token that is one raw byte.
RAW_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# How SentencePiece tokenizers write the space before a word.
WORD_BEGINS = "\N{LOWER ONE EIGHTH BLOCK}"
# Tokens of the context that affect the text of the first new token (a leading space or none).
CONTEXT_TOKENS = 8


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that text needs."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool = False,
    ) -> str: ...

    def convert_ids_to_tokens(self, ids: int) -> str | None: ...


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """The text of a token alone, of a special one its name; half a character is U+FFFD."""
    text = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    # Decoding drops the space before a first word.
    name = tokenizer.convert_ids_to_tokens(token)
    begins = name is not None and name.startswith(WORD_BEGINS) and not text.startswith(" ")
    return f" {text}" if begins else text


def token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """The bytes of a token's text, also of one that is a part of a character."""
    text, name = token_text(tokenizer, token), tokenizer.convert_ids_to_tokens(token)
    if REPLACEMENT in text and name is not None:
        if RAW_BYTE.fullmatch(name):
            return bytes([int(name[3:5], 16)])
        if all(character in _BYTE_OF for character in name):
            return bytes(_BYTE_OF[character] for character in name)
    return text.encode()


def token_offsets(tokenizer: Tokenizer, tokens: Sequence[int], text: str) -> list[int]:
    """Where in a text each of its tokens begins, in characters. Tokens without text have
    an empty range: a begin-of-sequence token, a space that the first word does not have."""
    raw, at, offsets = text.encode(), 0, []
    for token in tokens:
        offsets.append(len(raw[:at].decode(errors="ignore")))
        own = token_bytes(tokenizer, token)
        found = next((part for part in (own, own.lstrip(b" ")) if raw.startswith(part, at)), b"")
        at += len(found)
    return offsets


def _byte_of() -> dict[str, int]:
    """How byte-level tokenizers write bytes: printable ones as themselves, others from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {chr(byte): byte for byte in printable}
    return characters | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_of()


class Detokenizer:
    """Turns token ids into text that is final. The pieces joined, and `pending`, equal the
    tokenizer's `decode` of all the ids without special tokens and without the clean-up of spaces,
    which would rewrite text already returned. With `context` (the prompt's ids) they equal what
    `decode` appends to the context's text."""

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()):
        self._tokenizer = tokenizer
        # `_ids[:_shown]` are tokens whose text was returned; they are decoded again with what
        # follows because a token's text depends on its left neighbour.
        self._ids = list(context[-CONTEXT_TOKENS:])
        self._shown = len(self._ids)
        self._in_raw_bytes = False

    @property
    def pending(self) -> str:
        """The rest at the end of the text, broken characters as U+FFFD."""
        return self._decode(self._ids)[len(self._decode(self._ids[: self._shown])) :]

    def push(self, token: int) -> str:
        """The text that a token makes final; may be empty, never ends within a character."""
        self._ids.append(token)
        # One invalid byte turns its whole run of raw bytes into U+FFFD: wait for the run's end,
        # which a special token, being left out of the text, is not.
        # A padded vocabulary has ids without a token, which decode to nothing.
        name = self._tokenizer.convert_ids_to_tokens(token)
        if name is not None and RAW_BYTE.fullmatch(name):
            self._in_raw_bytes = True
        elif self._in_raw_bytes:
            self._in_raw_bytes = self._decode(self._ids) == self._decode(self._ids[:-1])
        if self._in_raw_bytes:
            return ""
        text = self.pending
        if not text or text.endswith(REPLACEMENT):
            return ""
        self._ids = self._ids[self._shown :]
        self._shown = len(self._ids)
        return text

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


class StopStrings:
    """Ends a text before its first stop string, which may extend over several pieces. The first is
    the one that is complete first, and of several the longest. `found` is that string, or None so
    far."""

    def __init__(self, stops: Sequence[str]):
        assert all(stops), "an empty stop string ends every text"
        self._stops = sorted(stops, key=len, reverse=True)
        # Of a stop string, so many characters may be known while it is not complete.
        self._most_begun = len(self._stops[0]) - 1 if stops else 0
        self._beginnings, self._first = _beginnings(tuple(stops))
        self._shown = ""  # the end of what was shown, in which a stop string may begin
        self._held = ""
        self.found: str | None = None

    def pass_over(self, piece: str) -> str:
        """The same piece, in which no stop string ends."""
        self._held += piece
        return self._release(len(self._held))

    def push(self, piece: str) -> str:
        """The text that is final now: all but a possible beginning of a stop string."""
        if self.found is not None:
            return ""
        self._held += piece
        text, num_shown = self._shown + self._held, len(self._shown)
        complete = [
            (start + len(stop), rank, stop)
            for rank, stop in enumerate(self._stops)
            if (start := text.find(stop, max(0, num_shown - len(stop) + 1))) >= 0
        ]
        if complete:
            end, _, self.found = min(complete)
            return self._release(max(0, end - len(self.found) - num_shown), forget=True)
        return self._release(len(self._held) - self._longest_beginning())

    def flush(self) -> str:
        """The text that was held back, at the end of a text without a stop string."""
        return self._release(len(self._held))

    def _release(self, count: int, *, forget: bool = False) -> str:
        shown, self._held = self._held[:count], "" if forget else self._held[count:]
        if self._most_begun:
            self._shown = (self._shown + shown)[-self._most_begun :]
        return shown

    def _longest_beginning(self) -> int:
        """How much of the held text belongs to the longest end that begins a stop string."""
        text = self._shown + self._held
        for length in range(min(len(text), self._most_begun), 0, -1):
            if text[-length] in self._first and text[-length:] in self._beginnings:
                return min(length, len(self._held))
        return 0


@lru_cache(maxsize=8)  # the answers of a request share it
def _beginnings(stops: tuple[str, ...]) -> tuple[frozenset[str], frozenset[str]]:
    """All texts that begin a stop string, and their first characters."""
    beginnings = frozenset(stop[:end] for stop in stops for end in range(1, len(stop)))
    return beginnings, frozenset(stop[0] for stop in stops)


class FinalText:
    """The final text of one answer, up to the first stop string.

    Args:
        context: the prompt's ids.
        min_tokens: stop strings that end in the text of so many tokens are ignored; of one that
            begins there and ends later, that beginning remains.
        markers: the texts of special tokens that are shown, by their ids; stop strings are matched
            without them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        context: Sequence[int] = (),
        stops: Sequence[str] = (),
        min_tokens: int = 0,
        markers: Mapping[int, str] | None = None,
    ):
        self._text = Detokenizer(tokenizer, context)
        self._stops = StopStrings(stops)
        self._free = min_tokens  # tokens without a check for stop strings
        self._markers = markers or {}
        self._final = 0  # characters of the text that tokens made final
        self._shown = 0  # those of them that were returned
        self._waiting: list[tuple[int, str]] = []  # markers, and the characters before them

    @property
    def found(self) -> str | None:
        return self._stops.found

    def push(self, ids: Sequence[int]) -> str:
        return "".join([self._push(token) for token in ids])

    def flush(self) -> str:
        text = self._marked(self._stops.push(self._text.pending) + self._stops.flush())
        rest = "" if self.found is not None else "".join(marker for _, marker in self._waiting)
        self._waiting.clear()
        return text + rest

    def completes(self, token: int) -> bool:
        """Whether a stop string is complete with this token, the next one."""
        self._push(token)
        return self.found is not None

    def _push(self, token: int) -> str:
        if token in self._markers:
            place = self._final + len(self._text.pending)
            self._waiting.append((place, self._markers[token]))
        piece = self._text.push(token)
        self._final += len(piece)
        if self._free:
            self._free -= 1
            return self._marked(self._stops.pass_over(piece))
        return self._marked(self._stops.push(piece))

    def _marked(self, text: str) -> str:
        """The next final text, with its markers."""
        parts = []
        while self._waiting and self._waiting[0][0] <= self._shown + len(text):
            place, marker = self._waiting.pop(0)
            before = place - self._shown
            parts += [text[:before], marker]
            text, self._shown = text[before:], place
        self._shown += len(text)
        return "".join([*parts, text])


def special_markers(tokenizer: Tokenizer, texts: Sequence[str]) -> dict[int, str]:
    """The texts that are special tokens of the vocabulary, by their ids."""
    found = {}
    for text in texts:
        for token in tokenizer.encode(text, add_special_tokens=False):
            hidden = not tokenizer.decode(
                [token], skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            if hidden and tokenizer.convert_ids_to_tokens(token) == text:
                found[token] = text
    return found
