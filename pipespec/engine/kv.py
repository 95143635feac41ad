"""Slots of a stage's KV pool.

Ownership. Slot ids `[0, num_slots)` are, at any time, either free or owned:

    SlotPool._free                           nobody's; its count is 0
    PageTable.slots[row, 0:length)           a sequence's accepted text, by position: of one that
                                             is open, or of one that has left and whose text stays
    LiveNodes.slot[local], of a live node    one live tree node (pipespec.engine.lineage)

A slot of text may have several owners, sequences that begin with the same tokens; of a live node
it has one. `SlotPool.counts` says how many: `allocate` makes a first owner, `share` one more for
each slot, `release` one less, and a slot is free when its last owner lets go. Committing a node
moves its id from the tree to the page table. No K or V is ever copied or moved.
"""

from __future__ import annotations

import numpy as np

from pipespec.errors import OutOfSlots


class SlotPool:
    """A free list of single-token slots (page size one), and how many owners each has.

    `counts` is int64 `[num_slots]`.
    """

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self.counts = np.zeros(num_slots, np.int64)
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
        slots = self._free[self._num_free : self._num_free + count][::-1].copy()
        self.counts[slots] = 1
        return slots

    def share(self, slots: np.ndarray) -> None:
        """Each of these slots, which somebody owns, has one more owner."""
        self.counts[slots] += 1

    def release(self, slots: np.ndarray) -> None:
        """Each of these slots has one owner less; who has none left is free."""
        left = self.counts.take(slots) - 1
        self.counts[slots] = left
        freed = slots[left == 0]
        self._free[self._num_free : self._num_free + len(freed)] = freed[::-1]
        self._num_free += len(freed)

    def free(self) -> np.ndarray:
        """The free slots, for `check_integrity`."""
        return self._free[: self._num_free]


class PageTable:
    """Every sequence's accepted text, and its slots (page size one).

    `slots` and `tokens` are int64 `[sequences, positions]`, a row for each sequence that is open
    or whose text stays. The row of an open one only grows, so attention reads the slots in place.
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

    def begin_as(self, row: int, other: int, length: int) -> np.ndarray:
        """The row begins with the first `length` positions of another; their slots `[length]`."""
        for columns in (self.slots, self.tokens):
            columns[row, :length] = columns[other, :length]
        return self.slots[row, :length]

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
