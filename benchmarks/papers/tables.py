"""Tables of papers' figures beside ours, and experiments, which make their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.papers.cells import Cell, Runs
from benchmarks.papers.intervals import Interval

REACHED, AHEAD, BEHIND = "reached", "ahead", "behind"
# Ours has another draft, other stages or another baseline than the paper, in its favour.
UNLIKE = "unlike"
# Ours follows from the paper's figure: the times of the machine, or the accuracy, are made from it.
FITTED = "fitted"
PLOT_ONLY = "plot only"


@dataclass(frozen=True)
class Row:
    """One figure of a paper beside ours.

    Attributes:
        figure: its number in the paper, as in "Fig. 11".
        quantity: what it is, with its unit and the method.
        paper: what the paper prints.
        ours: our figure with its interval, or in words.
        verdict: how the two compare.
        conditions: over what a speed-up is, or what else is to be known.
    """

    figure: str
    quantity: str
    paper: str
    ours: str
    verdict: str
    conditions: str = ""
    interval: Interval | None = None


@dataclass(frozen=True)
class Experiment:
    """What is compared for some figures of a paper.

    Attributes:
        name: for `--only`.
        paper: its short name.
        figures: the numbers of its figures and tables that this compares.
        nested: what is simulated, in dictionaries as deep as it likes.
        rows: made from the runs of the cells.
    """

    name: str
    paper: str
    figures: tuple[str, ...]
    nested: Mapping[Any, Any]
    rows: Callable[[Runs], Sequence[Row]]

    @property
    def cells(self) -> list[Cell]:
        return list(_flat(self.nested))


def _flat(nested: Mapping[Any, Any]) -> Iterator[Cell]:
    for each in nested.values():
        if isinstance(each, Cell):
            yield each
        else:
            yield from _flat(each)


def compared(
    figure: str,
    quantity: str,
    printed: float | tuple[float, float],
    ours: Interval,
    conditions: str = "",
    verdict: str | None = None,
    *,
    lower_is_better: bool = False,
    unit: str = "",
) -> Row:
    """A printed figure, or the ends of a printed range, beside ours. Ours is ahead or behind if its
    whole interval is beyond the printed figure or range, and reaches it otherwise. A `verdict`
    takes their place, but conditions that favour ours do not hide that it is behind."""
    low, high = printed if isinstance(printed, tuple) else (printed, printed)
    paper = f"{low:g} to {high:g}" if low < high else f"{low:g}"
    better, worse = (AHEAD, BEHIND) if not lower_is_better else (BEHIND, AHEAD)
    found = better if ours.low > high else worse if ours.high < low else REACHED
    if verdict == UNLIKE and found == BEHIND:
        verdict = BEHIND
    shown = f"{_value(ours)}{unit}"
    return Row(figure, quantity, f"{paper}{unit}", shown, verdict or found, conditions, ours)


def claimed(
    figure: str, quantity: str, paper: str, ours: str, holds: bool | str, conditions: str = ""
) -> Row:
    """What a text says of values that it does not print, and whether ours says so too."""
    verdict = holds if isinstance(holds, str) else REACHED if holds else BEHIND
    return Row(figure, quantity, paper, ours, verdict, conditions)


def _value(ours: Interval) -> str:
    """With its interval, if it is not certain."""
    digits = 1 if abs(ours.value) >= 10 else 2
    certain = ours.high - ours.low < 10**-digits / 2
    return f"{ours.value:.{digits}f}" if certain else str(ours)


def as_json(row: Row) -> dict[str, Any]:
    """A row as it is stored: with the numbers of its interval beside their text."""
    values = asdict(row)
    interval = values.pop("interval")
    return values | (interval or {"value": None, "low": None, "high": None})
