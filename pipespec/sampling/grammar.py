"""Texts that must have a form: which tokens a grammar allows next.

A *matcher* is a function of a grammar and of the tokens so far. The last stage has one for each
sequence whose request named a grammar, and draws among the tokens that it allows; the head has one
to spare the stages guesses that cannot come true. What makes matchers is `pipespec.engine.grammar`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

import numpy as np

WORD = 32  # tokens whose bits stand together


class GrammarFailed(Exception):
    """Why a grammar cannot be followed, as a clause."""


class Matcher(Protocol):
    """Where a text stands in its grammar."""

    def allowed(self) -> np.ndarray:
        """Which tokens may follow: bit i % 32 of word i // 32 is token i's, int32 `[words]`.

        Those that end the text are allowed where the grammar does; nothing is after them. Raises
        GrammarFailed.
        """
        ...

    def consume(self, tokens: Sequence[int]) -> int:
        """The text goes on with tokens; how many of them the grammar allowed, and so were taken."""
        ...

    def rollback(self, count: int) -> None:
        """Take back the newest tokens."""
        ...


# Begins to compile a grammar, beside whatever else goes on. The future may raise GrammarFailed.
Compile = Callable[[str], Future[Matcher]]


def as_bools(allowed: np.ndarray, num_tokens: int) -> np.ndarray:
    """Of bits `[..., words]`, those of the first tokens: bool `[..., num_tokens]`; tokens that the
    bits do not speak of are not allowed."""
    bits = np.unpackbits(allowed.view(np.uint8), axis=-1, bitorder="little")[..., :num_tokens]
    if (missing := num_tokens - bits.shape[-1]) > 0:
        bits = np.concatenate((bits, np.zeros((*bits.shape[:-1], missing), np.uint8)), axis=-1)
    return bits.view(bool)


def has(allowed: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Whether the bits of each row, `[rows, words]`, allow its tokens `[rows, n]`: bool
    `[rows, n]`."""
    known = (tokens >= 0) & (tokens < allowed.shape[1] * WORD)
    at = np.where(known, tokens, 0)
    words = np.take_along_axis(allowed, at // WORD, axis=1)
    return known & ((words >> (at % WORD)) & 1 == 1)


def only(allowed: np.ndarray) -> int | None:
    """The one token that bits `[words]` allow; None: there are others, or none."""
    words = np.flatnonzero(allowed)
    if len(words) != 1:
        return None
    word = int(allowed[words[0]]) % 2**WORD
    return None if word & (word - 1) else int(words[0]) * WORD + word.bit_length() - 1
