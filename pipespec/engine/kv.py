"""Slots of a stage's KV pool.

Ownership. Slot ids `[0, num_slots)` are, at any time, each in exactly one place:

    SlotPool._free                     nobody's
    Sequence.committed[0, length)      the request's accepted text, slot i at position i
    Sequence.slot_of[local], live      one live tree node

`allocate` moves ids out of the free list, committing a node moves its id from the tree to
the sequence, pruning and `release` move ids back. No K or V is ever copied or moved.
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
