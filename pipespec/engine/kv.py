"""Slots of a stage's KV pool.

Ownership. Slot ids `[0, num_slots)` are, at any time, each in exactly one place:

    SlotPool._free                           nobody's
    PageTable.slots[row, 0:length)           a request's accepted text, by position
    LiveNodes.slot[local], of a live node    one live tree node (pipespec.engine.lineage)

`allocate` moves ids out of the free list, committing a node moves its id from the tree to
the page table, pruning and `release` move ids back. No K or V is ever copied or moved.
"""

from __future__ import annotations

import numpy as np

from pipespec.errors import OutOfSlots


class SlotPool:
    """A free list of single-token slots (page size one)."""

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        # A stack: what was freed last is used next, and a fresh pool hands out 0, 1, 2, ...
        self._free = np.arange(num_slots - 1, -1, -1)
        self._num_free = num_slots

    @property
    def num_free(self) -> int:
        return self._num_free

    def allocate(self, count: int) -> np.ndarray:
        """`count` slots `[count]`. Raises OutOfSlots if there are not so many."""
        if count > self._num_free:
            raise OutOfSlots(
                f"{count} KV slots are needed but {self._num_free} of {self.num_slots} are free; "
                "shorten the context (model.context) or narrow the tree (feed.width)."
            )
        self._num_free -= count
        return self._free[self._num_free : self._num_free + count][::-1].copy()

    def release(self, slots: np.ndarray) -> None:
        self._free[self._num_free : self._num_free + len(slots)] = slots[::-1]
        self._num_free += len(slots)

    def free(self) -> np.ndarray:
        """The free slots, for `check_integrity`."""
        return self._free[: self._num_free]


class PageTable:
    """Every sequence's accepted text, and its slots (page size one).

    `slots` and `tokens` are int64 `[sequences, positions]`, a row for each open sequence. A row
    only grows with the text, so attention reads the slots in place.
    """

    def __init__(self) -> None:
        self.slots, self.tokens = np.zeros((2, 1, 256), np.int64)
        self._free = [0]  # rows

    def open(self) -> int:
        """A row for another sequence."""
        if not self._free:
            sequences, positions = self.slots.shape
            self._free = list(range(2 * sequences - 1, sequences - 1, -1))
            self._grow(2 * sequences, positions)
        return self._free.pop()

    def close(self, row: int) -> None:
        self._free.append(row)

    def write(
        self, rows: np.ndarray, positions: np.ndarray, slots: np.ndarray, tokens: np.ndarray
    ) -> None:
        """Text of these rows, at these positions, is in these slots; all `[tokens]`."""
        if not len(slots):
            return
        sequences, room = self.slots.shape
        if (end := int(positions.max()) + 1) > room:
            self._grow(sequences, max(end, 2 * room))
        self.slots[rows, positions] = slots
        self.tokens[rows, positions] = tokens

    def _grow(self, sequences: int, positions: int) -> None:
        for name in ("slots", "tokens"):
            old = getattr(self, name)
            grown = np.zeros((sequences, positions), np.int64)
            grown[: old.shape[0], : old.shape[1]] = old
            setattr(self, name, grown)
