"""A plan of layers that keep a running state, in tensors of fixed addresses and sizes.

CUDA graphs read it in place of a plan of their batch's own sizes. It has room for the rows of one
sequence and the nodes that they may descend from; what a batch does not need is padding: rows that
descend from nothing, and one entry and one state that belong to no sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipespec.engine.recurrence.recurrent_plan import Fold, RecurrentPlan, Trees
from pipespec.engine.recurrence.state_sizes import fixed_entries
from pipespec.system.device_copy import StagedArrays

# Committed nodes that are folded into a state, and ancestors of a row, itself included.
MOST_FOLDED = 32
MOST_DEPTH = 32


@dataclass(frozen=True, slots=True)
class Padding:
    """The entry and the state that belong to no sequence."""

    entry: int
    state: int


class FixedPlan:
    """The buffers, and `plan`, which reads them.

    Sources (`RecurrentPlan`) are those of `entries` entries, `rows` rows and a row of zeros.
    """

    def __init__(
        self, rows: int, history: int, padding: Padding, device: torch.device | str
    ) -> None:
        self.rows, self.depth = rows, MOST_DEPTH
        self.entries = fixed_entries(rows)
        self._padding = padding
        columns = self.entries + rows
        indices = {
            "fresh": (1,),
            "entries": (self.entries,),
            "stored_rows": (rows,),
            "stored_entries": (rows,),
            "states": (1,),
            "before": (rows, history),
            "tails": (1, history),
            "fold.states": (1,),
            "fold.sources": (1, MOST_FOLDED),
            "trees.states": (1,),
            "trees.rows": (1, rows),
            "trees.columns": (1, columns),
            "trees.path": (1, rows, self.depth),
            "trees.own": (1, rows),
            "trees.alone": (rows,),
            "trees.places": (rows,),
        }
        flags = {"fold.valid": (1, MOST_FOLDED), "trees.committed": (1, columns)}
        self._buffers = [
            StagedArrays(indices, torch.int64, device),
            StagedArrays(flags, torch.bool, device),
            StagedArrays({"trees.ancestors": (1, rows, columns)}, torch.float32, device),
        ]
        self._host: dict[str, np.ndarray] = {}
        found: dict[str, Tensor] = {}
        for buffer in self._buffers:
            self._host |= buffer.host
            found |= buffer.device
        self.clear()
        self.plan = _plan_of(found, self.depth)

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
        self._pad()
        self._copy()

    def fill(self, plan: RecurrentPlan[np.ndarray]) -> None:
        """Hold this plan, which must fit (`holds`)."""
        self._pad()
        host, (trees,) = self._host, plan.trees
        num_entries, num_rows = len(plan.entries), len(plan.before)
        num_columns, depth = trees.columns.shape[1], trees.path.shape[2]

        def moved(sources: np.ndarray) -> np.ndarray:
            """The same sources, behind padded entries and padded rows."""
            behind_rows = sources >= num_entries + num_rows
            return (
                sources
                + np.where(sources >= num_entries, self.entries - num_entries, 0)
                + np.where(behind_rows, self.rows - num_rows, 0)
            )

        host["fresh"][: len(plan.fresh)] = plan.fresh
        host["entries"][:num_entries] = plan.entries
        host["stored_rows"][: len(plan.stored_rows)] = plan.stored_rows
        host["stored_entries"][: len(plan.stored_entries)] = plan.stored_entries
        host["states"][:] = host["trees.states"][:] = plan.states
        host["before"][:num_rows] = moved(plan.before)
        host["tails"][:] = moved(plan.tails)
        if plan.fold is not None:
            host["fold.states"][:] = plan.fold.states
            host["fold.sources"][:, : plan.fold.sources.shape[1]] = moved(plan.fold.sources)
            host["fold.valid"][:, : plan.fold.valid.shape[1]] = plan.fold.valid
        host["trees.rows"][:, :num_rows] = trees.rows
        host["trees.columns"][:, :num_columns] = moved(trees.columns)
        host["trees.ancestors"][:, :num_rows, :num_columns] = trees.ancestors
        path = host["trees.path"][:, :num_rows, :depth]
        path[...] = np.where(trees.path == num_columns, path, trees.path)
        host["trees.own"][:, :num_rows] = trees.own
        host["trees.alone"][:num_rows] = trees.alone
        host["trees.places"][:num_rows] = trees.places
        host["trees.committed"][:, :num_columns] = trees.committed
        self._copy()

    def _pad(self) -> None:
        for buffer in self._buffers:
            buffer.wait()
        host, zero = self._host, self.entries + self.rows
        for name in ("fresh", "states", "fold.states", "trees.states"):
            host[name].fill(self._padding.state)
        for name in ("entries", "stored_entries"):
            host[name].fill(self._padding.entry)
        for name in ("stored_rows", "before", "tails", "trees.own"):
            host[name].fill(0)
        for name in ("fold.sources", "trees.columns"):
            host[name].fill(zero)
        for name in ("fold.valid", "trees.committed", "trees.ancestors"):
            host[name].fill(0)
        host["trees.path"].fill(zero)
        for name in ("trees.rows", "trees.alone", "trees.places"):
            host[name][...] = np.arange(self.rows)

    def _copy(self) -> None:
        for buffer in self._buffers:
            buffer.copy()


def _plan_of(found: Mapping[str, Tensor], depth: int) -> RecurrentPlan[Tensor]:
    def part(prefix: str) -> dict[str, Any]:
        return {
            name.removeprefix(prefix): each
            for name, each in found.items()
            if name.startswith(prefix)
        }

    own = {name: each for name, each in found.items() if "." not in name}
    return RecurrentPlan(
        capacity=0,
        num_states=0,
        fold=Fold(**part("fold.")),
        runs=[],
        trees=[Trees(**part("trees."), first=(0,) * depth, commits=True)],
        **own,
    )
