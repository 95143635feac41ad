"""The parent rule: which rows live, at one stage, for each request.

A stage learns of rows and of verdicts in any relative order. Of a request it keeps the *tip* (the
last committed row) and the live nodes, and

    a row is valid exactly if its parent is live here or is the tip.

Everything else was pruned while it was in flight. A verdict names the tokens that follow the
tip. If the tip's child with that token is here, it becomes the tip; if not, everything under
the tip is dead, and the first row that arrives with that parent and that token is the tip.
Nothing else is needed to keep the ranks consistent: no hit index, no version, no flush.

Each request has a `Lineage`, which applies the rule; the nodes of all of them stand in the columns
of one `LiveNodes`, so that what a batch brings is written for all requests at once. This module
is pure book-keeping; `pipespec.engine.runner` gives every node its KV slot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipespec.core import GUESS, KIND, NO_NODE, NODE, PARENT, POSITION, SEQUENCE, TOKEN, Verdict

# Local index of the tip, in every sequence: a node's children find their parent there once it is
# committed.
TIP = 0
DROPPED = -1

# The sequence of a free local index: no sequence has that number.
FREE = -(2**62)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a verdict did: local indices that joined the sequence, in order, and that died, in
    parts."""

    committed: list[int]
    dead: list[np.ndarray]


class LiveNodes:
    """The live nodes of all sequences of a stage, addressed by small reusable local indices.

    Columns, `[capacity]`: `sequence` (FREE: of none), `node` (its id), `parent` (the
    local index), `token`, `position`, `slot` (set by whoever holds KV). `mask[i, j]` says whether
    live node i may attend to live node j (an ancestor or itself); committed rows are visible to
    all and stand in no column. Columns of free indices are False in every live row.
    """

    _COLUMNS = ("sequence", "node", "parent", "token", "position", "slot")

    def __init__(self, capacity: int = 64):
        self.sequence = np.full(capacity, FREE)
        self.node, self.parent, self.token, self.position, self.slot = np.zeros(
            (5, capacity), np.int64
        )
        self.mask = np.zeros((capacity, capacity), bool)
        self._free = list(range(capacity - 1, TIP, -1))

    def of(self, sequence: int) -> np.ndarray:
        """Local indices of a sequence's live nodes, rising."""
        return (self.sequence == sequence).nonzero()[0]  # which flatnonzero wraps, at a cost

    def admit(self, rows: np.ndarray, lineages: Mapping[int, Lineage]) -> np.ndarray:
        """Take in the rows `[rows, 6]` of a batch, in order, by the parent rule.

        Returns for each row a live node's local index, TIP if it was committed on arrival, or
        DROPPED. Of a sequence, committed rows precede live ones.
        """
        local = np.array([lineages[row[SEQUENCE]].admit(row) for row in rows.tolist()], np.int64)
        arrived = np.flatnonzero(local > TIP)
        self._enter(rows[arrived], local[arrived])
        return local

    def _enter(self, rows: np.ndarray, local: np.ndarray) -> None:
        for name, column in zip(
            ("sequence", "node", "token", "position"),
            (SEQUENCE, NODE, TOKEN, POSITION),
            strict=True,
        ):
            getattr(self, name)[local] = rows[:, column]
        waits = np.zeros(len(self.node), bool)  # for the mask of its parent
        waits[local] = True
        while len(local):  # one generation after another
            parent = self.parent[local]
            ready = ~waits[parent]
            here = local[ready]
            self.mask[here] = self.mask[parent[ready]]
            self.mask[here, here] = True
            waits[here] = False
            local = local[~ready]

    def take(self) -> int:
        """A free local index."""
        if not self._free:
            self._grow()
        return self._free.pop()

    def commit(self, child: int, live: np.ndarray) -> None:
        """A child of the tip is the tip now; `live` are the nodes below it."""
        if len(live):
            self.mask[live, child] = False
            self.parent[live[self.parent.take(live) == child]] = TIP
        self.sequence[child] = FREE
        self._free.append(child)

    def free(self, local: np.ndarray) -> None:
        self.sequence[local] = FREE
        self._free += local.tolist()

    def _grow(self) -> None:
        old = len(self.node)
        for name in self._COLUMNS:
            values = getattr(self, name)
            more = np.full(old, FREE if name == "sequence" else 0)
            setattr(self, name, np.concatenate((values, more)))
        mask = np.zeros((2 * old, 2 * old), bool)
        mask[:old, :old] = self.mask
        self.mask = mask
        self._free = list(range(2 * old - 1, old - 1, -1))

    def check(self) -> None:
        """Assert the invariants, for tests."""
        live = np.flatnonzero(self.sequence != FREE)
        assert not self.mask[TIP].any() and self.sequence[TIP] == FREE
        assert sorted([*self._free, *live.tolist()]) == list(range(1, len(self.node)))


class Lineage:
    """Committed tip of one request, and which of the live nodes are its own."""

    def __init__(self, sequence: int, nodes: LiveNodes, length: int = 0):
        """`length`: committed tokens that it begins with, which another sequence has computed."""
        self.sequence = sequence
        self.nodes = nodes
        # What was decided before a sequence was opened has its positions for node ids.
        self.tip = length - 1 if length else NO_NODE
        self.length = length
        self.expected: deque[int] = deque()
        self._index = {self.tip: TIP}

    @property
    def decided(self) -> int:
        """Length of the sequence as far as verdicts have told it, arrived here or not."""
        return self.length + len(self.expected)

    @property
    def live(self) -> np.ndarray:
        """Local indices of its live nodes, rising."""
        return self.nodes.of(self.sequence)

    def holds(self, node: int) -> bool:
        """Whether a node is live here, or the tip."""
        return node in self._index

    def admit(self, row: Sequence[int]) -> int:
        """What becomes of a row of this request: see `LiveNodes.admit`, which calls this and
        writes the columns of what comes to live."""
        node, parent = row[NODE], row[PARENT]
        if row[KIND] != GUESS or self.expected:
            if parent != self.tip or (row[KIND] == GUESS and row[TOKEN] != self.expected[0]):
                return DROPPED
            if self.expected:
                expected = self.expected.popleft()
                assert expected == row[TOKEN], "a replayed row contradicts the verdict"
            self._become_tip(node)
            return TIP
        above = self._index.get(parent)
        if above is None:
            return DROPPED
        assert node not in self._index, f"node {node} arrived twice"
        here = self._index[node] = self.nodes.take()
        self.nodes.parent[here] = above
        return here

    def apply(self, verdict: Verdict, ids: Sequence[int] | None = None) -> Outcome:
        """Walk the verdict's tokens down from the tip; tokens told before are skipped.

        `ids` are the node ids of the tokens, if they are known: a row with another id is a guess
        that was dropped and made again, and dies.
        """
        assert verdict.base <= self.decided, "a verdict is missing"
        committed: list[int] = []
        dead: list[np.ndarray] = []
        first = self.decided - verdict.base
        tokens = verdict.tokens[first:]
        live = self.live
        for told, token in enumerate(tokens):
            node = None if ids is None else ids[first + told]
            child = None if self.expected else self._child_of_tip(live, token, node)
            doomed, live = self._parted(live, child)
            if len(doomed):
                self._forget(doomed, survivors=len(live))
                dead.append(doomed)
            if child is None:
                self.expected.extend(tokens[told:])
                break
            committed.append(child)
            live = live[live != child]
            self.nodes.commit(child, live)
            self._become_tip(int(self.nodes.node[child]))
        return Outcome(committed, dead)

    def discard(self, nodes: Sequence[int]) -> np.ndarray:
        """Give up live nodes, and with each all below it; the local indices that they had."""
        local = np.array([self._index.pop(node) for node in nodes], np.int64)
        self.nodes.free(local)
        return local

    def release(self) -> np.ndarray:
        """Give its live nodes up; the local indices that they had."""
        live = self.live
        self.nodes.free(live)
        return live

    def _child_of_tip(self, live: np.ndarray, token: int, node: int | None) -> int | None:
        nodes = self.nodes
        is_it = nodes.token.take(live) == token if node is None else nodes.node.take(live) == node
        found = live[is_it & (nodes.parent.take(live) == TIP)]
        return int(found[0]) if len(found) else None

    def _parted(self, live: np.ndarray, child: int | None) -> tuple[np.ndarray, np.ndarray]:
        """Those of the nodes that die when `child` (None: what is not here) becomes the tip, and
        those that stay, itself among them."""
        if child is None:
            return live, live[:0]
        stays = self.nodes.mask[:, child].take(live)
        return live[~stays], live[stays]

    def _become_tip(self, node: int) -> None:
        del self._index[self.tip]
        self._index[node] = TIP
        self.tip = node
        self.length += 1

    def _forget(self, doomed: np.ndarray, survivors: int) -> None:
        self.nodes.free(doomed)
        if not survivors:  # a miss: one by one would take longer than a verdict may
            self._index = {self.tip: TIP}
            return
        for node in self.nodes.node[doomed].tolist():
            del self._index[node]

    def check(self) -> None:
        """Assert the invariants, for tests."""
        nodes, live = self.nodes, self.live
        nodes.check()
        assert {self.tip: TIP} | dict(
            zip(nodes.node[live].tolist(), live.tolist(), strict=True)
        ) == self._index
        for i in live.tolist():
            expected = {i}
            at = int(nodes.parent[i])
            while at != TIP:
                assert nodes.sequence[at] == self.sequence, "a parent is live or the tip"
                expected.add(at)
                at = int(nodes.parent[at])
            assert set(np.flatnonzero(nodes.mask[i]).tolist()) == expected
        assert not self.expected or not len(live), "nothing lives under an absent tip"
