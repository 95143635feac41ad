"""Tables of papers' figures beside ours, and experiments, which make their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.papers.cells import Cell, Run, Runs
from benchmarks.papers.intervals import Interval

AHEAD, BEHIND, ALIKE = "ahead", "behind", "alike"
FOUND, NOT_FOUND = "found", "not found"
LARGER = "found, larger"
OTHER_REASON = "found, for another reason"
NO_NUMBER = "no number printed"
PLOT_ONLY = "plot only"
# Ours has quicker stages or a quicker draft than the paper.
OTHER_TIMES = "other times"
# A ratio that is higher only because the baseline is slower here than the paper's.
SLOWER_BASELINE = "a slower baseline"
GIVEN = "given"  # our figure follows from the paper's, which the machine's times are made from


@dataclass(frozen=True)
class Row:
    """One figure of a paper beside ours.

    Attributes:
        figure: its number in the paper, as in "Fig. 11".
        quantity: what it is, with its unit and the method.
        paper: what the paper prints.
        ours: our figure with its interval, or in words.
        verdict: how the two compare.
        baseline: over what a speed-up is, or what else the conditions are.
    """

    figure: str
    quantity: str
    paper: str
    ours: str
    verdict: str
    baseline: str = ""
    interval: Interval | None = None


@dataclass(frozen=True)
class Grid:
    """All cells of a figure whose values a paper only plots; `name` is that of its experiment."""

    name: str
    title: str
    rows: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Experiment:
    """What is compared for one figure or table of a paper.

    Attributes:
        name: for `--only`.
        paper: its short name.
        figures: the numbers of its figures and tables that this compares.
        nested: what is simulated, in dictionaries as deep as it likes.
        rows, grid: made from the runs of the cells.
    """

    name: str
    paper: str
    figures: tuple[str, ...]
    nested: Mapping[Any, Any]
    rows: Callable[[Runs], Sequence[Row]]
    grid: Callable[[Runs], Grid] | None = None

    @property
    def cells(self) -> list[Cell]:
        return list(_flat(self.nested))


def _flat(nested: Mapping[Any, Any]) -> Iterator[Cell]:
    for each in nested.values():
        if isinstance(each, Cell):
            yield each
        else:
            yield from _flat(each)


def cross(
    name: str,
    title: str,
    key: str,
    cells: Mapping[str, Mapping[Any, Cell]],
    shown: Callable[[Run], str],
) -> Callable[[Runs], Grid]:
    """A grid with a row for each key of the inner dictionaries, and a column for each outer one."""

    def made(runs: Runs) -> Grid:
        (first, *_) = cells.values()
        rows = [
            {key: each} | {column: shown(runs[of[each]]) for column, of in cells.items()}
            for each in first
        ]
        return Grid(name, title, rows)

    return made


def time_and_hits(run: Run) -> str:
    return f"{run.tbt} ({run.hit_rate.value:.2f})"


def compared(
    figure: str,
    quantity: str,
    printed: float | tuple[float, float],
    ours: Interval,
    baseline: str = "",
    verdict: str | None = None,
    *,
    lower_is_better: bool = False,
    unit: str = "",
) -> Row:
    """A printed figure, or the ends of a printed range, beside ours. Ours is ahead or behind if its
    whole interval is beyond the printed figure or range, and alike otherwise. A `verdict` takes
    their place, but conditions that favour ours do not hide that it is behind."""
    low, high = printed if isinstance(printed, tuple) else (printed, printed)
    paper = f"{low:g} to {high:g}" if low < high else f"{low:g}"
    better, worse = (AHEAD, BEHIND) if not lower_is_better else (BEHIND, AHEAD)
    found = better if ours.low > high else worse if ours.high < low else ALIKE
    if verdict in (OTHER_TIMES, SLOWER_BASELINE) and found == BEHIND:
        verdict = BEHIND
    return Row(
        figure,
        quantity,
        f"{paper}{unit}",
        f"{_value(ours)}{unit}",
        verdict or found,
        baseline,
        ours,
    )


def claimed(
    figure: str, quantity: str, paper: str, ours: str, holds: bool | str, baseline: str = ""
) -> Row:
    """What a text says of values that it does not print, and whether we find it."""
    verdict = holds if isinstance(holds, str) else FOUND if holds else NOT_FOUND
    return Row(figure, quantity, paper, ours, verdict, baseline)


def ours_alone(figure: str, quantity: str, paper: str, ours: Interval, baseline: str = "") -> Row:
    """A figure of ours where the paper prints none."""
    return Row(figure, quantity, paper, _value(ours), NO_NUMBER, baseline, ours)


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
