"""A cascade: a mid-size model scores anew what a small draft has proposed.

The small draft expands the trees in the head, round by round. The mid-size model works beside it on
a device of its own, and the head never waits for it: a pass takes the likeliest nodes of all depths
that it has not scored (`pipespec.head.scoring`), and its scores replace those of the small draft.
"""

from __future__ import annotations

import collections.abc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from pipespec.core import Verdict
from pipespec.head.policies.policy import SpeculationPolicy
from pipespec.head.proposers.async_proposer import AsyncResult
from pipespec.head.proposers.calibration import CalibratedProposer
from pipespec.head.proposers.draft_model import DraftModelConfig
from pipespec.head.proposers.proposer import Context, Proposal, ProposalRequest, Proposer
from pipespec.head.scoring import MID_ROWS, MID_ROWS_HELP, ScoreBatch, Scoring
from pipespec.head.sequence import Sequence
from pipespec.head.tree import Tree
from pipespec.limits import MAX_ROWS
from pipespec.settings import setting


@dataclass(frozen=True)
class CascadeModelConfig(DraftModelConfig):
    """Settings of a small draft model with a mid-size model beside it."""

    mid_rows: int = setting(
        MID_ROWS, MID_ROWS_HELP, "nodes", limits=(0, MAX_ROWS), experimental=True
    )

    @property
    def needs_mid(self) -> bool:
        return self.mid_rows > 0

    def make_mid(self, mid: Proposer | None, vocabulary: int) -> Proposer:
        assert mid is not None
        return CalibratedProposer(mid)


class BackgroundProposer(Protocol):
    """A proposer that works beside the head (`AsyncProposer`)."""

    def start_sequence(self, context: Context) -> None: ...
    def accept_verdict(self, verdict: Verdict) -> None: ...
    def end_sequence(self, sequence: int) -> None: ...

    def submit(self, requests: collections.abc.Sequence[ProposalRequest], children: int) -> None:
        """Begin a pass; the result of the last one must have been taken."""
        ...

    def poll(self) -> AsyncResult | None:
        """The result of the pass, once; None: it is under way, or there was none."""
        ...

    def close(self) -> None: ...


class CascadeProposer:
    """Both models of a cascade: a `Proposer` that is the small draft, and a `TreeScorer` that is
    the mid-size model. Both know every sequence."""

    def __init__(self, draft: Proposer, mid: BackgroundProposer, scoring: Scoring):
        self._draft = draft
        self._mid = mid
        self._scoring = scoring
        self._pass: ScoreBatch | None = None  # under way

    def start_sequence(self, context: Context) -> None:
        self._draft.start_sequence(context)
        self._mid.start_sequence(context)

    def propose(
        self, requests: collections.abc.Sequence[ProposalRequest], children: int
    ) -> list[Proposal | None]:
        return self._draft.propose(requests, children)

    def accept_verdict(self, verdict: Verdict) -> None:
        self._draft.accept_verdict(verdict)
        self._mid.accept_verdict(verdict)

    def end_sequence(self, sequence: int) -> None:
        self._draft.end_sequence(sequence)
        self._mid.end_sequence(sequence)

    def request_scores(self, sequences: Iterable[Sequence], policy: SpeculationPolicy) -> None:
        if self._pass is None:
            self._pass = self._scoring.next_batch(sequences, policy)
            if self._pass is not None:
                self._mid.submit(self._pass.requests, self._pass.children)

    def take_scores(self, is_open: Callable[[Sequence], bool], capacity: int) -> int | None:
        result = self._mid.poll()
        if result is None:
            return None
        assert self._pass is not None
        batch, self._pass = self._pass, None
        for part in batch.parts:
            part.sequence.counts["overruns"] += not result.paced
        return self._scoring.update(batch, result.proposals, is_open, capacity)

    def token_decided(self, tree: Tree, token: int) -> None:
        self._scoring.token_decided(tree, token)

    def close(self) -> None:
        """End the work of the mid-size model."""
        self._mid.close()
