"""The parent rule: which rows live, at one stage, for one request.

A stage learns of rows and of verdicts in any relative order. It keeps the *tip* (the last
committed row) and the live nodes, and

    a row is valid exactly if its parent is live here or is the tip.

Everything else was pruned while it was in flight. A verdict names the tokens that follow the
tip. If the tip's child with that token is here, it becomes the tip; if not, everything under
the tip is dead, and the first row that arrives with that parent and that token is the tip.
Nothing else is needed to keep the ranks consistent: no hit index, no version, no flush.

This module is pure book-keeping; `pipespec.engine.runner` gives every node its KV slot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pipespec.core import GUESS, KIND, NO_NODE, NODE, PARENT, POSITION, TOKEN, Verdict

# Local index of the tip: a node's children find their parent there once it is committed.
TIP = 0
DROPPED = -1


@dataclass(frozen=True, slots=True)
class Admission:
    """What became of the rows of one batch, all `[rows]`.

    `local` is a live node's index in this lineage, TIP for a row that was committed on
    arrival, or DROPPED. Committed rows precede live ones.
    """

    local: np.ndarray

    @property
    def kept(self) -> np.ndarray:
        return self.local != DROPPED


@dataclass(frozen=True, slots=True)
class Outcome:
    """What verdicts did: local indices that joined the sequence, in order, and that died."""

    committed: list[int]
    dead: np.ndarray


class Lineage:
    """Committed tip and live nodes of one request, addressed by small reusable indices.

    `mask[i, j]` says whether live node i may attend to live node j (an ancestor or itself);
    committed rows are visible to all and stand in no column. Columns of free indices are
    False in every live row.
    """

    def __init__(self, capacity: int = 64):
        self.tip = NO_NODE
        self.length = 0
        self.expected: deque[int] = deque()
        self.live = np.zeros(capacity, bool)
        self.node = np.zeros(capacity, np.int64)
        self.parent = np.zeros(capacity, np.int64)
        self.token = np.zeros(capacity, np.int64)
        self.position = np.zeros(capacity, np.int64)
        self.mask = np.zeros((capacity, capacity), bool)
        self._index = {NO_NODE: TIP}
        self._free = list(range(capacity - 1, TIP, -1))

    @property
    def decided(self) -> int:
        """Length of the sequence as far as verdicts have told it, arrived here or not."""
        return self.length + len(self.expected)

    def holds(self, nodes: Iterable[int]) -> np.ndarray:
        """bool `[nodes]`: which of the nodes are live here, or the tip."""
        return np.fromiter((node in self._index for node in nodes), bool)

    def admit(self, rows: np.ndarray) -> Admission:
        """Take in one request's rows `[rows, 6]` of a batch, in order, by the parent rule."""
        local = np.full(len(rows), DROPPED)
        start = 0
        while start < len(rows) and (rows[start, KIND] != GUESS or self.expected):
            row = rows[start]
            if row[PARENT] == self.tip and (row[KIND] != GUESS or row[TOKEN] == self.expected[0]):
                if self.expected:
                    expected = self.expected.popleft()
                    assert expected == row[TOKEN], "a replayed row contradicts the verdict"
                self._become_tip(int(row[NODE]))
                local[start] = TIP
            start += 1
        self._admit_live(rows[start:], local[start:])
        return Admission(local)

    def _admit_live(self, rows: np.ndarray, local: np.ndarray) -> None:
        """Fill `local` for tree rows when no token is awaited."""
        if len(self._free) < len(rows):
            self._grow(len(rows))
        index, free = self._index, self._free
        generations: list[list[int]] = []
        generation_of: dict[int, int] = {}
        parents = rows[:, PARENT].tolist()
        for i, node in enumerate(rows[:, NODE].tolist()):
            parent = index.get(parents[i])
            if parent is None:
                continue
            assert node not in index, f"node {node} arrived twice"
            here = index[node] = free.pop()
            local[i] = here
            self.parent[here] = parent
            generation = generation_of.get(parent, -1) + 1
            generation_of[here] = generation
            if generation == len(generations):
                generations.append([])
            generations[generation].append(here)
        kept = np.flatnonzero(local != DROPPED)
        admitted = local[kept]
        self.live[admitted] = True
        self.node[admitted] = rows[kept, NODE]
        self.token[admitted] = rows[kept, TOKEN]
        self.position[admitted] = rows[kept, POSITION]
        for workers in generations:  # parents of one generation are all of earlier ones
            self.mask[workers] = self.mask[self.parent[workers]]
            self.mask[workers, workers] = True

    def apply(self, verdict: Verdict, nodes: Sequence[int] | None = None) -> Outcome:
        """Walk the verdict's tokens down from the tip; tokens told before are skipped.

        `nodes` are the ids of the tokens, if they are known: a row with another id is a guess that
        was dropped and made again, and dies.
        """
        assert verdict.base <= self.decided, "a verdict is missing"
        committed: list[int] = []
        dead: list[np.ndarray] = []
        first = self.decided - verdict.base
        tokens = verdict.tokens[first:]
        for told, token in enumerate(tokens):
            node = None if nodes is None else nodes[first + told]
            child = None if self.expected else self._child_of_tip(token, node)
            doomed = np.flatnonzero(
                self.live if child is None else self.live & ~self.mask[:, child]
            )
            if len(doomed):
                self._forget(doomed)
                dead.append(doomed)
            if child is None:
                self.expected.extend(tokens[told:])
                break
            committed.append(child)
            self.live[child] = False
            self.mask[:, child] = False
            self.parent[self.live & (self.parent == child)] = TIP
            self._free.append(child)
            self._become_tip(int(self.node[child]))
        return Outcome(committed, np.concatenate(dead) if dead else np.empty(0, np.int64))

    def _child_of_tip(self, token: int, node: int | None) -> int | None:
        is_it = self.token == token if node is None else self.node == node
        found = np.flatnonzero(self.live & (self.parent == TIP) & is_it)
        return int(found[0]) if len(found) else None

    def _become_tip(self, node: int) -> None:
        del self._index[self.tip]
        self._index[node] = TIP
        self.tip = node
        self.length += 1

    def _forget(self, doomed: np.ndarray) -> None:
        self.live[doomed] = False
        self._free.extend(doomed.tolist())
        if not self.live.any():  # a miss: one by one would take longer than a verdict may
            self._index = {self.tip: TIP}
            return
        for node in self.node[doomed].tolist():
            del self._index[node]

    def _grow(self, at_least: int) -> None:
        old = len(self.live)
        new = max(2 * old, old + at_least)
        for name in ("live", "node", "parent", "token", "position"):
            values = getattr(self, name)
            setattr(self, name, np.concatenate((values, np.zeros(new - old, values.dtype))))
        mask = np.zeros((new, new), bool)
        mask[:old, :old] = self.mask
        self.mask = mask
        self._free[:0] = range(new - 1, old - 1, -1)

    def check(self) -> None:
        """Assert the invariants, for tests."""
        live = np.flatnonzero(self.live)
        assert not self.live[TIP] and not self.mask[TIP].any()
        assert sorted([*self._free, *live.tolist()]) == list(range(1, len(self.live)))
        assert {self.tip: TIP} | dict(
            zip(self.node[live].tolist(), live.tolist(), strict=True)
        ) == self._index
        for i in live.tolist():
            expected = {i}
            at = int(self.parent[i])
            while at != TIP:
                assert self.live[at], "the parent of a live node is live or the tip"
                expected.add(at)
                at = int(self.parent[at])
            assert set(np.flatnonzero(self.mask[i]).tolist()) == expected
        assert not self.expected or not len(live), "nothing lives under an absent tip"
