"""Ranges of bytes: which of a file are here, and in which pieces the others are fetched. Pure.

A range is a half-open pair (start, stop).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator

Range = tuple[int, int]
# A piece is fetched by one request and recorded as one entry; a process that is killed loses no
# more than the piece of each of its connections.
PIECE_BYTES = 16 * 2**20
# Bytes between two tensors that are fetched with them, such as alignment, rather than by a request
# more.
MAX_GAP_BYTES = 64


class RangeSet:
    """Bytes of a file, as disjoint ranges in order."""

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self._ranges: list[Range] = []
        for each in ranges:
            self.add(each)

    def __iter__(self) -> Iterator[Range]:
        return iter(self._ranges)

    def __contains__(self, wanted: Range) -> bool:
        return not any(True for _ in self.gaps(wanted))

    @property
    def num_bytes(self) -> int:
        return sum(stop - start for start, stop in self._ranges)

    def add(self, new: Range) -> None:
        """Add the bytes of a range, some of which may be in the set."""
        start, stop = new
        if start >= stop:
            return
        first = bisect_right(self._ranges, start, key=lambda each: each[1] + 1)
        last = first
        while last < len(self._ranges) and self._ranges[last][0] <= stop:
            start, stop = min(start, self._ranges[last][0]), max(stop, self._ranges[last][1])
            last += 1
        self._ranges[first:last] = [(start, stop)]

    def gaps(self, wanted: Range) -> Iterator[Range]:
        """The ranges of `wanted` that are not in the set, in order."""
        at, stop = wanted
        for here in self._ranges[bisect_right(self._ranges, at, key=lambda each: each[1]) :]:
            if here[0] >= stop:
                break
            if here[0] > at:
                yield at, here[0]
            at = here[1]
        if at < stop:
            yield at, stop


def pieces(
    wanted: Iterable[Range],
    here: RangeSet,
    *,
    piece_bytes: int = PIECE_BYTES,
    max_gap: int = MAX_GAP_BYTES,
) -> list[Range]:
    """What must be fetched so that all `wanted` ranges are here: neighbours together, and nothing
    longer than `piece_bytes`."""
    absent = RangeSet(gap for each in wanted for gap in here.gaps(each))
    joined: list[Range] = []
    for start, stop in absent:
        if joined and start - joined[-1][1] <= max_gap:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return [
        (at, min(at + piece_bytes, stop))
        for start, stop in joined
        for at in range(start, stop, piece_bytes)
    ]
