"""Structured output: which tokens a grammar allows next.

A *matcher* holds the state of one text in its grammar. The last stage has one for each sequence
whose request has a grammar, and draws from the tokens that it allows. The head has another, to
propose no draft tokens that cannot be accepted. `pipespec.engine.llguidance_backend` makes
matchers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

import numpy as np

BITS_PER_WORD = 32  # tokens per word of a mask


class GrammarFailed(Exception):
    """Why a grammar cannot be followed, as a clause."""


class Matcher(Protocol):
    """The state of a text in its grammar."""

    def allowed(self) -> np.ndarray:
        """Which tokens may follow: bit i % 32 of word i // 32 is token i's, int32 `[words]`.

        Tokens that end the text are allowed where the grammar allows it to end; none follows them.
        Raises GrammarFailed.
        """

    def consume(self, tokens: Sequence[int]) -> int:
        """Append the longest prefix of `tokens` that the grammar allows; returns its length."""

    def rollback(self, count: int) -> None:
        """Remove the newest tokens."""


# Begins to compile a grammar in the background. The future may raise GrammarFailed.
Compile = Callable[[str], Future[Matcher]]


def unpack_mask(allowed: np.ndarray, num_tokens: int) -> np.ndarray:
    """The bits `[..., words]` of the first tokens as bool `[..., num_tokens]`; tokens beyond the
    last word are not allowed."""
    bits = np.unpackbits(allowed.view(np.uint8), axis=-1, bitorder="little")[..., :num_tokens]
    if (missing := num_tokens - bits.shape[-1]) > 0:
        bits = np.concatenate((bits, np.zeros((*bits.shape[:-1], missing), np.uint8)), axis=-1)
    return bits.view(bool)


def allows(allowed: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Whether the bits of each row, `[rows, words]`, allow its tokens `[rows, n]`, bool
    `[rows, n]`."""
    known = (tokens >= 0) & (tokens < allowed.shape[1] * BITS_PER_WORD)
    at = np.where(known, tokens, 0)
    words = np.take_along_axis(allowed, at // BITS_PER_WORD, axis=1)
    return known & ((words >> (at % BITS_PER_WORD)) & 1 == 1)


def only_token(allowed: np.ndarray) -> int | None:
    """The token that bits `[words]` allow, if it is the only one; else None."""
    words = np.flatnonzero(allowed)
    if len(words) != 1:
        return None
    word = int(allowed[words[0]]) % 2**BITS_PER_WORD
    return None if word & (word - 1) else int(words[0]) * BITS_PER_WORD + word.bit_length() - 1
