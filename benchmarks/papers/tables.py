"""Tables of papers' figures beside ours, and experiments, which make their rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.papers.cells import Cell, Runs
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
        cells: what is simulated.
        rows, grid: made from the runs of the cells.
    """

    name: str
    paper: str
    figures: tuple[str, ...]
    cells: Sequence[Cell]
    rows: Callable[[Runs], Sequence[Row]]
    grid: Callable[[Runs], Grid] | None = None


@dataclass(frozen=True)
class Source:
    """Where stored figures are from."""

    file: str
    command: str
    hardware: str
    commit: str
    date: str


@dataclass(frozen=True)
class StoredTable:
    """Rows from a stored result of another benchmark. `kind` is MEASURED, EMULATED or COMPUTED."""

    name: str
    paper: str
    kind: str
    title: str
    figures: tuple[str, ...]
    rows: Sequence[Row]
    sources: Sequence[Source] = field(default_factory=tuple)


def compared(
    figure: str,
    quantity: str,
    printed: float | tuple[float, float],
    ours: Interval,
    *,
    lower_is_better: bool = False,
    unit: str = "",
    baseline: str = "",
    verdict: str | None = None,
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


def ours_alone(
    figure: str, quantity: str, ours: Interval, *, unit: str = "", baseline: str = "", paper: str
) -> Row:
    """A figure of ours where the paper prints none."""
    return Row(figure, quantity, paper, f"{_value(ours)}{unit}", NO_NUMBER, baseline, ours)


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
