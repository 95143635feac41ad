"""Plans what layers that keep a running state do with a batch, from its attention plan alone, and
keeps the book of their states (`pipespec.engine.recurrence.recurrent_book`). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipespec.engine.attention.attention_plan import AttentionPlan, Segment
from pipespec.engine.recurrence.recurrent_book import RecurrentBook
from pipespec.engine.recurrence.recurrent_plan import NONE, Fold, RecurrentPlan, Run, Trees

# Longer runs of committed rows are computed by the model's own kernel for prompts.
SHORT_RUN = 16


def plan_batch(book: RecurrentBook, plan: AttentionPlan) -> RecurrentPlan[np.ndarray]:
    """The plan of a batch, which is computed next."""
    return _Planning(book, plan).result()


@dataclass(slots=True, eq=False)
class _Sequence:
    """A segment of the plan being made."""

    state: int
    length: int  # of the state, before anything is folded
    base: int  # committed tokens before its first row
    pending: np.ndarray  # sources
    live: np.ndarray  # sources of the nodes in earlier batches
    live_columns: np.ndarray  # where they are among the tree keys
    kept: int  # the state to be set to that behind `part.keeps_state` tokens, or NONE
    part: Segment

    @property
    def end(self) -> int:
        return self.base + self.part.num_committed


class _Planning:
    """One call of `plan_batch`."""

    def __init__(self, book: RecurrentBook, plan: AttentionPlan):
        self._book, self._plan = book, plan
        self._entries: list[np.ndarray] = []
        self._num_entries = 0
        self._fresh: list[int] = []
        book.forget_slots(plan.write)
        starts = [self._start(each) for each in plan.segments]
        # All that is freed is freed before new entries are given, and is read in this batch still.
        self._sequences = [
            self._sequence(*each) for each in zip(plan.segments, starts, strict=True)
        ]

    def _read(self, slots: np.ndarray) -> np.ndarray:
        """Sources of the nodes in these slots."""
        self._entries.append(self._book.entries_at(slots))
        start, self._num_entries = self._num_entries, self._num_entries + len(slots)
        return np.arange(start, self._num_entries)

    def _start(self, part: Segment) -> int:
        """The length of a sequence's state, which is made if need be."""
        book, base = self._book, _base(part)
        state = book.state_of(part.page)
        if not base or self._plan.imagined:
            self._fresh.append(state)
            return base
        return book.length(state, part.prefix[:base])

    def _sequence(self, part: Segment, length: int) -> _Sequence:
        book, base = self._book, _base(part)
        pending = self._read(part.prefix[length:base])
        own = self._plan.write[part.rows]
        columns = np.flatnonzero(~np.isin(part.tree, own))
        live = self._read(part.tree[columns])
        book.keep_only(part.page, self._entries[-1])
        end, kept_at = base + part.num_committed, part.keeps_state

        def last(length: int) -> int:
            """The slot of the last of so many tokens."""
            if not length:
                return NONE
            return int(own[length - 1 - base] if length > base else part.prefix[length - 1])

        state, kept = book.state_of(part.page), NONE
        book.set_state(state, end, last(end))
        if kept_at:
            assert base <= kept_at <= end, "a state that is kept is of other rows"
            kept = book.kept_state(part.state_number)
            book.set_state(kept, kept_at, last(kept_at))
        return _Sequence(state, length, base, pending, live, columns, kept, part)

    def result(self) -> RecurrentPlan[np.ndarray]:
        book, plan = self._book, self._plan
        num_rows, history = len(plan.write), book.history
        first_row = self._num_entries
        zero = first_row + num_rows
        runs, trees = list[Run](), list[_Tree]()
        before = np.zeros((num_rows, history), np.int64)
        stored_rows, stored_entries, states, tails, also, tails_also = ([] for _ in range(6))
        for number, sequence in enumerate(self._sequences):
            span = sequence.part.rows
            rows, count = np.arange(span.start, span.stop), sequence.part.num_committed
            nodes = rows[count:]
            stored_rows.append(nodes)
            stored_entries.append(book.allocate(sequence.part.page, plan.write[nodes]))
            history_at = zero + number * history
            inputs = _Inputs(sequence, first_row, history, history_at)
            before[span.start : span.start + count] = inputs.before_committed()
            states.append(sequence.state)
            tails.append(inputs.tail(sequence.end))
            run, kept = count if count > SHORT_RUN else 0, NONE
            if sequence.kept != NONE:
                kept_at, kept = sequence.part.keeps_state, sequence.kept
                run = kept_at - sequence.base
                also.append(kept)
                tails_also.append(inputs.tail(kept_at))
            if run or kept != NONE:
                runs.append(Run(sequence.state, slice(span.start, span.start + run), kept))
            if run < len(rows):
                tree = _Tree(sequence, first_row, plan.write, run)
                trees.append(tree)
                before[nodes] = inputs.before_nodes(tree)
        return RecurrentPlan(
            capacity=book.capacity,
            num_states=book.num_states,
            fresh=np.array(self._fresh, np.int64),
            entries=np.concatenate([*self._entries, np.zeros(0, np.int64)]),
            fold=_fold(self._sequences, zero),
            runs=runs,
            trees=_groups(trees, zero),
            stored_rows=np.concatenate(stored_rows),
            stored_entries=np.concatenate(stored_entries),
            states=np.array(states + also),
            before=before,
            tails=np.array(tails + tails_also),
        )


class _Tree:
    """The rows of a segment after the first `run`, and the nodes that they may descend from."""

    def __init__(self, sequence: _Sequence, first_row: int, write: np.ndarray, run: int):
        part, count = sequence.part, sequence.part.num_committed - run
        span = slice(part.rows.start + run, part.rows.stop)
        self.state, self.num_committed = sequence.state, count
        self.rows = np.arange(span.start, span.stop)
        num_rows, num_live = len(self.rows), len(sequence.live)
        of_live = part.tree_positions[sequence.live_columns]
        positions = np.concatenate((of_live, part.positions[run:]))
        seen = np.zeros((num_rows, num_live + num_rows), bool)
        seen[:, :num_live] = part.mask[run:, sequence.live_columns]
        inside = seen[:, num_live:]
        key = {slot: column for column, slot in enumerate(part.tree.tolist())}
        for row, slot in enumerate(write[span].tolist()):
            if row < count:  # all later rows descend from a committed one
                inside[row:, row] = True
            else:
                inside[:, row] = part.mask[run:, key[slot]]
        order = np.argsort(positions, kind="stable")
        own = np.argsort(order)[num_live:]
        rising = np.argsort(part.positions[run:], kind="stable")  # parents before their children
        self.rows, self.own = self.rows[rising], own[rising]
        self.ancestors = seen[rising][:, order]
        sources = first_row + np.arange(span.start, span.stop)
        self.columns = np.concatenate((sequence.live, sources))[order]

    def above(self, row: int, count: int) -> list[int]:
        """The sources of the ancestors of a row in its tree, the nearest first, at most `count`."""
        ancestors = np.flatnonzero(self.ancestors[row])[:-1]
        return self.columns[ancestors[::-1][:count]].tolist()


class _Inputs:
    """The sources of the earlier inputs that the convolutions of a sequence read."""

    def __init__(self, sequence: _Sequence, first_row: int, history: int, history_at: int):
        self._sequence, self._history, self._history_at = sequence, history, history_at
        self._first = first_row + sequence.part.rows.start

    def before_committed(self) -> np.ndarray:
        """Those before each committed row, the nearest first, `[rows, history]`."""
        base, count = self._sequence.base, self._sequence.part.num_committed
        found = self._first + np.arange(count)[:, None] - np.arange(1, self._history + 1)
        for row in range(min(count, self._history)):
            before = range(base - 1, base + row - self._history - 1, -1)
            found[row, row:] = [*map(self._at, before)]
        return found

    def before_nodes(self, tree: _Tree) -> np.ndarray:
        """Those before each node, in the order of the batch's rows, `[nodes, history]`."""
        end = self._sequence.end
        first = self._sequence.part.rows.start + self._sequence.part.num_committed
        nodes = np.flatnonzero(tree.rows >= first)
        found = np.zeros((len(nodes), self._history), np.int64)
        for row in nodes.tolist():
            above = tree.above(row, self._history)
            above = above[: int(tree.ancestors[row].sum()) - 1 - tree.num_committed]  # the nodes
            rest = range(end - 1, end - 1 - self._history + len(above), -1)
            found[tree.rows[row] - first] = [*above, *map(self._at, rest)]
        return found

    def tail(self, end: int) -> list[int]:
        """Those of the last of the first `end` tokens of the text, the oldest first."""
        return [self._at(place) for place in range(end - self._history, end)]

    def _at(self, position: int) -> int:
        sequence = self._sequence
        if position >= sequence.base:
            return self._first + position - sequence.base
        if position >= sequence.length:
            return int(sequence.pending[position - sequence.length])
        return self._history_at + self._history - sequence.length + position


def _base(part: Segment) -> int:
    """The committed tokens before the first row of a segment."""
    return int(part.positions[0]) if part.num_committed else len(part.prefix)


def _fold(sequences: Sequence[_Sequence], zero: int) -> Fold[np.ndarray] | None:
    found = [each for each in sequences if len(each.pending)]
    if not found:
        return None
    longest = max(len(each.pending) for each in found)
    sources = np.full((len(found), longest), zero)
    valid = np.zeros((len(found), longest), bool)
    for row, each in enumerate(found):
        sources[row, : len(each.pending)] = each.pending
        valid[row, : len(each.pending)] = True
    return Fold(np.array([each.state for each in found]), sources, valid)


def _groups(trees: Sequence[_Tree], zero: int) -> list[Trees[np.ndarray]]:
    by_size: dict[tuple[int, int], list[_Tree]] = {}
    for tree in trees:
        size = (_power(len(tree.rows)), _power(len(tree.columns)))
        by_size.setdefault(size, []).append(tree)
    return [_group(each, zero) for each in by_size.values()]


def _power(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()


def _group(trees: Sequence[_Tree], zero: int) -> Trees[np.ndarray]:
    num = len(trees)
    most_rows = max(len(tree.rows) for tree in trees)
    most_columns = max(len(tree.columns) for tree in trees)
    rows, own = np.zeros((2, num, most_rows), np.int64)
    places = [index * most_rows + np.arange(len(tree.rows)) for index, tree in enumerate(trees)]
    columns = np.full((num, most_columns), zero)
    committed = np.zeros((num, most_columns), bool)
    ancestors = np.zeros((num, most_rows, most_columns), bool)
    for index, tree in enumerate(trees):
        count, width = len(tree.rows), len(tree.columns)
        rows[index, :count] = tree.rows
        rows[index, count:] = tree.rows[0]
        own[index, :count] = tree.own
        columns[index, :width] = tree.columns
        ancestors[index, :count, :width] = tree.ancestors
        committed[index, tree.own[: tree.num_committed]] = True
    depth = ancestors.sum(2)[:, :, None]
    path = most_columns - 1 - np.argsort(~ancestors[:, :, ::-1], axis=2, kind="stable")
    path = path[:, :, : depth.max()]
    ends = np.arange(path.shape[2]) >= depth
    path[ends] = most_columns
    return Trees(
        states=np.array([tree.state for tree in trees]),
        rows=rows,
        columns=columns,
        ancestors=ancestors.astype(np.float32),
        path=path,
        first=tuple((~ends).any(0).argmax(0).tolist()),
        own=own,
        alone=np.concatenate([tree.rows for tree in trees]),
        places=np.concatenate(places),
        committed=committed,
        commits=bool(committed.any()),
    )
