"""How long batches take by their rows, as it was measured: averages in which older ones fade."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# Samples that an average remembers: a newer one weighs 1/MEMORY.
MEMORY = 64

# Rows and milliseconds, by rising rows.
Points = tuple[tuple[int, float], ...]


@dataclass(slots=True)
class Ema:
    """A mean in which older samples fade; the first `memory` samples count alike."""

    memory: int = MEMORY
    value: float | None = None
    samples: int = 0

    def add(self, sample: float) -> None:
        self.samples += 1
        old = sample if self.value is None else self.value
        self.value = old + (sample - old) / min(self.samples, self.memory)


def largest_like(rows: int) -> int:
    """The most rows of the batches that count together with one of so many: sizes end at powers
    of two, as do those up to which a GPU takes the same time."""
    return 1 << (rows - 1).bit_length()


class RowTimes:
    """The times of batches, averaged over those of one size (`largest_like`)."""

    def __init__(self) -> None:
        self._by_size: dict[int, tuple[Ema, Ema]] = {}  # rows, ms

    def add(self, rows: int, ms: float) -> None:
        """A batch of so many rows, one or more, took so long."""
        seen = self._by_size.setdefault(largest_like(rows), (Ema(), Ema()))
        seen[0].add(rows)
        seen[1].add(ms)

    def points(self) -> Points:
        """What was measured; more rows never count as cheaper than fewer."""
        averages = [(rows.value or 0.0, ms.value or 0.0) for rows, ms in self._by_size.values()]
        return _rising(averages)


def together(measured: Iterable[Points]) -> Points:
    """One curve of several stages': the means of those that know of batches of a size.

    The first stage computes whole batches, a later one what the verdicts have left of them, so
    together they know more sizes than one.
    """
    by_size: dict[int, list[tuple[int, float]]] = {}
    for points in measured:
        for rows, ms in points:
            by_size.setdefault(largest_like(rows), []).append((rows, ms))
    return _rising(
        [
            (sum(rows for rows, _ in found) / len(found), sum(ms for _, ms in found) / len(found))
            for found in by_size.values()
        ]
    )


def _rising(points: Iterable[tuple[float, float]]) -> Points:
    found: list[tuple[int, float]] = []
    highest = 0.0
    for rows, ms in sorted(points):
        highest = max(highest, ms)
        found.append((round(rows), highest))
    return tuple(found)


def pack(points: Points) -> str:
    """As one word: "1:5.25,16:8"."""
    return ",".join(f"{rows}:{ms:.6g}" for rows, ms in points)


def unpack(word: str) -> Points:
    """The inverse of `pack`."""
    pairs = (part.split(":") for part in word.split(",") if part)
    return tuple((int(rows), float(ms)) for rows, ms in pairs)
