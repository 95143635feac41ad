"""The parent rule, which decides at one stage which rows of a sequence are valid.

Rows and verdicts reach a stage in any relative order. For each sequence the stage keeps the *tip*
(the last committed row) and the live nodes, and

    a row is valid exactly if its parent is live here or is the tip.

All other rows were pruned while they were in flight. A verdict contains the tokens that follow the
tip. If the tip has a child here with the next token, that child becomes the tip and its siblings
are dead. Otherwise all nodes below the tip are dead, and the first row that arrives with that
parent and that token becomes the tip. Nothing else is needed to keep the ranks consistent: no hit
index, no tree version, no flush.

Each sequence has a `Lineage`, which applies the rule. The nodes of all sequences are in the columns
of one `LiveNodes`, so that the rows of a batch are written at once. This module only keeps books;
`pipespec.engine.slice.runner` allocates the KV slots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from pipespec.core import (
    DRAFT,
    KIND,
    NO_PARENT_NODE,
    NODE,
    PARENT,
    POSITION,
    SEQUENCE,
    TOKEN,
    Verdict,
)

# The local index of the tip of every sequence. When a node is committed, its children get this
# index as their parent.
TIP = 0
# The result of `LiveNodes.admit` for a row that is not valid.
DROPPED = -1

# The sequence number of unused local indices; no sequence has it.
FREE = -(2**62)


class LiveNodes:
    """The live nodes of all sequences of a stage, addressed by small reusable local indices.

    Columns, `[capacity]`: `sequence` (FREE: unused), `node` (its id), `parent` (its local index),
    `token`, `position`, `slot` (set by `SliceRunner`). `mask[i, j]` is whether live node i may
    attend to live node j, which is an ancestor or the node itself. Committed rows are visible to
    all nodes and have no column. Columns of unused indices are False in the rows of live nodes.
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
        return (self.sequence == sequence).nonzero()[0]  # faster than flatnonzero

    def admit(self, rows: np.ndarray, lineages: Mapping[int, Lineage]) -> np.ndarray:
        """Apply the parent rule to the rows `[rows, 6]` of a batch, in order.

        Returns for each row the local index of a live node, TIP if it was committed on arrival, or
        DROPPED. Committed rows of a sequence precede its live ones.
        """
        local = np.array([lineages[row[SEQUENCE]].admit(row) for row in rows.tolist()], np.int64)
        arrived = np.flatnonzero(local > TIP)
        self._enter(rows[arrived], local[arrived])
        return local

    def _enter(self, rows: np.ndarray, local: np.ndarray) -> None:
        self.sequence[local], self.node[local] = rows[:, SEQUENCE], rows[:, NODE]
        self.token[local], self.position[local] = rows[:, TOKEN], rows[:, POSITION]
        waits = np.zeros(len(self.node), bool)  # for their parents' masks
        waits[local] = True
        while len(local):  # one level after another
            parent = self.parent[local]
            ready = ~waits[parent]
            here = local[ready]
            self.mask[here] = self.mask[parent[ready]]
            self.mask[here, here] = True
            waits[here] = False
            local = local[~ready]

    def allocate_index(self) -> int:
        if not self._free:
            self._grow()
        return self._free.pop()

    def commit(self, child: int, live: np.ndarray) -> None:
        """Make a child of the tip the tip; `live` are the nodes below it."""
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
            filler = FREE if name == "sequence" else 0
            setattr(self, name, np.pad(getattr(self, name), (0, old), constant_values=filler))
        self.mask = np.pad(self.mask, (0, old))
        self._free = list(range(2 * old - 1, old - 1, -1))

    def check(self) -> None:
        """Assert the invariants, for tests."""
        live = np.flatnonzero(self.sequence != FREE)
        assert not self.mask[TIP].any() and self.sequence[TIP] == FREE
        assert sorted([*self._free, *live.tolist()]) == list(range(1, len(self.node)))


class Lineage:
    """The tip and the live nodes of one sequence.

    Attributes:
        tip: node id of the last committed row.
        length: committed tokens, computed at this stage.
        prompt_len: how many of its tokens are a prompt.
        expected: decided tokens whose rows have not arrived."""

    def __init__(
        self,
        sequence: int,
        nodes: LiveNodes,
        length: int = 0,
        prompt_len: int = 0,
        tip: int | None = None,
    ):
        """`length`: committed tokens that are shared with another sequence; `tip`: the node id of
        the last of them, which is its position unless it is given."""
        self.sequence = sequence
        self.nodes = nodes
        self.tip = NO_PARENT_NODE if not length else length - 1 if tip is None else tip
        self.length = length
        self.prompt_len = prompt_len
        self.expected: deque[int] = deque()
        self._index = {self.tip: TIP}

    @property
    def decided(self) -> int:
        """The number of decided tokens, whether or not their rows have arrived here."""
        return self.length + len(self.expected)

    @property
    def live(self) -> np.ndarray:
        """Local indices of its live nodes, rising."""
        return self.nodes.of(self.sequence)

    def holds(self, node: int) -> bool:
        """Whether a node is live here or is the tip."""
        return node in self._index

    def admit(self, row: Sequence[int]) -> int:
        """Apply the parent rule to one row; see `LiveNodes.admit`, which calls this and writes the
        columns of the nodes that are live."""
        node, parent = row[NODE], row[PARENT]
        if row[KIND] != DRAFT or self.expected:
            if parent != self.tip or (row[KIND] == DRAFT and row[TOKEN] != self.expected[0]):
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
        here = self._index[node] = self.nodes.allocate_index()
        self.nodes.parent[here] = above
        return here

    def apply(
        self, verdict: Verdict, ids: Sequence[int] | None = None
    ) -> tuple[list[int], list[np.ndarray]]:
        """Apply a verdict: follow its tokens, but for those that are known already, down from the
        tip. Returns local indices of nodes that were committed, in order, and of nodes that died,
        in parts.

        `ids` are the node ids of the tokens, if known: a node with the right token but another id
        was dropped from the tree and proposed again since, and dies."""
        assert verdict.base <= self.decided, "a verdict is missing"
        committed: list[int] = []
        dead: list[np.ndarray] = []
        first = self.decided - verdict.base
        tokens = verdict.tokens[first:]
        live = self.live
        for count, token in enumerate(tokens):
            node = None if ids is None else ids[first + count]
            child = None if self.expected else self._child_of_tip(live, token, node)
            dying, live = live, live[:0]
            if child is not None:  # else the new tip is not here, so all die
                stays = self.nodes.mask[:, child].take(dying)
                dying, live = dying[~stays], dying[stays]
            if len(dying):
                self._forget(dying, survivors=len(live))
                dead.append(dying)
            if child is None:
                self.expected.extend(tokens[count:])
                break
            committed.append(child)
            live = live[live != child]
            self.nodes.commit(child, live)
            self._become_tip(int(self.nodes.node[child]))
        return committed, dead

    def discard(self, nodes: Sequence[int]) -> np.ndarray:
        """Remove live nodes, given with all nodes below them; returns their local indices."""
        local = np.array([self._index.pop(node) for node in nodes], np.int64)
        self.nodes.free(local)
        return local

    def release(self) -> np.ndarray:
        live = self.live
        self.nodes.free(live)
        return live

    def _child_of_tip(self, live: np.ndarray, token: int, node: int | None) -> int | None:
        nodes = self.nodes
        is_it = nodes.token.take(live) == token if node is None else nodes.node.take(live) == node
        found = live[is_it & (nodes.parent.take(live) == TIP)]
        return int(found[0]) if len(found) else None

    def _become_tip(self, node: int) -> None:
        del self._index[self.tip]
        self._index[node] = TIP
        self.tip = node
        self.length += 1

    def _forget(self, dying: np.ndarray, survivors: int) -> None:
        self.nodes.free(dying)
        if not survivors:  # after a miss, removing them one by one would take too long
            self._index = {self.tip: TIP}
            return
        for node in self.nodes.node[dying].tolist():
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
        assert not self.expected or not len(live), (
            "no node is live below a tip that has not arrived"
        )
