"""Guesses of several levels that come from one draft round."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

# The index of a node that is not in a tree.
NOWHERE = -1


@dataclass(frozen=True, slots=True)
class Paths:
    """Guesses below the candidates `[k, children]` of a draft round.

    `tokens` and `logps` `[m]`, each log-probability given the guess above. `above` `[m]` says what
    a guess hangs from: i < k * children is a candidate, counted row by row, and k * children + j
    the guess j of these, which stands before it. The tokens below one guess differ. A guess whose
    log-probability is -inf is none, nor is one below it or below a candidate that is none.
    """

    above: np.ndarray
    tokens: np.ndarray
    logps: np.ndarray

    def levels(self, candidates: int) -> Iterator[np.ndarray]:
        """Indices of the guesses, rising, of one level after another, below so many candidates."""
        depth = [0] * candidates
        for guess, above in enumerate(self.above.tolist(), candidates):
            assert above < guess, "a guess stands before those below it"
            depth.append(depth[above] + 1)
        of_guess = np.array(depth[candidates:])
        for level in range(1, int(of_guess.max(initial=0)) + 1):
            yield np.flatnonzero(of_guess == level)


class Known:
    """Where nodes stand in a tree that more are being hung into, behind them, by parent and
    token."""

    def __init__(self, parent: np.ndarray, token: np.ndarray):
        """The tree's columns, `[nodes]`, in the order that they have before."""
        self._parent, self._token = parent, token

    def below(self, parents: np.ndarray) -> np.ndarray:
        """Rising indices of the children of `parents`."""
        wanted = np.zeros(len(self._parent), bool)
        wanted[parents[parents < len(wanted)]] = True
        return 1 + wanted.take(self._parent[1:]).nonzero()[0]

    def find(self, parent: np.ndarray, token: np.ndarray) -> np.ndarray:
        """Indices of the children with these tokens below `parent`, `[k]`; NOWHERE: there is
        none."""
        near = self.below(parent)
        if not len(near):
            return np.full(len(parent), NOWHERE)
        keys = _keys(self._parent[near], self._token[near])
        order = np.argsort(keys)
        wanted = _keys(parent, token)
        found = near[order[np.searchsorted(keys, wanted, sorter=order) % len(near)]]
        same = (self._parent[found] == parent) & (self._token[found] == token)
        return np.where(same, found, NOWHERE)


def _keys(parent: np.ndarray, token: np.ndarray) -> np.ndarray:
    """One number for each parent and token; no token has more than 32 bits."""
    return (parent << 32) + token


def distinct(parent: np.ndarray, token: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of guesses `[k]` the first of each token below each parent, rising; and for each guess which
    of these it is."""
    first: dict[tuple[int, int], int] = {}
    keys = list(zip(parent.tolist(), token.tolist(), strict=True))
    for guess, key in enumerate(keys):
        first.setdefault(key, guess)
    number = {key: i for i, key in enumerate(first)}
    return np.array([*first.values()], np.int64), np.array([number[key] for key in keys], np.int64)
