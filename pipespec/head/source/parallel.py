"""Drafts that guess several tokens per pass (PARD, arXiv 2504.18583).

Below each node that is expanded stand rows of *mask tokens*, one under the other. The i-th sees the
node's text and the masks before it, stands i places behind the node and guesses what follows there:
the *marginal* of a token i + 1 places ahead, whatever stands between. A path below the node is as
likely as the product of the marginals along it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipespec.core import NO_NODE, NODE, NUM_COLUMNS, PARENT, POSITION, SEQUENCE, TOKEN
from pipespec.head.paths import Paths
from pipespec.head.tree import Tree


@dataclass(frozen=True, slots=True)
class Parallel:
    """How a draft guesses `tokens` per pass: with its `mask_token`, at positions below `end`."""

    mask_token: int
    tokens: int
    end: int

    @property
    def masks(self) -> int:
        """Rows of masks below a node."""
        return self.tokens - 1

    def below(self, tree: Tree, nodes: np.ndarray, room: int) -> np.ndarray:
        """Those of the nodes that get masks: the likeliest that have positions for them, with
        `room` rows for all."""
        inside = nodes[tree.position[nodes] + self.masks < self.end]
        return tree.best(inside, max(room, 0) // self.masks)

    def rows(self, tree: Tree, sequence: int, nodes: np.ndarray) -> np.ndarray:
        """The masks below the nodes as rows of a batch, `[nodes * masks, 6]`, node by node.

        Their ids are below NO_NODE, which no other row has, and are given anew in every pass.
        """
        count = len(nodes) * self.masks
        ids = NO_NODE - 1 - np.arange(count).reshape(-1, self.masks)
        rows = np.zeros((count, NUM_COLUMNS), np.int64)
        rows[:, SEQUENCE] = sequence
        rows[:, NODE] = ids.ravel()
        rows[:, PARENT] = np.column_stack((tree.id[nodes], ids[:, :-1])).ravel()
        rows[:, TOKEN] = self.mask_token
        rows[:, POSITION] = (tree.position[nodes, None] + np.arange(1, self.tokens)).ravel()
        return rows


def best_paths(
    cum: np.ndarray,
    candidates: np.ndarray,
    tokens: np.ndarray,
    logps: np.ndarray,
    count: int,
) -> Paths:
    """The `count` most probable guesses below candidates; those above them are among them.

    Args:
        cum: log-probabilities of the nodes, `[k]`.
        candidates: of their children given them, `[k, children]`.
        tokens, logps: the marginals below: what may stand so many places behind the children of a
            node, `[k, masks, n]`, distinct along the last axis. -inf, in all of these: none.
    """
    value = (cum[:, None] + candidates).ravel()  # of the guesses above, on the level at hand
    node = np.repeat(np.arange(len(cum)), candidates.shape[1])
    index = np.arange(len(value))  # as `Paths.above` counts them
    found: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
    total = len(value)
    for level in range(tokens.shape[1]):
        if not len(value) or not tokens.shape[2]:
            break
        # Who is not among so many by its best child has no child among the best.
        best = value + logps[node, level].max(1)
        likely = _likeliest(best, count)
        value, node, index = value[likely], node[likely], index[likely]
        chosen = logps[node, level]
        values = (value[:, None] + chosen).ravel()
        likely = _likeliest(values, count)
        above, column = np.divmod(likely, tokens.shape[2])
        found.append(
            (
                index[above],
                tokens[node[above], level, column],
                chosen[above, column],
                values[likely],
            )
        )
        value, node, index = values[likely], node[above], np.arange(total, total + len(likely))
        total += len(likely)
    if not found:
        none = np.zeros(0, np.int64)
        return Paths(none, none, np.zeros(0))
    above, told, stated, values = (np.concatenate(column) for column in zip(*found, strict=True))
    kept = np.sort(_likeliest(values, count))
    before = candidates.size
    place = np.arange(before + len(values))
    place[before + kept] = np.arange(before, before + len(kept))
    return Paths(place[above[kept]], told[kept], stated[kept])


def _likeliest(values: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` largest finite values, falling; of equal ones the first comes first,
    so that a guess stands before those below it."""
    order = np.argsort(-values, kind="stable")[:count]
    return order[np.isfinite(values[order])]
