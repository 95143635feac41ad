"""The KV slots of a stage, and which sequences hold them.

At any time each slot id in `[0, num_slots)` is either free or owned:

    a count of KVSlotAllocator that is 0     free
    PageTable.slots[row, 0:length)           committed tokens of a sequence, by position; the
                                             sequence is running, or its prefix is retained
    LiveNodes.slot[local], of a live node    one live tree node (pipespec.engine.slice.parent_rule)

The slot of a committed token may have several owners: sequences that share a prefix. The slot of a
live node has one. `KVSlotAllocator.counts` counts owners: `allocate` sets 1, `share` adds one,
`release` removes one, and a slot is free when its count is 0. Committing a node moves its slot id
from the tree to the page table; K and V are not copied, but where attention reads slots in the
order of positions alone (`SliceRunner`).
"""

from __future__ import annotations

import numpy as np

from pipespec.errors import OutOfSlots

# Slots in which free ones are looked for first.
NEAR = 512


class KVSlotAllocator:
    """Single-token slots (page size 1) with owner counts, int64 `[num_slots]`."""

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self.counts = np.zeros(num_slots, np.int64)
        self.num_free = num_slots

    def allocate(self, count: int, after: int = -1) -> np.ndarray:
        """Allocate slots, `[count]`, which rise: the lowest free ones above `after`, or of all if
        there are too few. Raises OutOfSlots if fewer are free."""
        if count > self.num_free:
            raise OutOfSlots(
                f"{count} KV slots are needed but {self.num_free} of {self.num_slots} are free; "
                "shorten the context (model.context) or narrow the tree (policy.width)."
            )
        start, stop = after + 1, after + 1 + NEAR
        slots = np.flatnonzero(self.counts[start:stop] == 0)
        while len(slots) < count and stop < self.num_slots:
            stop += stop - start
            slots = np.flatnonzero(self.counts[start:stop] == 0)
        if len(slots) < count:
            return self.allocate(count)
        slots = slots[:count] + start
        self.num_free -= count
        self.counts[slots] = 1
        return slots

    def share(self, slots: np.ndarray) -> None:
        """Add an owner to each of these slots, which have one already."""
        self.counts[slots] += 1

    def release(self, slots: np.ndarray) -> None:
        """Remove an owner of each of these slots; those without one are free."""
        self.counts[slots] -= 1
        self.num_free += int(np.count_nonzero(self.counts.take(slots) == 0))


class PageTable:
    """The committed tokens of every sequence, and their KV slots (page size 1).

    `slots` and `tokens` are int64 `[sequences, positions]`, with a row for each sequence that is
    running or retained. Rows of running sequences only grow, so attention reads them in place.
    """

    def __init__(self) -> None:
        self.slots, self.tokens = np.zeros((2, 1, 256), np.int64)
        self._free = [0]  # rows

    def allocate_row(self) -> int:
        if not self._free:
            sequences, positions = self.slots.shape
            self._free = list(range(2 * sequences - 1, sequences - 1, -1))
            self._grow(2 * sequences, positions)
        return self._free.pop()

    def free_row(self, row: int) -> None:
        self._free.append(row)

    def share_prefix(self, row: int, other: int, length: int) -> np.ndarray:
        """Copy the first `length` positions of row `other`; returns their slots `[length]`."""
        for columns in (self.slots, self.tokens):
            columns[row, :length] = columns[other, :length]
        return self.slots[row, :length]

    def write(
        self, rows: np.ndarray, positions: np.ndarray, slots: np.ndarray, tokens: np.ndarray
    ) -> None:
        """Set the slots and tokens at these positions of these rows; all `[tokens]`."""
        if not len(slots):
            return
        sequences, room = self.slots.shape
        if (end := int(positions.max()) + 1) > room:
            self._grow(sequences, max(end, 2 * room))
        self.slots[rows, positions] = slots
        self.tokens[rows, positions] = tokens

    def _grow(self, sequences: int, positions: int) -> None:
        rows, columns = self.slots.shape
        more = (0, sequences - rows), (0, positions - columns)
        self.slots, self.tokens = np.pad(self.slots, more), np.pad(self.tokens, more)
