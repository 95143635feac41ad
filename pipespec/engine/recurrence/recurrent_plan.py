"""Which states, tree nodes and rows a batch reads and writes in layers that keep a running state.

The plan is derived from the attention plan alone. A sequence's state is that after some of its
committed tokens. The nodes below have an *entry* each, in small pools of every layer, and what is
committed meanwhile is folded into the state when the sequence comes to the layers next. The KV slot
of a node finds its entry:

    state of a sequence    after `length` committed tokens, the last of them in KV slot `last`
    pending                committed since: entries, to be folded first
    rows                   of this batch: first the committed ones, then nodes with new entries

A sequence that shares the beginning of another starts from a copy of a state that has seen just
that. For this the state before the last token of what was known of a text when it started (its
prompt) is kept (`AttentionPlan.keeps_state`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from pipespec.engine.attention.attention_plan import AttentionPlan, Segment
from pipespec.errors import ModelError

# Longer runs of committed rows are computed by the model's own kernel for prompts.
SHORT_RUN = 16
NONE = -1

T = TypeVar("T")  # of an array: NumPy's, or a tensor on the device of the layers


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Committed rows of a sequence, from its state on; `kept` is the state that is set to that
    behind them, or NONE."""

    state: int
    rows: slice
    kept: int = NONE


@dataclass(frozen=True, slots=True, eq=False)
class Fold(Generic[T]):
    """Committed nodes of B sequences, at most F each: `states` `[B]`, `sources` `[B, F]` (padding:
    the zero row) and `valid` bool `[B, F]`."""

    states: T
    sources: T
    valid: T


@dataclass(frozen=True, slots=True, eq=False)
class Trees(Generic[T]):
    """The rows of B sequences that descend from their states, and the columns that they may
    descend from; padded.

    Attributes:
        states: `[B]`. rows: of the batch, `[B, R]`; padding repeats a row. columns: sources, by
            rising position, `[B, C]`. ancestors: bool `[B, R, C]`, the row itself included.
        path: the columns of the ancestors of each row, the row first, `[B, R, L]`, filled up with
            C; `first`: the first row that has so many, in any of the trees.
        own: the column of each row, `[B, R]`. alone: the rows without padding, and `places`: where
            each of them is among the B * R, `[n]` both.
        committed: bool `[B, C]`, columns to be folded into the state afterwards; `commits`: there
            are some.
    """

    states: T
    rows: T
    columns: T
    ancestors: T
    path: T
    first: tuple[int, ...]
    own: T
    alone: T
    places: T
    committed: T
    commits: bool


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentPlan:
    """What a layer does with a batch: fold, run, compute the trees, and store.

    A *source* is an index into the entries that are read (`entries`), followed by the batch's rows
    and a row of zeros; in `before` and `tails` the histories of `states` follow the rows.

    Attributes:
        capacity, num_states: the entries and states that there must be room for.
        fresh: states that start from zero.
        entries: int64 `[e]`. stored_rows, stored_entries: rows that become nodes, `[n]` each.
        states: of all sequences, `[s]`. before: the sources of the inputs before each row, the
            nearest first, `[rows, history]`. tails: those of the last inputs of each state
            afterwards, the oldest first, `[s, history]`.
    """

    capacity: int
    num_states: int
    fresh: np.ndarray
    entries: np.ndarray
    folds: list[Fold[np.ndarray]]
    runs: list[Run]
    trees: list[Trees[np.ndarray]]
    stored_rows: np.ndarray
    stored_entries: np.ndarray
    states: np.ndarray
    before: np.ndarray
    tails: np.ndarray


class RecurrentBook:
    """The states and entries of the sequences of one slice; see the module. Pure: it holds numbers,
    the layers hold tensors."""

    def __init__(self, num_slots: int, history: int):
        """`history`: how many earlier inputs the convolutions read."""
        self.history = history
        self._entry = np.full(num_slots + 1, NONE)  # of each KV slot
        self._slot_of_entry = np.full(8, NONE)
        self._page_of_entry = np.full(8, NONE)
        # The state of each page's sequence, and that which is kept of its beginning.
        self._states: dict[tuple[int, bool], int] = {}
        self._unused: list[int] = []
        self._length = np.zeros(0, np.int64)  # of each state
        self._last = np.zeros(0, np.int64)

    @property
    def capacity(self) -> int:
        """Entries that the pools need room for."""
        return len(self._slot_of_entry)

    @property
    def num_states(self) -> int:
        return len(self._length)

    def plan(self, plan: AttentionPlan) -> RecurrentPlan:
        """The plan of a batch, which is computed next."""
        return _Planning(self, plan).result()

    def start_from(self, page: int, slots: np.ndarray) -> tuple[int, int]:
        """The sequence of a page begins with the tokens in these slots: the states to copy, to and
        from. Raises ModelError if none is kept that has seen just these tokens."""
        found = np.flatnonzero((self._last == slots[-1]) & (self._length == len(slots)))
        if not len(found):
            raise ModelError(
                f"no state after the first {len(slots)} tokens of a shared text is kept; set "
                "scheduler.prefix_cache=false, and please report this"
            )
        state = self.state_of(page)
        self.set_state(state, len(slots), int(slots[-1]))
        return state, int(found[0])

    # --- states ---------------------------------------------------------------------------------

    def state_of(self, page: int, *, kept: bool = False) -> int:
        """The state of a page's sequence, or that which is kept, made if there was none yet."""
        if (page, kept) not in self._states:
            if not self._unused:
                self._unused.append(self.num_states)
                self._length = np.append(self._length, 0)
                self._last = np.append(self._last, NONE)
            self._states[page, kept] = self._unused.pop()
        return self._states[page, kept]

    def end(self, page: int, *, retained: bool) -> None:
        """The sequence of a page has ended; `retained`: others may share its text, and the state
        that is kept of it stays."""
        self.keep_only(page, np.zeros(0, np.int64))
        for kept in (False,) if retained else (False, True):
            state = self._states.pop((page, kept), None)
            if state is not None:
                self.set_state(state, 0, NONE)
                self._unused.append(state)

    def length(self, state: int, pages: np.ndarray) -> int:
        """How many tokens of the text in these slots a state has seen."""
        length = int(self._length[state])
        assert 0 < length <= len(pages), "a sequence has no state"
        assert self._last[state] == pages[length - 1], "a state is of another text"
        return length

    def set_state(self, state: int, length: int, last: int) -> None:
        """A state is now that after `length` tokens, the last of them in slot `last`."""
        self._length[state], self._last[state] = length, last

    # --- entries --------------------------------------------------------------------------------

    def forget_slots(self, slots: np.ndarray) -> None:
        """These slots hold other tokens from now on."""
        stale = np.isin(self._last, slots)
        self._length[stale], self._last[stale] = 0, NONE
        self._free(self._entry[slots])

    def entries_at(self, slots: np.ndarray) -> np.ndarray:
        """The entries of nodes in these slots."""
        entries = self._entry[slots]
        assert (entries != NONE).all(), "a node has no entry"
        return entries

    def keep_only(self, page: int, entries: np.ndarray) -> None:
        """Free the other entries of a page's sequence, whose nodes are dead or folded."""
        mine = np.flatnonzero(self._page_of_entry == page)
        self._free(np.setdiff1d(mine, entries, assume_unique=True))

    def allocate(self, page: int, slots: np.ndarray) -> np.ndarray:
        """New entries for the nodes in these slots."""
        while len(free := np.flatnonzero(self._slot_of_entry == NONE)) < len(slots):
            more = np.full(self.capacity, NONE)
            self._slot_of_entry = np.concatenate((self._slot_of_entry, more))
            self._page_of_entry = np.concatenate((self._page_of_entry, more))
        entries = free[: len(slots)]
        self._entry[slots] = entries
        self._slot_of_entry[entries], self._page_of_entry[entries] = slots, page
        return entries

    def _free(self, entries: np.ndarray) -> None:
        entries = entries[entries != NONE]
        self._entry[self._slot_of_entry[entries]] = NONE
        self._slot_of_entry[entries] = self._page_of_entry[entries] = NONE


@dataclass(slots=True, eq=False)
class _Sequence:
    """A segment of the plan being made."""

    state: int
    length: int  # of the state, before anything is folded
    base: int  # committed tokens before its first row
    pending: np.ndarray  # sources
    live: np.ndarray  # sources of the nodes in earlier batches
    live_columns: np.ndarray  # where they are among the tree keys
    num_committed: int
    kept: int  # the state to be set to that before the last committed row, or NONE
    part: Segment

    @property
    def end(self) -> int:
        """Committed tokens after the batch."""
        return self.base + self.num_committed


class _Planning:
    """One call of `RecurrentBook.plan`."""

    def __init__(self, book: RecurrentBook, plan: AttentionPlan):
        self._book, self._plan = book, plan
        self._entries: list[np.ndarray] = []
        self._num_entries = 0
        self._fresh: list[int] = []
        book.forget_slots(plan.write)
        pages = plan.page_row.tolist()
        counts = plan.num_committed.tolist()
        parts = list(zip(plan.segments(), pages, counts, strict=True))
        starts = [self._start(*each) for each in parts]
        # All that is freed is freed before new entries are given, and is read in this batch still.
        self._sequences = [
            self._sequence(*each, start, keeps)
            for each, start, keeps in zip(parts, starts, plan.keeps_state.tolist(), strict=True)
        ]

    def _read(self, slots: np.ndarray) -> np.ndarray:
        """Sources of the entries of nodes in these slots."""
        self._entries.append(self._book.entries_at(slots))
        start, self._num_entries = self._num_entries, self._num_entries + len(slots)
        return np.arange(start, self._num_entries)

    def _start(self, part: Segment, page: int, num_committed: int) -> int:
        """The length of a sequence's state, which is made if need be."""
        book, pages = self._book, self._plan.pages[page]
        base = _base(part, num_committed)
        state = book.state_of(page)
        if not base or self._plan.imagined:
            self._fresh.append(state)
            return base
        return book.length(state, pages[:base])

    def _sequence(
        self, part: Segment, page: int, num_committed: int, length: int, keeps: bool
    ) -> _Sequence:
        book, pages = self._book, self._plan.pages[page]
        base = _base(part, num_committed)
        pending = self._read(pages[length:base])
        own = self._plan.write[part.rows]
        columns = np.flatnonzero(~np.isin(part.tree, own))
        live = self._read(part.tree[columns])
        book.keep_only(page, self._entries[-1])
        slots = np.concatenate((pages[:base], own[:num_committed]))
        state, kept = book.state_of(page), NONE
        book.set_state(state, len(slots), int(slots[-1]) if len(slots) else NONE)
        if keeps and num_committed and len(slots) > 1:
            kept = book.state_of(page, kept=True)
            book.set_state(kept, len(slots) - 1, int(slots[-2]))
        return _Sequence(state, length, base, pending, live, columns, num_committed, kept, part)

    def result(self) -> RecurrentPlan:
        book, plan = self._book, self._plan
        num_rows, history = len(plan.write), book.history
        first_row = self._num_entries
        zero = first_row + num_rows
        stored_rows, stored_entries = [], []
        runs: list[Run] = []
        trees: list[_Tree] = []
        before = np.zeros((num_rows, history), np.int64)
        states: list[int] = []
        tails: list[list[int]] = []
        also: list[int] = []
        tails_also: list[list[int]] = []
        for number, sequence in enumerate(self._sequences):
            span = sequence.part.rows
            rows = np.arange(span.start, span.stop)
            nodes = rows[sequence.num_committed :]
            stored_rows.append(nodes)
            page = int(plan.page_row[number])
            stored_entries.append(book.allocate(page, plan.write[nodes]))
            count, history_at = sequence.num_committed, zero + number * history
            inputs = _Inputs(sequence, first_row, history, history_at)
            before[span.start : span.start + count] = inputs.before_committed()
            states.append(sequence.state)
            tails.append(inputs.tail(sequence.end))
            run, kept = count if count > SHORT_RUN else 0, NONE
            if sequence.kept != NONE:
                run, kept = count - 1, sequence.kept
                also.append(kept)
                tails_also.append(inputs.tail(sequence.end - 1))
            if run or kept != NONE:
                runs.append(Run(sequence.state, slice(span.start, span.start + run), kept))
            if run < len(rows):
                tree = _Tree(sequence, first_row, plan.write, run)
                trees.append(tree)
                before[nodes] = inputs.before_nodes(tree)
        entries = np.concatenate([*self._entries, np.zeros(0, np.int64)])
        return RecurrentPlan(
            capacity=book.capacity,
            num_states=book.num_states,
            fresh=np.array(self._fresh, np.int64),
            entries=entries,
            folds=_folds(self._sequences, zero),
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
        part, count = sequence.part, sequence.num_committed - run
        span = slice(part.rows.start + run, part.rows.stop)
        self.state, self.num_committed = sequence.state, count
        self.rows = np.arange(span.start, span.stop)
        num_rows, num_live = len(self.rows), len(sequence.live)
        positions = np.concatenate(
            (part.tree_positions[sequence.live_columns], part.positions[run:])
        )
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
        self.columns = np.concatenate((sequence.live, first_row + np.arange(span.start, span.stop)))
        self.columns = self.columns[order]

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
        base, count = self._sequence.base, self._sequence.num_committed
        found = self._first + np.arange(count)[:, None] - np.arange(1, self._history + 1)
        for row in range(min(count, self._history)):
            found[row, row:] = [
                self._at(base + row - distance) for distance in range(row + 1, self._history + 1)
            ]
        return found

    def before_nodes(self, tree: _Tree) -> np.ndarray:
        """Those before each node, in the order of the batch's rows, `[nodes, history]`."""
        end = self._sequence.end
        first = self._sequence.part.rows.start + self._sequence.num_committed
        nodes = np.flatnonzero(tree.rows >= first)
        found = np.zeros((len(nodes), self._history), np.int64)
        for row in nodes.tolist():
            above = tree.above(row, self._history)
            above = above[: self._depth(tree, row)]
            rest = range(end - 1, end - 1 - self._history + len(above), -1)
            found[tree.rows[row] - first] = [*above, *map(self._at, rest)]
        return found

    def _depth(self, tree: _Tree, row: int) -> int:
        """How many ancestors of a node are nodes."""
        return int(tree.ancestors[row].sum()) - 1 - tree.num_committed

    def tail(self, end: int) -> list[int]:
        """Those of the last of the first `end` tokens of the text, the oldest first."""
        return [self._at(place) for place in range(end - self._history, end)]

    def _at(self, position: int) -> int:
        """That of a committed token."""
        sequence = self._sequence
        if position >= sequence.base:
            return self._first + position - sequence.base
        if position >= sequence.length:
            return int(sequence.pending[position - sequence.length])
        return self._history_at + self._history - sequence.length + position


def _base(part: Segment, num_committed: int) -> int:
    """The committed tokens before the first row of a segment."""
    return int(part.positions[0]) if num_committed else len(part.prefix)


def _folds(sequences: Sequence[_Sequence], zero: int) -> list[Fold[np.ndarray]]:
    found = [each for each in sequences if len(each.pending)]
    if not found:
        return []
    longest = max(len(each.pending) for each in found)
    sources = np.full((len(found), longest), zero)
    valid = np.zeros((len(found), longest), bool)
    for row, each in enumerate(found):
        sources[row, : len(each.pending)] = each.pending
        valid[row, : len(each.pending)] = True
    return [Fold(np.array([each.state for each in found]), sources, valid)]


def _groups(trees: Sequence[_Tree], zero: int) -> list[Trees[np.ndarray]]:
    """Trees of about the same size together."""
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
    rows = np.zeros((num, most_rows), np.int64)
    own = np.zeros((num, most_rows), np.int64)
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
    states = np.array([tree.state for tree in trees])
    commits = bool(committed.any())
    depth = ancestors.sum(2)[:, :, None]
    path = most_columns - 1 - np.argsort(~ancestors[:, :, ::-1], axis=2, kind="stable")
    path = path[:, :, : depth.max()]
    ends = np.arange(path.shape[2]) >= depth
    path[ends] = most_columns
    first = tuple((~ends).any(0).argmax(0).tolist())
    return Trees(
        states=states,
        rows=rows,
        columns=columns,
        ancestors=ancestors,
        path=path,
        first=first,
        own=own,
        alone=np.concatenate([tree.rows for tree in trees]),
        places=np.concatenate(places),
        committed=committed,
        commits=commits,
    )
