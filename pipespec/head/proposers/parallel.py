"""Parallel drafts, which propose several tokens per pass (PARD, arXiv 2504.18583).

Below each node that is expanded there is a chain of rows with *mask tokens*. The i-th is i
positions behind the node, sees the node's text and the masks before it, and predicts the token
i + 1 positions behind the node, whatever the tokens between are: its *marginal* distribution. The
probability of a path below the node is the product of the marginals along it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipespec.core import NO_PARENT_NODE, NODE, NUM_COLUMNS, PARENT, POSITION, SEQUENCE, TOKEN
from pipespec.head.paths import DraftPaths
from pipespec.head.tree import Tree


@dataclass(frozen=True, slots=True)
class ParallelDraft:
    """A draft that proposes `tokens` per pass with its `mask_token`, at positions below
    `end_position`."""

    mask_token: int
    tokens: int
    end_position: int

    @property
    def num_masks(self) -> int:
        """Mask rows below a node."""
        return self.tokens - 1

    def select_nodes(self, tree: Tree, nodes: np.ndarray, room: int) -> np.ndarray:
        """The nodes that get mask rows: the likeliest that have positions for them, with `room`
        rows for all."""
        inside = nodes[tree.position[nodes] + self.num_masks < self.end_position]
        return tree.most_probable(inside, max(room, 0) // self.num_masks)

    def mask_rows(self, tree: Tree, sequence: int, nodes: np.ndarray) -> np.ndarray:
        """The masks below the nodes as rows of a batch, `[nodes * masks, 6]`, node by node.

        Their ids are below NO_PARENT_NODE, unlike those of all other rows, and are reused in every
        pass.
        """
        count = len(nodes) * self.num_masks
        ids = NO_PARENT_NODE - 1 - np.arange(count).reshape(-1, self.num_masks)
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
) -> DraftPaths:
    """The `count` most probable draft tokens below candidates, parents included.

    Args:
        cum: log-probabilities of the nodes, `[k]`.
        candidates: of their children given the nodes, `[k, children]`.
        tokens, logps: the marginals below the children of a node, `[k, masks, n]`, distinct along
            the last axis. -inf, in all of these: none.
    """
    value = (cum[:, None] + candidates).ravel()  # of the parents, on the current level
    node = np.repeat(np.arange(len(cum)), candidates.shape[1])
    index = np.arange(len(value))  # as `DraftPaths.parents` counts them
    found: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
    total = len(value)
    for level in range(tokens.shape[1]):
        if not len(value) or not tokens.shape[2]:
            break
        # A parent whose best child is not among the best `count` has no child among them.
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
        return DraftPaths(none, none, np.zeros(0))
    above, ahead, stated, values = (np.concatenate(column) for column in zip(*found, strict=True))
    kept = np.sort(_likeliest(values, count))
    before = candidates.size
    place = np.arange(before + len(values))
    place[before + kept] = np.arange(before, before + len(kept))
    return DraftPaths(place[above[kept]], ahead[kept], stated[kept])


def _likeliest(values: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` largest finite values, falling; of equal ones the first comes first,
    so that parents come before their children."""
    order = np.argsort(-values, kind="stable")[:count]
    return order[np.isfinite(values[order])]
