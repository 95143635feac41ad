"""A plan of layers that keep a running state, in tensors of fixed addresses and sizes.

CUDA graphs read it in place of a plan of their batch's own sizes. It has room for the rows of one
sequence and the nodes that they may descend from; what a batch does not need is padding: rows that
descend from nothing, and one entry and one state that belong to no sequence.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import torch

from pipespec.engine.recurrence.recurrent_plan import Fold, RecurrentPlan, Trees
from pipespec.engine.recurrence.state_sizes import fixed_entries
from pipespec.system.device_copy import StagedArrays

# Committed nodes that are folded into a state, and ancestors of a row, itself included.
MOST_FOLDED = 32
MOST_DEPTH = 32
# The arrays of indices of sources.
_SOURCES = ("before", "tails", "fold.sources", "trees.columns")


class FixedPlan:
    """The buffers, and `plan`, which reads them.

    Sources (`RecurrentPlan`) are those of `entries` entries, `rows` rows and a row of zeros.
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
        self._write({})
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
        """Hold a plan of padding alone."""
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
    """The arrays of a part of a plan, by their names in a `FixedPlan`."""
    named = {} if part is None else {each.name: getattr(part, each.name) for each in fields(part)}
    return {prefix + name: each for name, each in named.items() if isinstance(each, np.ndarray)}
