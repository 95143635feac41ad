"""What layers that keep a running state do with a batch, as arrays of indices. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

NONE = -1

T = TypeVar("T")  # of an array: NumPy's, or a tensor on the device of the layers


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Committed rows of a sequence, from its state on; `kept` is the state that is set to that
    behind them, or NONE."""

    state: int
    rows: slice
    kept: int = NONE


@dataclass(frozen=True, slots=True, eq=False)
class Fold(Generic[T]):
    """Committed nodes of B sequences, at most F each: `states` `[B]`, `sources` `[B, F]` (padding:
    the zero row) and `valid` bool `[B, F]`."""

    states: T
    sources: T
    valid: T


@dataclass(frozen=True, slots=True, eq=False)
class Trees(Generic[T]):
    """The rows of B sequences that descend from their states, and the columns that they may
    descend from; padded.

    Attributes:
        states: `[B]`. rows: of the batch, `[B, R]`; padding repeats a row. columns: sources, by
            rising position, `[B, C]`. ancestors: float32 `[B, R, C]`, 1 where a column is one of
            the row, itself included, and else 0.
        path: the columns of the ancestors of each row, the row first, `[B, R, L]`, filled up with
            C; `first`: the first row that has so many, in any of the trees.
        own: the column of each row, `[B, R]`. alone: the rows without padding, and `places`: where
            each of them is among the B * R, `[n]` both.
        committed: bool `[B, C]`, columns to be folded into the state afterwards; `commits`: there
            are some.
    """

    states: T
    rows: T
    columns: T
    ancestors: T
    path: T
    first: tuple[int, ...]
    own: T
    alone: T
    places: T
    committed: T
    commits: bool


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentPlan(Generic[T]):
    """What a layer does with a batch: fold, run, compute the trees, and store.

    A *source* is an index into the entries that are read (`entries`), followed by the batch's rows
    and a row of zeros; in `before` and `tails` the histories of `states` follow the rows.

    Attributes:
        capacity, num_states: the entries and states that there must be room for.
        fresh: states that start from zero.
        fold: of what was committed since, if anything was. runs: of many committed rows. trees: of
            all other rows.
        entries: int64 `[e]`. stored_rows, stored_entries: rows that become nodes, `[n]` each.
        states: of all sequences, `[s]`. before: the sources of the inputs before each row, the
            nearest first, `[rows, history]`. tails: those of the last inputs of each state
            afterwards, the oldest first, `[s, history]`.
    """

    capacity: int
    num_states: int
    fresh: T
    entries: T
    fold: Fold[T] | None
    runs: list[Run]
    trees: list[Trees[T]]
    stored_rows: T
    stored_entries: T
    states: T
    before: T
    tails: T
