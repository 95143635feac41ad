"""Token sources: who proposes the children of a tree node.

Context and tree in, candidate children with log-probabilities out. A source never sees the
pipeline and decides nothing: a bad guess costs speed alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from pipespec.tree import Tree
from pipespec.types import (
    DECIDED,
    KIND,
    LAST_DECIDED,
    NO_NODE,
    NODE,
    NUM_COLUMNS,
    PARENT,
    POSITION,
    REQUEST,
    TOKEN,
    Verdict,
)


@dataclass(slots=True)
class Context:
    """The decided text of one request: token and node id of each position, root included."""

    request: int
    tokens: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)

    def rows(self, start: int, stop: int | None = None) -> np.ndarray:
        """Positions `[start, stop)` as decided rows of a batch, `[k, 6]`."""
        stop = len(self.tokens) if stop is None else stop
        positions = np.arange(start, stop)
        before = self.nodes[start - 1 : start] or [NO_NODE]
        rows = np.zeros((len(positions), NUM_COLUMNS), np.int64)
        rows[:, REQUEST] = self.request
        rows[:, NODE] = self.nodes[start:stop]
        rows[:, PARENT] = (before + self.nodes[start:stop])[: stop - start]
        rows[:, TOKEN] = self.tokens[start:stop]
        rows[:, POSITION] = positions
        rows[:, KIND] = np.where(positions == len(self.tokens) - 1, LAST_DECIDED, DECIDED)
        return rows


@dataclass(frozen=True, slots=True)
class Candidates:
    """Children for the nodes `parents` `[k]`: `tokens` and `logps`, both `[k, children]`."""

    parents: np.ndarray
    tokens: np.ndarray
    logps: np.ndarray


class TokenSource(Protocol):
    def begin(self, context: Context) -> None:
        """A request starts; `context` is its prompt."""
        ...

    def expand(
        self, context: Context, tree: Tree, nodes: np.ndarray, children: int
    ) -> Candidates | None:
        """Propose at most `children` children for each of `nodes` (indices into `tree`).

        None: not ready yet (still reading the prompt); ask again.
        """
        ...

    def accept(self, verdict: Verdict) -> None:
        """The target decided these tokens."""
        ...

    def end(self, request: int) -> None:
        """The request is over."""
        ...


class SourceSpec(Protocol):
    """What `conf/source/*.yaml` names: `rounds`, draft rounds per pipeline step."""

    @property
    def rounds(self) -> int: ...
