"""The sequences for whose rows there was no memory: they fail, and the others go on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from pipespec.system.heap import is_out_of_memory

log = logging.getLogger(__name__)
T = TypeVar("T")


class MemoryFailures:
    """What fails of the batches of one slice.

    Attributes:
        failed: sequences of which no further row is computed. Some of their KV slots have other
            values.
    """

    def __init__(self, *, contained: bool):
        """`contained`: a batch can be computed again, as it moves no running states and no other
        device waits in it; else a failed allocation is raised."""
        self.failed: set[int] = set()
        self._contained = contained
        self._reported: set[int] = set()

    def compute(
        self, sequences: np.ndarray, compute: Callable[[np.ndarray], T]
    ) -> tuple[np.ndarray, T | None]:
        """Which rows have not failed, bool `[rows]`, given their sequences, and what `compute`
        returns for these; None: all have. Without memory the sequence with the most rows fails, and
        the others are computed again."""
        while True:
            kept = np.ones(len(sequences), bool)
            if self.failed:
                kept = np.isin(sequences, [*self.failed], invert=True)
            if not kept.any():
                return kept, None
            try:
                return kept, compute(kept)
            except (MemoryError, RuntimeError) as error:
                if not self._contained or not is_out_of_memory(error):
                    raise
                why = str(error)
            numbers, counts = np.unique(sequences[kept], return_counts=True)
            self.failed.add(int(numbers[counts.argmax()]))
            rows = counts.max(), counts.sum()
            log.warning("no memory for a batch: a request with %d of %d rows ends (%s)", *rows, why)

    def take_new(self) -> tuple[int, ...]:
        """The sequences that have failed since the last call."""
        new = self.failed - self._reported
        self._reported |= new
        return tuple(sorted(new))

    def forget(self, sequence: int) -> None:
        self.failed.discard(sequence)
        self._reported.discard(sequence)
