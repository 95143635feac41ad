"""The tree of draft tokens below the last accepted token (PipeDec 3.3, SpecPipe 3.2).

Nodes are in breadth-first order, so a parent always has a smaller index than its
children, a level is a contiguous range, and every walk over the tree is a numpy operation
over whole levels. Indices change when the tree does; a node's `id` never does. Above 350 lines, as
every walk reads the same columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import sub

import numpy as np

from pipespec.core import NODE, NUM_COLUMNS, PARENT, POSITION, SEQUENCE, TOKEN
from pipespec.head.paths import NOT_IN_TREE, ChildIndex, DraftPaths, unique_children

ROOT = 0
# The least probability of a draft token in a tree.
MIN_PROBABILITY = 1e-12


class Tree:
    """Draft tokens below a root, as parallel arrays of `len(tree)` nodes.

    Attributes (all `[nodes]`, in breadth-first order):
        id: unique within the sequence.
        parent: index of the parent; the root is its own parent.
        parent_id: id of the parent; the root's is the id of the token before it.
        token, position: the token of the node, and its position in the text.
        logp, cum: log-probability given its parent, by the proposer, and given the root.
        fed: the node has entered the pipeline; set by `mark_fed`.
        fed_root_position: the position of the root when it did; undefined before.
        expanded: the proposer has proposed its children; others may have some from `DraftPaths`.
    """

    _COLUMNS = (
        *("id", "parent", "parent_id", "token", "position", "logp", "cum"),
        *("fed", "fed_root_position", "expanded"),
    )
    __slots__ = (*_COLUMNS, "_next_id", "_num_fed")

    def __init__(self, root_id: int, parent_id: int, token: int, position: int, *, fed: bool):
        self._next_id = root_id + 1
        self._reset(root_id, parent_id, token, position, fed)

    def _reset(self, root_id: int, parent_id: int, token: int, position: int, fed: bool) -> None:
        self.id = np.array([root_id])
        self.parent = np.array([ROOT])
        self.parent_id = np.array([parent_id])
        self.token = np.array([token])
        self.position = np.array([position])
        self.logp = np.zeros(1)
        self.cum = np.zeros(1)
        self.fed = np.array([fed])
        self._num_fed: int | None = None
        self.fed_root_position = np.array([position])
        self.expanded = np.array([False])

    def __len__(self) -> int:
        return len(self.id)

    @property
    def depth(self) -> np.ndarray:
        return self.position - self.position[ROOT]

    @property
    def num_fed(self) -> int:
        """How many nodes are fed; cached, as it is read more often than it changes."""
        if self._num_fed is None:
            self._num_fed = int(np.count_nonzero(self.fed))
        return self._num_fed

    def mark_fed(self, nodes: np.ndarray) -> None:
        self.fed[nodes] = True
        self._num_fed = None
        self.fed_root_position[nodes] = self.position[ROOT]

    def add_children(
        self,
        parents: np.ndarray,
        tokens: np.ndarray,
        logps: np.ndarray,
        limit: int | None = None,
        paths: DraftPaths | None = None,
    ) -> int:
        """Add candidates below their parents and mark the parents expanded.

        Where parents have children already, these are updated: a candidate takes the new
        log-probability, and any other child gets at most that of the least candidate and what the
        candidates leave. Paths add no nodes below expanded ones.

        Args:
            parents: indices `[k]` of nodes, which differ.
            tokens, logps: the candidates `[k, children]`, distinct within a row; a candidate
                with log-probability -inf is padding.
            limit: keep only so many of all of them, those of highest cumulative probability.
            paths: draft tokens below the candidates.

        Returns the number of nodes added.
        """
        count, last_level = len(self), int(self.position[-1])
        self.expanded[parents] = True
        parent = np.repeat(parents, tokens.shape[1])
        token, logp = tokens.ravel(), logps.ravel()
        cum = self.cum[parent] + logp
        chosen = np.flatnonzero(np.isfinite(cum))
        if limit is not None and len(chosen) > limit:
            chosen = chosen[_largest(cum[chosen], limit)]
        known = ChildIndex(self.parent, self.token)
        if len(again := known.children_of(parents)):
            self._cap_siblings(again, parents, logps)
        parent, token, logp = parent[chosen], token[chosen], logp[chosen]
        existing = known.find(parent, token)
        place = np.full(tokens.size, NOT_IN_TREE)  # the index of each candidate
        place[chosen] = self._place_nodes(existing, parent, token, logp)
        updated = len(again) > 0
        if paths is not None and len(paths.parents):
            place = np.concatenate((place, np.full(len(paths.parents), NOT_IN_TREE)))
            for level in paths.levels(tokens.size):
                there = place[paths.parents[level]] != NOT_IN_TREE
                level = level[there & (paths.logps[level] > -np.inf)]
                above, token, logp = (
                    place[paths.parents[level]],
                    paths.tokens[level],
                    paths.logps[level],
                )
                first, same = unique_children(above, token)  # different paths may meet in a node
                above, token, logp = above[first], token[first], logp[first]
                existing = ChildIndex(self.parent, self.token).find(above, token)
                free = ~self.expanded[above]
                updated |= bool((existing[free] != NOT_IN_TREE).any())
                existing[free] = self._place_nodes(
                    existing[free], above[free], token[free], logp[free]
                )
                place[tokens.size + level] = existing[same]
        added, new = len(self) - count, self.position[count:]
        if added and (new[0] < last_level or (new[1:] < new[:-1]).any()):
            self._select(np.argsort(self.position, kind="stable"))
        if updated:
            self._accumulate()
        return added

    def _place_nodes(
        self, existing: np.ndarray, parent: np.ndarray, token: np.ndarray, logp: np.ndarray
    ) -> np.ndarray:
        """Indices of draft tokens `[k]` below `parent`: those of `existing` nodes, or, where these
        are NOT_IN_TREE, of new ones at the end, after which the order must be restored."""
        there, place = existing != NOT_IN_TREE, existing.copy()
        self.logp[existing[there]] = logp[there]
        parent, token, logp = parent[~there], token[~there], logp[~there]
        count = len(parent)
        position = self.position[parent] + 1
        place[~there] = np.arange(len(self), len(self) + count)
        self._extend(
            id=np.arange(self._next_id, self._next_id + count),
            parent=parent,
            parent_id=self.id[parent],
            token=token,
            position=position,
            logp=logp,
            cum=self.cum[parent] + logp,
            fed=np.zeros(count, bool),
            fed_root_position=position,
            expanded=np.zeros(count, bool),
        )
        self._next_id += count
        return place

    def _cap_siblings(self, children: np.ndarray, parents: np.ndarray, logps: np.ndarray) -> None:
        """Cap the log-probabilities of `children` by those of the new candidates, `logps`."""
        least = np.where(np.isfinite(logps), logps, 0.0).min(1, initial=0.0)
        left = np.log(np.maximum(1 - np.exp(logps).sum(1), MIN_PROBABILITY))
        order = np.argsort(parents)
        row = order[np.searchsorted(parents, self.parent[children], sorter=order)]
        self.logp[children] = np.minimum(self.logp[children], np.minimum(least, left)[row])

    def _accumulate(self) -> None:
        ends = np.flatnonzero(np.diff(self.position)) + 1
        for level in np.split(np.arange(len(self)), ends)[1:]:
            self.cum[level] = self.cum[self.parent[level]] + self.logp[level]

    def append_path(self, node: int, tokens: Sequence[int]) -> int:
        """Add a path of tokens that are certain below a node without children; returns the id of
        the last one."""
        new, logp = np.array([NOT_IN_TREE]), np.zeros(1)
        for token in tokens:
            self.expanded[node] = True
            (node,) = self._place_nodes(new, np.array([node]), np.array([token]), logp).tolist()
        node_id = int(self.id[node])
        self._select(np.argsort(self.position, kind="stable"))
        return node_id

    def mark_terminal(self, node_id: int) -> None:
        self.expanded[self.index(node_id)] = True

    def index(self, node_id: int) -> int:
        return int(np.flatnonzero(self.id == node_id)[0])

    def advance(self, tokens: Sequence[int]) -> tuple[list[int], list[int]]:
        """Move the root along decided tokens; what is not below the last of them is pruned. A token
        that is not in the tree becomes a tree of its own.

        Returns the ids of the tokens' nodes, and at which depth each was fed as a draft token; 0:
        it was not.
        """
        path, ids, depths = [ROOT], [], []
        for token in tokens:
            child = self.child(path[-1], token)
            if child is None:
                above, position = int(self.id[path[-1]]), int(self.position[path[-1]]) + 1
                self._reset(self._next_id, above, token, position, fed=False)
                self._next_id += 1
                path, child = [], ROOT
            path.append(child)
            ids.append(int(self.id[child]))
            root = self.fed_root_position[child]
            depths.append(int(self.position[child] - root) if self.fed[child] else 0)
        self.prune(path)
        return ids, depths

    def child(self, parent: int, token: int) -> int | None:
        """The index of `parent`'s child with that token, or None."""
        found = ((self.parent == parent) & (self.token == token)).nonzero()[0]
        # The root is its own parent, and comes first.
        return int(found[-1]) if len(found) and found[-1] != ROOT else None

    def prune(self, path: Sequence[int]) -> None:
        """Keep only the subtree of the last node of a path, which begins at the root."""
        if len(path) == 1:
            return
        logps: list[float] = []  # of each, rounded as if the root moved node by node
        for node in path[1:]:
            logps.append(reduce(sub, logps, float(self.cum[node])))
        self._select(self.descends_from(path[-1]).nonzero()[0])
        self.parent[ROOT] = ROOT
        for logp in logps:
            self.cum -= logp

    def trim(self, capacity: int) -> None:
        """Drop the least probable nodes that were neither fed nor expanded until `capacity` nodes
        are left.

        A stage or the draft holds the rows of the others.
        """
        if (excess := len(self) - capacity) <= 0:
            return
        unseen = np.flatnonzero(~(self.fed | self.expanded))
        unseen = unseen[unseen != ROOT][::-1]  # of equal ones, descendants are dropped first
        keep = np.ones(len(self), bool)
        keep[unseen[_largest(-self.cum[unseen], excess)]] = False
        self._select(np.flatnonzero(keep))

    def drop_unfed(self) -> None:
        keep = self.fed.copy()
        keep[ROOT] = True
        if not keep.all():
            self._select(np.flatnonzero(keep))

    def descends_from(self, root: int) -> np.ndarray:
        """bool `[nodes]`: is `root` or below it. Pointer doubling, so log2(depth) passes."""
        reached = np.zeros(len(self), bool)
        reached[root] = True
        jump = self.parent
        for doubling in range(int(self.position[-1] - self.position[root]).bit_length()):
            if doubling:
                jump = jump.take(jump)
            reached |= reached.take(jump)
        return reached

    def path(self, node: int) -> list[int]:
        """Indices from the root to `node`, both included."""
        nodes = [node]
        while nodes[-1] != ROOT:
            nodes.append(int(self.parent[nodes[-1]]))
        return nodes[::-1]

    def nodes_before(self, end: int, chosen: np.ndarray) -> np.ndarray:
        """Rising indices of the nodes with `chosen` (bool `[nodes]`) at positions below `end`."""
        if self.position[-1] >= end:
            chosen = chosen & (self.position < end)
        return chosen.nonzero()[0]

    def most_probable(self, candidates: np.ndarray, count: int) -> np.ndarray:
        """The `count` most probable of `candidates` (rising indices), in breadth-first order.

        Ties go to the lower index; so, as no child is more probable than its parent, the choice is
        closed under ancestors where `candidates` are.
        """
        if len(candidates) > count:
            candidates = candidates[_largest(self.cum[candidates], count)]
        return candidates

    def least_of(self, chosen: np.ndarray, count: int) -> float:
        """The cumulative log-probability of the last of the `count` most probable nodes with
        `chosen` (bool `[nodes]`); -inf: there are no more than that."""
        if np.count_nonzero(chosen) <= count:
            return -np.inf
        cum = self.cum[chosen]
        cum.partition(-count)
        return float(cum[-count])

    def rows(self, sequence: int, nodes: np.ndarray) -> np.ndarray:
        """The nodes as rows of a batch, `[k, 6]`."""
        rows = np.zeros((len(nodes), NUM_COLUMNS), np.int64)
        rows[:, SEQUENCE] = sequence
        rows[:, NODE] = self.id[nodes]
        rows[:, PARENT] = self.parent_id[nodes]
        rows[:, TOKEN] = self.token[nodes]
        rows[:, POSITION] = self.position[nodes]
        return rows

    def _extend(self, **columns: np.ndarray) -> None:
        for name, values in columns.items():
            setattr(self, name, np.concatenate((getattr(self, name), values)))

    def _select(self, order: np.ndarray) -> None:
        """Keep the nodes `order`, in that order; the first is the root of all others."""
        self._num_fed = None
        place = np.zeros(len(self), np.int64)
        place[order] = np.arange(len(order))
        for name in self._COLUMNS:
            setattr(self, name, getattr(self, name).take(order))
        self.parent = place.take(self.parent)


def _largest(values: np.ndarray, count: int) -> np.ndarray:
    """bool `[n]`: the `count` largest of `values` `[n]`; ties go to the lower index."""
    if not 0 < count < len(values):
        return np.full(len(values), count > 0)
    rising = values.copy()
    rising.partition(-count)  # np.partition takes longer for so few
    chosen = values >= rising[-count]
    if (excess := np.count_nonzero(chosen) - count) > 0:
        chosen[(values == rising[-count]).nonzero()[0][-excess:]] = False
    return chosen
