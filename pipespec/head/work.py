"""What a scheduler decides by, and what it says: draft rounds, progress, totals."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipespec.core import Verdict
from pipespec.head.feed.policy import FeedPolicy
from pipespec.head.sequence import Sequence
from pipespec.head.source.protocol import Asked


@dataclass(frozen=True)
class SchedulerConfig:
    """What a scheduler decides by.

    Attributes:
        policy: which nodes are expanded and which may be fed.
        num_steps: steps that a batch takes from the head through the last stage.
        rounds: draft rounds per step at most, or "auto".
        prefill_chunk: rows of prompts that one batch carries.
        context_limit: tokens of the longest sequence.
        max_num_seqs: requests that are open at once.
        max_rows: rows of one batch, and nodes that one draft round expands, of all requests.
            0: as many as one request needs.
        num_slots: tokens and guesses of all requests that every stage can hold.
    """

    policy: FeedPolicy
    num_steps: int
    rounds: int | str
    prefill_chunk: int
    context_limit: int
    max_num_seqs: int = 1
    max_rows: int = 0
    num_slots: int = 2**62

    @property
    def rows(self) -> int:
        """`max_rows`, resolved."""
        return self.max_rows or max(self.policy.max_rows, self.prefill_chunk)


@dataclass(frozen=True, slots=True)
class DraftPart:
    """What a draft round does for one sequence: the best `limit` children of its `nodes` are kept
    (None: all)."""

    sequence: Sequence
    nodes: np.ndarray
    limit: int | None

    @property
    def asked(self) -> Asked:
        return Asked(self.sequence.context, self.sequence.tree, self.nodes)


@dataclass(frozen=True, slots=True)
class DraftWork:
    """One draft round: the source proposes `children` children for the nodes of each part."""

    parts: tuple[DraftPart, ...]
    children: int

    @property
    def asked(self) -> list[Asked]:
        return [part.asked for part in self.parts]


@dataclass(slots=True)
class Totals:
    """What was done since the scheduler began: steps, tokens decided, draft rounds, and rows fed
    of each kind."""

    steps: int = 0
    tokens: int = 0
    rounds: int = 0
    root_rows: int = 0
    prompt_rows: int = 0
    guess_rows: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """What a verdict brought to a request.

    `accepted` is the verdict without the tokens beyond the end of the text; `reason` says why
    the request is over, None: it is not.
    """

    sequence: Sequence
    accepted: Verdict
    reason: str | None
