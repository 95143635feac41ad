"""How long batches take by their rows, and by the KV slots that they read, as it was measured:
averages in which older samples fade."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

# Samples that an average remembers: a newer one weighs 1/MEMORY.
MEMORY = 64

# What slots read must explain of how times differ, or it is chance.
LEAST_EXPLAINED = 0.1
# So must what is read in all be of how long batches take, or it is not worth a thought.
LEAST_SHARE = 0.01

# Rows and milliseconds, by rising rows.
Points = tuple[tuple[int, float], ...]


class Measured(NamedTuple):
    """What batches take: the mean time by rows, what each KV slot adds that is read, which is not
    in those times, and how many a batch reads on average."""

    points: Points = ()
    slot_ms: float = 0.0
    slots: float = 0.0

    def whole(self) -> Points:
        """The mean time by rows of batches that read as many slots as the average does."""
        return tuple((rows, ms + self.slot_ms * self.slots) for rows, ms in self.points)


UNKNOWN = Measured()


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


@dataclass(slots=True)
class _Size:
    """Batches of one size: means, and how rows, slots and times go together."""

    samples: int = 0
    rows: float = 0.0
    slots: float = 0.0
    ms: float = 0.0
    rows_rows: float = 0.0
    rows_slots: float = 0.0
    slots_slots: float = 0.0
    rows_ms: float = 0.0
    slots_ms: float = 0.0
    ms_ms: float = 0.0

    def add(self, rows: int, slots: int, ms: float) -> None:
        self.samples += 1
        new = 1 / min(self.samples, MEMORY)
        r, s, m = rows - self.rows, slots - self.slots, ms - self.ms
        self.rows, self.slots, self.ms = (
            self.rows + new * r,
            self.slots + new * s,
            self.ms + new * m,
        )
        old = 1 - new
        self.rows_rows = old * (self.rows_rows + new * r * r)
        self.rows_slots = old * (self.rows_slots + new * r * s)
        self.slots_slots = old * (self.slots_slots + new * s * s)
        self.rows_ms = old * (self.rows_ms + new * r * m)
        self.slots_ms = old * (self.slots_ms + new * s * m)
        self.ms_ms = old * (self.ms_ms + new * m * m)


class RowTimes:
    """The times of batches, averaged over those of one size (`largest_like`)."""

    def __init__(self) -> None:
        self._by_size: dict[int, _Size] = {}
        self._slots = Ema()

    def add(self, rows: int, ms: float, slots: int = 0) -> None:
        """A batch of so many rows, one or more, that read so many KV slots, took so long."""
        self._by_size.setdefault(largest_like(rows), _Size()).add(rows, slots, ms)
        self._slots.add(slots)

    def points(self, slot_ms: float = 0.0) -> Points:
        """The mean times, without what the KV slots add; more rows never count as cheaper than
        fewer."""
        return _rising(
            (size.rows, max(size.ms - slot_ms * size.slots, 0.0)) for size in self._by_size.values()
        )

    def measured(self) -> Measured:
        """What is known so far."""
        slot_ms = self._slot_ms()
        return Measured(self.points(slot_ms), slot_ms, self._slots.value or 0.0)

    def _slot_ms(self) -> float:
        """By least squares of times on rows and slots, among batches of one size.

        0 where the slots explain next to nothing, only go with the rows, or take next to no time.
        """
        sizes = self._by_size.values()
        rows = sum(size.rows_rows for size in sizes)
        share = sum(size.rows_slots for size in sizes) / rows if rows else 0.0
        slots = sum(size.slots_slots - share * size.rows_slots for size in sizes)
        ms = sum(size.slots_ms - share * size.rows_ms for size in sizes)
        of_rows = sum(size.rows_ms for size in sizes) ** 2 / rows if rows else 0.0
        left = sum(size.ms_ms for size in sizes) - of_rows
        if slots <= 0 or ms <= 0 or ms * ms <= LEAST_EXPLAINED * slots * left:
            return 0.0
        share = ms / slots * (self._slots.value or 0.0) / max(size.ms for size in sizes)
        return ms / slots if share >= LEAST_SHARE else 0.0


def together(measured: Iterable[Measured]) -> Measured:
    """One of several stages': the means of those that know of batches of a size.

    The first stage computes whole batches, a later one what the verdicts have left of them, so
    together they know more sizes than one.
    """
    by_size: dict[int, list[tuple[int, float]]] = {}
    found = list(measured)
    for each in found:
        for rows, ms in each.points:
            by_size.setdefault(largest_like(rows), []).append((rows, ms))
    means = _rising(
        (sum(rows for rows, _ in like) / len(like), sum(ms for _, ms in like) / len(like))
        for like in by_size.values()
    )
    count = max(len(found), 1)
    return Measured(
        means,
        sum(each.slot_ms for each in found) / count,
        sum(each.slots for each in found) / count,
    )


def _rising(points: Iterable[tuple[float, float]]) -> Points:
    found: list[tuple[int, float]] = []
    highest = 0.0
    for rows, ms in sorted(points):
        highest = max(highest, ms)
        found.append((round(rows), highest))
    return tuple(found)


def pack(measured: Measured) -> str:
    """As one word, such as "1:5.25,16:8;0.0001;350"; nothing is known: none."""
    if not measured.points:
        return ""
    points = ",".join(f"{rows}:{ms:.6g}" for rows, ms in measured.points)
    return f"{points};{measured.slot_ms:.6g};{measured.slots:.6g}"


def unpack(word: str) -> Measured:
    """The inverse of `pack`."""
    if not word:
        return UNKNOWN
    points, slot_ms, slots = word.split(";")
    pairs = (part.split(":") for part in points.split(",") if part)
    known = tuple((int(rows), float(ms)) for rows, ms in pairs)
    return Measured(known, float(slot_ms), float(slots))
