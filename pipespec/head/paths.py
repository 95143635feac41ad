"""Draft tokens of several levels from one draft round."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

# The index of a node that is not in a tree.
NOT_IN_TREE = -1


@dataclass(frozen=True, slots=True)
class DraftPaths:
    """Draft tokens below the candidates `[k, children]` of a draft round.

    `tokens` and `logps` are `[m]`, each log-probability given the token's parent. `parents` `[m]`
    are numbers: i < k * children is a candidate, counted row by row, and k * children + j is the
    draft token j of these paths, which must come before its children. Siblings have different
    tokens. An entry with log-probability -inf is padding, and so are those below it.
    """

    parents: np.ndarray
    tokens: np.ndarray
    logps: np.ndarray

    def levels(self, candidates: int) -> Iterator[np.ndarray]:
        """The levels below so many candidates, one after another, each as rising indices."""
        depth = [0] * candidates
        for draft_token, parent in enumerate(self.parents.tolist(), candidates):
            assert parent < draft_token, "a parent comes before its children"
            depth.append(depth[parent] + 1)
        depths = np.array(depth[candidates:])
        for level in range(1, int(depths.max(initial=0)) + 1):
            yield np.flatnonzero(depths == level)


class ChildIndex:
    """Finds the nodes of a tree by parent and token."""

    def __init__(self, parent: np.ndarray, token: np.ndarray):
        """The tree's columns, `[nodes]`; nodes that are appended later are not found."""
        self._parent, self._token = parent, token

    def children_of(self, parents: np.ndarray) -> np.ndarray:
        """Rising indices of the children of `parents`."""
        wanted = np.zeros(len(self._parent), bool)
        wanted[parents[parents < len(wanted)]] = True
        return 1 + wanted.take(self._parent[1:]).nonzero()[0]

    def find(self, parent: np.ndarray, token: np.ndarray) -> np.ndarray:
        """Indices of the children with these tokens below `parent`, `[k]`; NOT_IN_TREE: there
        is none."""
        near = self.children_of(parent)
        if not len(near):
            return np.full(len(parent), NOT_IN_TREE)
        keys = _keys(self._parent[near], self._token[near])
        order = np.argsort(keys)
        wanted = _keys(parent, token)
        found = near[order[np.searchsorted(keys, wanted, sorter=order) % len(near)]]
        same = (self._parent[found] == parent) & (self._token[found] == token)
        return np.where(same, found, NOT_IN_TREE)


def _keys(parent: np.ndarray, token: np.ndarray) -> np.ndarray:
    """One number for each parent and token; no token has more than 32 bits."""
    return (parent << 32) + token


def unique_children(parent: np.ndarray, token: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first of each group of draft tokens `[k]` with the same parent and token, as rising
    indices; and for each draft token the number of its group, `[k]`."""
    first: dict[tuple[int, int], int] = {}
    keys = list(zip(parent.tolist(), token.tolist(), strict=True))
    for index, key in enumerate(keys):
        first.setdefault(key, index)
    number = {key: i for i, key in enumerate(first)}
    return np.array([*first.values()], np.int64), np.array([number[key] for key in keys], np.int64)
