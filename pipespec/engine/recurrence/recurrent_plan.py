"""What layers that keep a running state do with a batch, as arrays of indices: a `RecurrentPlan` of
the batch's own sizes, and a `FixedPlan` in tensors of fixed addresses and sizes."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from pipespec.engine.recurrence.state_sizes import fixed_entries
from pipespec.system.device_copy import StagedArrays

NONE = -1
# Committed nodes that are folded into a state, and ancestors of a row, itself included.
MOST_FOLDED = 32
MOST_DEPTH = 32
# The arrays of indices of sources.
_SOURCES = ("before", "tails", "fold.sources", "trees.columns")

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


class FixedPlan:
    """The buffers of a plan that CUDA graphs read, and `plan`, which reads them.

    They have room for the rows of one sequence and the nodes that they may descend from. What a
    batch does not need is padding: rows that descend from nothing, and one entry and one state that
    belong to no sequence. Sources are those of `entries` entries, `rows` rows and a row of zeros.
    """

    def __init__(
        self, rows: int, history: int, padding: tuple[int, int], device: torch.device | str
    ) -> None:
        """`padding`: an entry and a state that belong to no sequence."""
        self.rows, self.depth = rows, MOST_DEPTH
        self.entries = fixed_entries(rows)
        columns, every, (entry, state) = self.entries + rows, np.arange(rows), padding
        # The shape of each array, and what it holds where a batch has nothing.
        indices: dict[str, tuple[tuple[int, ...], Any]] = {
            **dict.fromkeys(("fresh", "states", "fold.states", "trees.states"), ((1,), state)),
            **dict.fromkeys(("trees.alone", "trees.places"), ((rows,), every)),
            "entries": ((self.entries,), entry),
            "stored_entries": ((rows,), entry),
            "stored_rows": ((rows,), 0),
            "before": ((rows, history), 0),
            "tails": ((1, history), 0),
            "fold.sources": ((1, MOST_FOLDED), columns),
            "trees.rows": ((1, rows), every),
            "trees.columns": ((1, columns), columns),
            "trees.path": ((1, rows, self.depth), columns),
            "trees.own": ((1, rows), 0),
        }
        flags = {"fold.valid": ((1, MOST_FOLDED), 0), "trees.committed": ((1, columns), 0)}
        ancestors = {"trees.ancestors": ((1, rows, columns), 0)}
        self._padding = {name: pad for name, (_, pad) in (indices | flags | ancestors).items()}
        self._buffers = [
            StagedArrays({name: shape for name, (shape, _) in each.items()}, dtype, device)
            for each, dtype in (
                (indices, torch.int64),
                (flags, torch.bool),
                (ancestors, torch.float32),
            )
        ]
        self._host: dict[str, np.ndarray] = {}
        found: dict[str, Any] = {}
        for buffer in self._buffers:
            self._host |= buffer.host
            found |= buffer.device
        self.clear()
        own = {name: each for name, each in found.items() if "." not in name}
        fold, trees = (
            {name.removeprefix(prefix): found[name] for name in found if name.startswith(prefix)}
            for prefix in ("fold.", "trees.")
        )
        trees |= {"first": (0,) * self.depth, "commits": True}
        parts: dict[str, Any] = {"fold": Fold(**fold), "trees": [Trees(**trees)], "runs": []}
        self.plan: RecurrentPlan[torch.Tensor] = RecurrentPlan(
            capacity=0, num_states=0, **own, **parts
        )

    def holds(self, plan: RecurrentPlan[np.ndarray]) -> bool:
        """Whether a plan fits: it is of one sequence, and of no long run of committed rows."""
        if len(plan.states) != 1 or plan.runs or len(plan.trees) != 1:
            return False
        (trees,) = plan.trees
        return (
            len(plan.entries) <= self.entries
            and trees.rows.shape[1] == len(plan.before) <= self.rows
            and trees.path.shape[2] <= self.depth
            and (plan.fold is None or plan.fold.sources.shape[1] <= MOST_FOLDED)
        )

    def clear(self) -> None:
        self._write({})

    def fill(self, plan: RecurrentPlan[np.ndarray]) -> None:
        """Hold this plan, which must fit (`holds`)."""
        (trees,) = plan.trees
        num_entries, num_rows = len(plan.entries), len(plan.before)
        num_columns = trees.columns.shape[1]
        given = _arrays("", plan) | _arrays("fold.", plan.fold) | _arrays("trees.", trees)
        for name in _SOURCES:  # behind padded entries and padded rows
            if name in given:
                at = given[name]
                given[name] = (
                    at
                    + np.where(at >= num_entries, self.entries - num_entries, 0)
                    + np.where(at >= num_entries + num_rows, self.rows - num_rows, 0)
                )
        beyond = trees.path == num_columns
        given["trees.path"] = np.where(beyond, self._padding["trees.path"], trees.path)
        self._write(given)

    def _write(self, given: dict[str, np.ndarray]) -> None:
        """Let the arrays begin with these, and be padded."""
        for buffer in self._buffers:
            buffer.wait()
        for name, padding in self._padding.items():
            self._host[name][...] = padding
            if name in given:
                self._host[name][tuple(map(slice, given[name].shape))] = given[name]
        for buffer in self._buffers:
            buffer.copy()


def _arrays(prefix: str, part: Any) -> dict[str, np.ndarray]:
    named = {} if part is None else {each.name: getattr(part, each.name) for each in fields(part)}
    return {prefix + name: each for name, each in named.items() if isinstance(each, np.ndarray)}
