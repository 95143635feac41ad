"""The tree of guesses that hangs from the last accepted token (PipeDec 3.3, SpecPipe 3.2).

Nodes stand in breadth-first order, so a parent always has a smaller index than its
children, a level is a contiguous range, and every walk over the tree is a numpy operation
over whole levels. Indices change when the tree does; a node's `id` never does.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np

from pipespec.core import NODE, NUM_COLUMNS, PARENT, POSITION, SEQUENCE, TOKEN
from pipespec.head.paths import NOWHERE, Known, Paths, distinct

ROOT = 0
# No guess that hangs in a tree is less likely.
SMALLEST = 1e-12


class Tree:
    """Guesses below a root, as parallel arrays of `len(tree)` nodes.

    Attributes (all `[nodes]`, in breadth-first order):
        id: unique within the sequence.
        parent: index of the parent; the root is its own parent.
        parent_id: id of the parent; the root's is the id of the token before it.
        token, position: what the node says and where in the text.
        logp: log-probability given its parent, as the source stated it.
        cum: log-probability given the root, i.e. the sum of `logp` along the path.
        fed: the node has entered the pipeline; written by `feed` alone.
        fed_under: the position of the root when it did; of no meaning before.
        expanded: a source has proposed its children; others may have some from `Paths`.
        scored: the mid-size model of a cascade was asked what follows, or has said it.
    """

    _COLUMNS = (
        *("id", "parent", "parent_id", "token", "position", "logp", "cum"),
        *("fed", "fed_under", "expanded", "scored"),
    )
    __slots__ = (*_COLUMNS, "_next_id", "_num_fed", "__weakref__")

    def __init__(self, root_id: int, parent_id: int, token: int, position: int, *, fed: bool):
        self._next_id = root_id + 1
        self._plant(root_id, parent_id, token, position, fed)

    def _plant(self, root_id: int, parent_id: int, token: int, position: int, fed: bool) -> None:
        self.id = np.array([root_id])
        self.parent = np.array([ROOT])
        self.parent_id = np.array([parent_id])
        self.token = np.array([token])
        self.position = np.array([position])
        self.logp = np.zeros(1)
        self.cum = np.zeros(1)
        self.fed = np.array([fed])
        self._num_fed: int | None = None
        self.fed_under = np.array([position])
        self.expanded = np.array([False])
        self.scored = np.array([False])

    def __len__(self) -> int:
        return len(self.id)

    @property
    def depth(self) -> np.ndarray:
        """Distance from the root, `[nodes]`."""
        return self.position - self.position[ROOT]

    @property
    def root_fed_at(self) -> int:
        """How far below the root of then the root of now stood when it was fed; 0: it was not fed
        as a guess."""
        return int(self.position[ROOT] - self.fed_under[ROOT]) if self.fed[ROOT] else 0

    @property
    def num_fed(self) -> int:
        """How many nodes are fed; asked more often than it changes."""
        if self._num_fed is None:
            self._num_fed = int(np.count_nonzero(self.fed))
        return self._num_fed

    def feed(self, nodes: np.ndarray) -> None:
        """The nodes enter the pipeline."""
        self.fed[nodes] = True
        self._num_fed = None
        self.fed_under[nodes] = self.position[ROOT]

    def append(
        self,
        parents: np.ndarray,
        tokens: np.ndarray,
        logps: np.ndarray,
        limit: int | None = None,
        paths: Paths | None = None,
    ) -> int:
        """Hang candidates below their parents and mark the parents expanded.

        What hangs there already is stated anew: a candidate takes the new log-probability, and
        another child is no likelier than the least of them, nor than what they leave. What was fed
        stays so, and whatever is below follows. Below nodes that are expanded a path adds nothing:
        the source has said what follows them.

        Args:
            parents: indices `[k]` of nodes, which differ.
            tokens, logps: the candidates `[k, children]`, distinct within a row; a candidate
                with log-probability -inf is none.
            limit: keep only so many of all of them, those of highest cumulative probability.
            paths: guesses further below the candidates.

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
        known = Known(self.parent, self.token)
        if len(again := known.below(parents)):
            self._lower(again, parents, logps)
        parent, token, logp = parent[chosen], token[chosen], logp[chosen]
        stood = known.find(parent, token)
        place = np.full(tokens.size, NOWHERE)  # where in the tree each candidate stands
        place[chosen] = self._put(stood, parent, token, logp)
        restated = len(again) > 0
        if paths is not None and len(paths.above):
            place = np.concatenate((place, np.full(len(paths.above), NOWHERE)))
            for level in paths.levels(tokens.size):
                there = place[paths.above[level]] != NOWHERE
                level = level[there & (paths.logps[level] > -np.inf)]
                above, token, logp = (
                    place[paths.above[level]],
                    paths.tokens[level],
                    paths.logps[level],
                )
                first, same = distinct(above, token)  # below nodes above one another paths meet
                above, token, logp = above[first], token[first], logp[first]
                stood = Known(self.parent, self.token).find(above, token)
                free = ~self.expanded[above]
                restated |= bool((stood[free] != NOWHERE).any())
                stood[free] = self._put(stood[free], above[free], token[free], logp[free])
                place[tokens.size + level] = stood[same]
        added, new = len(self) - count, self.position[count:]
        if added and (new[0] < last_level or (new[1:] < new[:-1]).any()):
            self._select(np.argsort(self.position, kind="stable"))
        if restated:
            self._accumulate()
        return added

    def _put(
        self, stood: np.ndarray, parent: np.ndarray, token: np.ndarray, logp: np.ndarray
    ) -> np.ndarray:
        """Indices of guesses `[k]` below `parent`. They `stood` there or, NOWHERE, come last, so
        that the order is to be mended."""
        there, place = stood != NOWHERE, stood.copy()
        self.logp[stood[there]] = logp[there]
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
            fed_under=position,
            expanded=np.zeros(count, bool),
            scored=np.zeros(count, bool),
        )
        self._next_id += count
        return place

    def _lower(self, children: np.ndarray, parents: np.ndarray, logps: np.ndarray) -> None:
        """Let `children` of `parents` be no likelier than the candidates with `logps` allow."""
        least = np.where(np.isfinite(logps), logps, 0.0).min(1, initial=0.0)
        left = np.log(np.maximum(1 - np.exp(logps).sum(1), SMALLEST))
        order = np.argsort(parents)
        row = order[np.searchsorted(parents, self.parent[children], sorter=order)]
        self.logp[children] = np.minimum(self.logp[children], np.minimum(least, left)[row])

    def _accumulate(self) -> None:
        """Cumulative log-probabilities from those of the nodes."""
        ends = np.flatnonzero(np.diff(self.position)) + 1
        for level in np.split(np.arange(len(self)), ends)[1:]:
            self.cum[level] = self.cum[self.parent[level]] + self.logp[level]

    def hang(self, node: int, tokens: Sequence[int]) -> int:
        """Hang tokens that follow for certain, one after the other, below a node that has no
        children yet; the id of the last one."""
        count, position = len(tokens), int(self.position[node])
        ids = np.arange(self._next_id, self._next_id + count)
        above = np.array([node, *range(len(self), len(self) + count - 1)])
        self.expanded[node] = True
        self._extend(
            id=ids,
            parent=above,
            parent_id=np.array([self.id[node], *ids[:-1]]),
            token=np.array(tokens),
            position=position + 1 + np.arange(count),
            logp=np.zeros(count),
            cum=np.full(count, self.cum[node]),
            fed=np.zeros(count, bool),
            fed_under=position + 1 + np.arange(count),
            expanded=np.arange(count) < count - 1,
            scored=np.zeros(count, bool),
        )
        self._next_id += count
        self._select(np.argsort(self.position, kind="stable"))
        return int(ids[-1])

    def leave(self, node_id: int) -> None:
        """Nothing follows a node that has no children yet."""
        self.expanded[self.index(node_id)] = True

    def index(self, node_id: int) -> int:
        """The index of the node with that id."""
        return int(np.flatnonzero(self.id == node_id)[0])

    def indices(self, ids: np.ndarray) -> np.ndarray:
        """The indices of the nodes with these ids, `[k]`; NOWHERE: it is gone."""
        order = np.argsort(self.id)
        place = order[np.searchsorted(self.id, ids, sorter=order) % len(order)]
        return np.where(self.id[place] == ids, place, NOWHERE)

    def copy(self) -> Tree:
        """The tree as it is now, which does not change with this one."""
        other = copy(self)
        for name in self._COLUMNS:
            setattr(other, name, getattr(self, name).copy())
        return other

    def advance(self, token: int) -> bool:
        """The verdict's next token: its node becomes the root, all else is pruned.

        Returns whether the token was in the tree. If it was not, the tree is that token alone.
        """
        child = self.child(ROOT, token)
        if child is None:
            self._plant(
                self._next_id, int(self.id[ROOT]), token, int(self.position[ROOT]) + 1, fed=False
            )
            self._next_id += 1
            return False
        self.prune(child)
        return True

    def child(self, parent: int, token: int) -> int | None:
        """The index of `parent`'s child with that token, or None."""
        found = ((self.parent == parent) & (self.token == token)).nonzero()[0]
        return next((int(child) for child in found if child != ROOT), None)

    def children(self, parents: np.ndarray) -> list[np.ndarray]:
        """The indices of what hangs below each of `parents`."""
        below = 1 + np.argsort(self.parent[1:], kind="stable")
        above = self.parent[below]
        starts = np.searchsorted(above, parents, "left")
        ends = np.searchsorted(above, parents, "right")
        return [below[i:j] for i, j in zip(starts.tolist(), ends.tolist(), strict=True)]

    def prune(self, root: int) -> None:
        """Keep the subtree of `root` alone; cumulative log-probabilities start there anew."""
        self._select(self.descends_from(root).nonzero()[0])
        self.parent[ROOT] = ROOT
        self.cum -= self.cum[ROOT]

    def trim(self, capacity: int) -> None:
        """Drop the least probable nodes that nobody has seen until `capacity` nodes are left.

        A node that was fed or expanded stays: a stage or the draft holds its row. So must those
        above it have been.
        """
        if (excess := len(self) - capacity) <= 0:
            return
        unseen = np.flatnonzero(~(self.fed | self.expanded))
        unseen = unseen[unseen != ROOT][::-1]  # of equal ones, those below others go first
        keep = np.ones(len(self), bool)
        keep[unseen[_largest(-self.cum[unseen], excess)]] = False
        self._select(np.flatnonzero(keep))

    def drop_unfed(self) -> None:
        """Drop what never entered the pipeline; the root stays."""
        keep = self.fed.copy()
        keep[ROOT] = True
        if not keep.all():
            self._select(np.flatnonzero(keep))

    def descends_from(self, root: int) -> np.ndarray:
        """bool `[nodes]`: is `root` or below it. Pointer doubling, so log2(depth) passes."""
        reached = np.zeros(len(self), bool)
        reached[root] = True
        jump = self.parent
        for _ in range(int(self.position[-1] - self.position[root]).bit_length()):
            reached |= reached.take(jump)
            jump = jump.take(jump)
        return reached

    def path(self, node: int) -> list[int]:
        """Indices from the root to `node`, both included."""
        nodes = [node]
        while nodes[-1] != ROOT:
            nodes.append(int(self.parent[nodes[-1]]))
        return nodes[::-1]

    def before(self, end: int, chosen: np.ndarray) -> np.ndarray:
        """Rising indices of the nodes with `chosen` (bool `[nodes]`) at positions below `end`."""
        if self.position[-1] >= end:
            chosen = chosen & (self.position < end)
        return chosen.nonzero()[0]

    def best(self, candidates: np.ndarray, count: int) -> np.ndarray:
        """The `count` most probable of `candidates` (rising indices), in breadth-first order.

        Ties go to the lower index. As no child is more probable than its parent, the choice
        among all nodes of a kind that only descendants can lack is closed under ancestors.
        """
        if len(candidates) > count:
            candidates = candidates[_largest(self.cum[candidates], count)]
        return candidates

    def rows(self, sequence: int, nodes: np.ndarray) -> np.ndarray:
        """The nodes as rows of a batch, `[k, 6]`."""
        rows = np.zeros((len(nodes), NUM_COLUMNS), np.int64)
        rows[:, SEQUENCE] = sequence
        rows[:, NODE] = self.id[nodes]
        rows[:, PARENT] = self.parent_id[nodes]
        rows[:, TOKEN] = self.token[nodes]
        rows[:, POSITION] = self.position[nodes]
        return rows

    def check(self) -> None:
        """Assert the invariants that the rest of the code relies on."""
        index = np.arange(len(self))
        assert self.parent[ROOT] == ROOT and self.cum[ROOT] == 0
        assert self.num_fed == np.count_nonzero(self.fed)
        assert (self.parent[1:] < index[1:]).all(), "a parent stands before its children"
        assert (np.diff(self.position) >= 0).all(), "breadth-first order"
        assert (self.position[1:] == self.position[self.parent[1:]] + 1).all()
        assert (self.parent_id[1:] == self.id[self.parent[1:]]).all()
        assert len(set(self.id.tolist())) == len(self)
        assert np.allclose(self.cum[1:], self.cum[self.parent[1:]] + self.logp[1:])
        siblings: Sequence[tuple[int, int]] = list(
            zip(self.parent[1:].tolist(), self.token[1:].tolist(), strict=True)
        )
        assert len(set(siblings)) == len(siblings), "siblings differ in their token"

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
