"""Feed policies: which nodes the draft expands and which enter the pipeline at this step.

A policy is a frozen dataclass with two pure methods of the head's tree and of the pipeline's
state. Everything a decoding method is lies there; the loops, the wire and the workers know
none of them. A new method is one new file beside these and one file in `conf/feed/`.
`docs/feeding.md` derives the rules.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from pipespec.head.tree import Tree

NOTHING = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Rate:
    """What one way of decoding costs, as measured: `ms_per_token` over `steps` steps."""

    ms_per_token: float
    steps: int


@dataclass(frozen=True, slots=True)
class PipelineState:
    """What a policy may know besides the tree: where the pipeline stands, what was measured.

    Times are milliseconds; a measurement that is None has not been made yet, and the policies
    have a rule for that. `pipespec.head.meter.Meter` makes the measurements from what the head
    tells it.

    Attributes:
        num_stages: steps that a batch takes from the head through the last stage: the number
            of stage groups.
        step: the pipeline step.
        requests: how many are past their first tokens.
        end: position from which on no row can matter: the text ends there.
        rounds: draft rounds that this step has had already.
        elapsed_ms: how long this step has lasted.
        draft_ms: one draft round.
        verdict_ms: from the start of a step until its verdict has come, where that decided tokens.
        tokens_per_step: tokens decided per step, of all requests, while guesses are made.
        step_ms: a whole step by the largest batch in the pipeline, `(rows, ms)` by rising rows,
            without what the KV slots add; empty if unknown.
        slot_ms: what each KV slot adds to a step that is read in it.
        offered: tokens that the likeliest so many rows of a step's offers would have yielded, on
            average, `[rows]`; None if unknown.
        offered_slots: KV slots that they would have read, likewise.
        drafting_ms: how long the draft's rounds take in a step whatever else it does.
        plain, guessing: the cost of a token while no guesses are made, and while some are.
        made_guesses: the last step made guesses or had some in the pipeline.
        streak: how many steps in a row, the last one included, were like it in that.
    """

    num_stages: int
    step: int
    requests: int = 1
    end: int = 2**62
    rounds: int = 0
    elapsed_ms: float = 0.0
    draft_ms: float | None = None
    verdict_ms: float | None = None
    tokens_per_step: float | None = None
    step_ms: tuple[tuple[int, float], ...] = ()
    slot_ms: float = 0.0
    offered: np.ndarray | None = field(default=None, compare=False)
    offered_slots: np.ndarray | None = field(default=None, compare=False)
    drafting_ms: float = 0.0
    plain: Rate | None = None
    guessing: Rate | None = None
    made_guesses: bool = False
    streak: int = 0


@dataclass(frozen=True, slots=True)
class Expansion:
    """What the draft does next: expand `nodes` (indices), keep the best `limit` candidates.

    `urgent`: the pipeline idles until this is done, so it is done whatever time it takes.
    """

    nodes: np.ndarray
    limit: int | None = None
    urgent: bool = False


class FeedPolicy(Protocol):
    """Attributes: `max_rows`, rows fed per step at most, of one request or, if `shared`, of all;
    `children`, candidates per node;
    `capacity`, nodes that the tree may hold; `keeps_unfed`, whether a node that a feed passed over
    can be fed later (if not, it is dropped); `whole`, whether what is offered is fed whole or not
    at all; `row_cost`, what one more row adds to a step, as a share of it, which a row must be
    worth to be fed (0: nothing, so all are; None: as measured).

    A row is decided or dead once it has passed the last stage, so a stage never holds more
    than `max_rows` nodes for every step that a batch takes through the pipeline.
    """

    @property
    def max_rows(self) -> int: ...
    @property
    def children(self) -> int: ...
    @property
    def capacity(self) -> int: ...
    @property
    def keeps_unfed(self) -> bool: ...
    @property
    def whole(self) -> bool: ...
    @property
    def shared(self) -> bool: ...
    @property
    def row_cost(self) -> float | None: ...

    def grow(self, tree: Tree, state: PipelineState) -> Expansion:
        """The next draft round; no nodes: the tree is as large as the method wants it."""
        ...

    def feed(self, tree: Tree, state: PipelineState) -> np.ndarray:
        """Indices of the unfed nodes that could be fed now, parents first; none: wait.

        A node may be offered only if its parent was fed or stands before it in the answer. Which
        of them are fed is chosen over all requests (`pipespec.head.choice`).
        """
        ...
