"""Which states and entries of tree nodes the sequences of a slice have, in layers that keep a
running state. Pure: it holds numbers, the layers hold tensors.

A sequence's state is that after some of its committed tokens. The nodes below have an *entry* each,
in small pools of every layer, and what is committed meanwhile is folded into the state when the
sequence comes to the layers next. The KV slot of a node finds its entry:

    state of a sequence    after `length` committed tokens, the last of them in KV slot `last`
    pending                committed since: entries, to be folded first
    rows                   of this batch: first the committed ones, then nodes with new entries

A sequence that shares the beginning of another starts from a copy of a state that has seen just
that. For this the head has states kept while a text is read (`Segment.keeps_state`), by
numbers: a number that is given again stands for another state from then on.
"""

from __future__ import annotations

import numpy as np

from pipespec.engine.recurrence.recurrent_plan import NONE
from pipespec.errors import ModelError

# Stands for the page of padding.
_NO_PAGE = -2


class RecurrentBook:
    def __init__(self, num_slots: int, history: int):
        """`history`: how many earlier inputs the convolutions read."""
        self.history = history
        self._entry = np.full(num_slots + 1, NONE)  # of each KV slot
        self._slot_of_entry = np.full(8, NONE)
        self._page_of_entry = np.full(8, NONE)
        self._states: dict[int, int] = {}  # of each page's sequence
        self._kept: dict[int, int] = {}  # by number
        self._unused: list[int] = []
        self._length = np.zeros(0, np.int64)  # of each state
        self._last = np.zeros(0, np.int64)

    @property
    def capacity(self) -> int:
        return len(self._slot_of_entry)

    @property
    def num_states(self) -> int:
        return len(self._length)

    def start_from(self, page: int, slots: np.ndarray) -> tuple[int, int]:
        """The sequence of a page begins with the tokens in these KV slots, `[tokens]`, of another
        one: the states to copy, to and from. Raises ModelError if none is kept after them."""
        found = np.flatnonzero((self._last == slots[-1]) & (self._length == len(slots)))
        if not len(found):
            raise ModelError(
                f"no state after the first {len(slots)} tokens of a shared text is kept; set "
                "scheduler.prefix_cache=false, and please report this"
            )
        state = self.state_of(page)
        self.set_state(state, len(slots), int(slots[-1]))
        return state, int(found[0])

    def reserve_padding(self) -> tuple[int, int]:
        """An entry and a state that no sequence gets."""
        (entry,) = self.allocate(_NO_PAGE, np.array([len(self._entry) - 1])).tolist()
        return entry, self.state_of(_NO_PAGE)

    def reserve_entries(self, count: int) -> None:
        while self.capacity < count:
            self._grow()

    def state_of(self, page: int) -> int:
        """The state of a page's sequence, made if there was none yet."""
        return self._state(self._states, page)

    def kept_state(self, number: int) -> int:
        """The kept state of this number, made if there was none yet."""
        return self._state(self._kept, number)

    def _state(self, states: dict[int, int], key: int) -> int:
        if key not in states:
            if not self._unused:
                self._unused.append(self.num_states)
                self._length = np.append(self._length, 0)
                self._last = np.append(self._last, NONE)
            states[key] = self._unused.pop()
        return states[key]

    def end(self, page: int) -> None:
        """The sequence of a page has ended; states that are kept of its text stay."""
        self.keep_only(page, np.zeros(0, np.int64))
        state = self._states.pop(page, None)
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

    def forget_slots(self, slots: np.ndarray) -> None:
        """These slots hold other tokens from now on."""
        stale = np.isin(self._last, slots)
        self._length[stale], self._last[stale] = 0, NONE
        self._free(self._entry[slots])

    def entries_at(self, slots: np.ndarray) -> np.ndarray:
        entries = self._entry[slots]
        assert (entries != NONE).all(), "a node has no entry"
        return entries

    def keep_only(self, page: int, entries: np.ndarray) -> None:
        """Free the other entries of a page's sequence, whose nodes are dead or folded."""
        mine = np.flatnonzero(self._page_of_entry == page)
        self._free(np.setdiff1d(mine, entries, assume_unique=True))

    def allocate(self, page: int, slots: np.ndarray) -> np.ndarray:
        while len(free := np.flatnonzero(self._slot_of_entry == NONE)) < len(slots):
            self._grow()
        entries = free[: len(slots)]
        self._entry[slots] = entries
        self._slot_of_entry[entries], self._page_of_entry[entries] = slots, page
        return entries

    def _grow(self) -> None:
        more = np.full(self.capacity, NONE)
        self._slot_of_entry = np.concatenate((self._slot_of_entry, more))
        self._page_of_entry = np.concatenate((self._page_of_entry, more))

    def _free(self, entries: np.ndarray) -> None:
        entries = entries[entries != NONE]
        self._entry[self._slot_of_entry[entries]] = NONE
        self._slot_of_entry[entries] = self._page_of_entry[entries] = NONE
