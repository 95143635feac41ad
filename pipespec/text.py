"""Detokenizes a stream of tokens: pieces of text that are final, up to the first stop string."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from itertools import compress, groupby
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# How tokenizers with byte fallback write a token that is one raw byte.
RAW_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# How SentencePiece tokenizers write the space before a word.
WORD_BEGINS = "\N{LOWER ONE EIGHTH BLOCK}"
# Tokens of the context that affect the text of the first new token (a leading space or none).
CONTEXT_TOKENS = 8
# At most so many tokens are looked at for them, as special ones do not count.
MOST_CONTEXT = 64


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that text needs."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...

    def convert_ids_to_tokens(self, ids: int) -> str | None: ...


def decode(tokenizer: Tokenizer, ids: Sequence[int], *, special: bool = False) -> str:
    """The text of tokens, with `special` that of special ones too. It is not cleaned up, and each
    broken character is U+FFFD, where tokenizers with byte fallback make that of every byte in a run
    of raw bytes with a broken character, also of the whole characters."""

    def decoded(part: Sequence[int]) -> str:
        return tokenizer.decode(part, skip_special_tokens=not special)

    text = decoded(ids)
    if REPLACEMENT not in text:
        return text
    bytes_of = {token: byte for token in {*ids} if (byte := _raw_byte(tokenizer, token))}
    if not bytes_of:
        return text
    ids = [token for token in ids if tokenizer.convert_ids_to_tokens(token) is not None]
    if not special:
        ids = [token for token in ids if token in bytes_of or not hidden_text(tokenizer, token)]
    text, before = "", list[int]()
    for is_raw, group in groupby(ids, bytes_of.__contains__):
        run = list(group)
        if is_raw:
            skipped = not before and not decoded(run[:1])  # a space before the first word
            text += b"".join(bytes_of[token] for token in run[skipped:]).decode(errors="replace")
        else:  # its text depends on whether another one precedes it
            text += decoded([*before, *run])[len(decoded(before)) :]
        before = run[-1:]
    return text


def hidden_text(tokenizer: Tokenizer, token: int) -> str:
    """The text of a special token, which texts are without; that of another token is empty."""
    shown, whole = (tokenizer.decode([token], skip_special_tokens=skip) for skip in (True, False))
    return "" if shown else whole


def _raw_byte(tokenizer: Tokenizer, token: int) -> bytes:
    """The byte that a token of byte fallback is, not its name; empty: it is another token."""
    name = tokenizer.convert_ids_to_tokens(token)
    if name is None or not RAW_BYTE.fullmatch(name):
        return b""
    text = tokenizer.decode([token], skip_special_tokens=False)
    return b"" if text == name else bytes([int(name[3:5], 16)])


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """The text of a token alone, of a special one its name; half a character is U+FFFD."""
    if byte := _raw_byte(tokenizer, token):
        return byte.decode(errors="replace")
    text = decode(tokenizer, [token], special=True)
    # Decoding drops the space before a first word.
    name = tokenizer.convert_ids_to_tokens(token)
    begins = name is not None and name.startswith(WORD_BEGINS) and not text.startswith(" ")
    return f" {text}" if begins else text


def token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """The bytes of a token's text, also of one that is a part of a character."""
    if byte := _raw_byte(tokenizer, token):
        return byte
    text, name = token_text(tokenizer, token), tokenizer.convert_ids_to_tokens(token)
    if REPLACEMENT in text and name is not None and all(each in BYTE_OF for each in name):
        return bytes(BYTE_OF[each] for each in name)
    return text.encode()


def _byte_of() -> dict[str, int]:
    """How byte-level tokenizers write bytes: printable ones as themselves, others from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {chr(byte): byte for byte in printable}
    return characters | {chr(256 + i): byte for i, byte in enumerate(others)}


# Bytes by the characters that stand for them.
BYTE_OF = _byte_of()


class Detokenizer:
    """Turns token ids into text that is final. The pieces joined, and `pending`, equal the text of
    all the ids (`decode`). With `context` (the prompt's ids) they equal what the ids append to the
    context's text; a character that the context begins and the ids end is theirs.

    Attributes:
        num_final: characters of the text that are final so far.
        pending: the rest at the end of the text, a broken character as U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()):
        self._tokenizer = tokenizer
        # Tokens whose text was returned are decoded again with what follows, because a token's text
        # depends on its left neighbour; special ones have no text.
        near = context[-MOST_CONTEXT:]
        self._ids = [token for token in near if not hidden_text(tokenizer, token)][-CONTEXT_TOKENS:]
        self._text = self._known = decode(tokenizer, self._ids)  # theirs, and what is returned
        self.num_final = 0
        self.pending = ""

    def push(self, token: int) -> str:
        """The text that a token makes final; may be empty, never ends within a character."""
        text = decode(self._tokenizer, [*self._ids, token])
        if text == self._text and hidden_text(self._tokenizer, token):
            return ""
        # What follows may change the last character alone: UTF-8 shows where one begins.
        final, known = text.removesuffix(REPLACEMENT), self._known
        if not final.startswith(known):  # the token continues the context's last character
            known = known.removesuffix(REPLACEMENT)
        piece = final.removeprefix(known)
        self._ids.append(token)
        self._text, self._known, self.pending = text, final, text[len(final) :]
        self.num_final += len(piece)
        if len(self._ids) > 2 * CONTEXT_TOKENS:
            del self._ids[:-CONTEXT_TOKENS]
            self._text = decode(self._tokenizer, self._ids)
            self._known = self._text.removesuffix(REPLACEMENT)
        return piece


class TokenOffsets:
    """Where in the text of an answer its tokens begin, in characters after `start`. Those of one
    character begin with it, and special tokens, which the text is without, where the next one
    does."""

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int], start: int):
        self._text = Detokenizer(tokenizer, context)
        self._start = start

    def push(self, token: int) -> int:
        begun, before = self._text.pending, self._start + self._text.num_final
        text = self._text.push(token) + self._text.pending
        # A broken character that the token does not continue is before it.
        return before + len(begun) * (len(text) > len(begun) and text.startswith(begun))


class StopStrings:
    """Ends a text before its first stop string, which may extend over several pieces. The first is
    the one that is complete first, and of several the longest. `found` is that string, or None so
    far. A stop string may name special tokens, which the text is without."""

    def __init__(self, stops: Sequence[str]):
        assert all(stops), "an empty stop string ends every text"
        self._stops = sorted(stops, key=len, reverse=True)
        # Of a stop string, so many characters may be known while it is not complete.
        self._most_begun = len(self._stops[0]) - 1 if stops else 0
        self._first = {stop[0] for stop in stops}
        self._shown = ""  # the end of what was shown, in which a stop string may begin
        self._held = ""
        self._visible: list[bool] = []  # of each held character; a special token's are not
        self.found: str | None = None

    def names(self, special: str) -> bool:
        """Whether a stop string names this special token."""
        return any(special in stop for stop in self._stops)

    def pass_over(self, piece: str, *, visible: bool = True) -> str:
        """The same piece, in which no stop string ends; empty unless it is `visible`."""
        self._hold(piece, visible)
        return self._release(len(self._held))

    def push(self, piece: str, *, visible: bool = True) -> str:
        """The text that is final now: all but a possible beginning of a stop string."""
        if self.found is not None:
            return ""
        self._hold(piece, visible)
        text, num_shown = self._shown + self._held, len(self._shown)
        complete = [
            (start + len(stop), rank, stop)
            for rank, stop in enumerate(self._stops)
            if (start := text.find(stop, max(0, num_shown - len(stop) + 1))) >= 0
        ]
        if complete:
            end, _, self.found = min(complete)
            shown = self._release(max(0, end - len(self.found) - num_shown))
            self._held = ""
            return shown
        return self._release(len(self._held) - self._longest_beginning())

    def flush(self) -> str:
        """The text that was held back, at the end of a text without a stop string."""
        return self._release(len(self._held))

    def _hold(self, piece: str, visible: bool) -> None:
        self._held += piece
        self._visible += [visible] * len(piece)

    def _release(self, count: int) -> str:
        shown, self._held = self._held[:count], self._held[count:]
        visible, self._visible = self._visible[:count], self._visible[count:]
        if self._most_begun:
            self._shown = (self._shown + shown)[-self._most_begun :]
        return "".join(compress(shown, visible))

    def _longest_beginning(self) -> int:
        """How much of the held text belongs to the longest end that begins a stop string."""
        text = self._shown + self._held
        for length in range(min(len(text), self._most_begun), 0, -1):
            if text[-length] in self._first:  # most are not
                end = text[-length:]
                if any(stop.startswith(end) and stop != end for stop in self._stops):
                    return min(length, len(self._held))
        return 0


class FinalText:
    """The final text of one answer, up to the first stop string.

    Args:
        context: the prompt's ids.
        min_tokens: stop strings that end in the text of so many tokens are ignored; of one that
            begins there and ends later, that beginning remains.
        markers: the ids of special tokens that are shown; stop strings are matched without them,
            unless one names them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        context: Sequence[int] = (),
        stops: Sequence[str] = (),
        min_tokens: int = 0,
        markers: Collection[int] = (),
    ):
        self._text = Detokenizer(tokenizer, context)
        self._stops = StopStrings(stops)
        self._tokenizer = tokenizer
        self._free = min_tokens  # tokens without a check for stop strings
        self._markers = markers
        self._matched = 0  # characters of those that stop strings are matched with
        self._shown = 0  # characters of the text that were returned
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
        piece = self._text.push(token)
        match = self._stops.pass_over if self._free else self._stops.push
        self._free = max(0, self._free - 1)
        special = "" if piece else hidden_text(self._tokenizer, token)
        if special and self._stops.names(special):
            visible = token in self._markers
            self._matched += visible * len(special)
            return self._marked(match(special, visible=visible))
        if special and token in self._markers:
            place = self._text.num_final + len(self._text.pending) + self._matched
            self._waiting.append((place, special))
        return self._marked(match(piece))

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
    return {
        token: text
        for text in texts
        for token in tokenizer.encode(text, add_special_tokens=False)
        if hidden_text(tokenizer, token) == text
    }
