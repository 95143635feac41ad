"""The interface of a proposer, which proposes draft tokens as children of tree nodes.

A proposer does not see the pipeline and decides nothing: a wrong draft token costs speed alone. A
new proposer is one file in `proposers/`, with a `Proposer` and its `ProposerConfig`, and one
file in `conf/proposer/`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from pipespec.core import (
    COMMITTED,
    KIND,
    LAST_COMMITTED,
    NO_PARENT_NODE,
    NO_PARENT_SEQUENCE,
    NODE,
    NUM_COLUMNS,
    PARENT,
    POSITION,
    SEQUENCE,
    TOKEN,
    SamplingParams,
    Verdict,
)
from pipespec.head.paths import DraftPaths
from pipespec.head.policies.policy import AUTO, check_rounds
from pipespec.head.tree import Tree
from pipespec.settings import check_settings, setting

OVERLAPS = (AUTO, "yes", "no")
# What settings of several proposers mean.
ROUNDS = "How often the tree is expanded per step at most; auto is as often as fits into the step."


@dataclass(slots=True)
class Context:
    """The decided text of one sequence, which the head extends with every verdict.

    Attributes:
        sequence: its number.
        tokens, nodes: token and node id of each position, the tree's root included.
        sampling: how its tokens are decided. A proposer may use it, noise included, to rank what
            it proposes.
        prompt_len: how many of the tokens are the prompt; those after it are answer.
        parent: another sequence, which may have ended, whose first `shared_len` tokens these are
            too, so that their KV need not be computed again.
        salted: whether other sequences must not learn from this text (`Request.cache_salt`).
    """

    sequence: int
    tokens: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    prompt_len: int = 0
    parent: int = NO_PARENT_SEQUENCE
    shared_len: int = 0
    salted: bool = False

    @property
    def foreseeable(self) -> bool:
        """Whether tokens are drawn with sampling noise that a proposer can compute."""
        return self.sampling.temperature > 0 and not self.sampling.lossy

    def rows(self, start: int, stop: int | None = None) -> np.ndarray:
        """Positions `[start, stop)` as committed rows of a batch, `[k, 6]`."""
        stop = len(self.tokens) if stop is None else stop
        positions = np.arange(start, stop)
        before = self.nodes[start - 1 : start] or [NO_PARENT_NODE]
        rows = np.zeros((len(positions), NUM_COLUMNS), np.int64)
        rows[:, SEQUENCE] = self.sequence
        rows[:, NODE] = self.nodes[start:stop]
        rows[:, PARENT] = (before + self.nodes[start:stop])[: stop - start]
        rows[:, TOKEN] = self.tokens[start:stop]
        rows[:, POSITION] = positions
        rows[:, KIND] = np.where(positions == len(self.tokens) - 1, LAST_COMMITTED, COMMITTED)
        return rows


# Tokens that may follow a node, with their probabilities.
TokenProbabilities = list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Proposal:
    """Children for the nodes `parents` `[k]`: `tokens` and `logps`, both `[k, children]`.

    The tokens of a row differ. Where a row has fewer candidates than others, the rest of it
    has log-probability -inf. `paths` holds draft tokens of further levels below the candidates, if
    the request allows any (`ProposalRequest.max_path_tokens`); they are expanded later like any
    other node.
    """

    parents: np.ndarray
    tokens: np.ndarray
    logps: np.ndarray
    paths: DraftPaths | None = None

    @classmethod
    def from_lists(cls, parents: np.ndarray, rows: Sequence[TokenProbabilities]) -> Proposal:
        """From one list of (token, probability) per parent, of any lengths."""
        lengths = list(map(len, rows))
        shape = len(rows), max(lengths, default=0)
        present = np.arange(shape[1]) < np.array(lengths, np.int64)[:, None]
        tokens, logps = np.full(shape, -1), np.full(shape, -np.inf)
        tokens[present] = [token for row in rows for token, _ in row]
        with np.errstate(divide="ignore"):
            logps[present] = np.log([probability for row in rows for _, probability in row])
        return cls(parents, tokens, logps)

    def with_leaves(self, nodes: np.ndarray) -> Proposal:
        """With nothing below these nodes too."""
        columns = self.tokens.shape[1]
        tokens, logps = np.full((len(nodes), columns), -1), np.full((len(nodes), columns), -np.inf)
        return replace(
            self,
            parents=np.concatenate((self.parents, nodes)),
            tokens=np.concatenate((self.tokens, tokens)),
            logps=np.concatenate((self.logps, logps)),
        )


@dataclass(frozen=True, slots=True)
class ProposalRequest:
    """What a proposer does for one sequence in a draft round.

    Attributes:
        nodes: indices of the tree's nodes that need children.
        allowed: which tokens may follow each of them, as bits (`pipespec.sampling.grammar`), int32
            `[nodes, words]`; None: any.
        max_path_tokens: how many draft tokens may be proposed below their children
            (`Proposal.paths`).
    """

    context: Context
    tree: Tree
    nodes: np.ndarray
    allowed: np.ndarray | None = None
    max_path_tokens: int = 0

    def select(self, chosen: np.ndarray) -> ProposalRequest:
        """The request for the nodes in the mask `chosen`, bool `[nodes]`."""
        if chosen.all():
            return self
        allowed = None if self.allowed is None else self.allowed[chosen]
        return replace(self, nodes=self.nodes[chosen], allowed=allowed)


# Makes token ids of the target from text.
Encode = Callable[[str], Sequence[int]]


class Proposer(Protocol):
    def start_sequence(self, context: Context) -> None:
        """A sequence enters the pipeline; `context` grows as its tokens are decided."""

    def propose(self, requests: Sequence[ProposalRequest], children: int) -> list[Proposal | None]:
        """Propose at most `children` children for each requested node.

        Returns one proposal per request. None: the proposer still reads the sequence's prompt, and
        should be called again.
        """

    def accept_verdict(self, verdict: Verdict) -> None:
        """The target decided these tokens; the context contains them already."""

    def end_sequence(self, sequence: int) -> None:
        """The sequence has left the pipeline."""


@dataclass(frozen=True, kw_only=True)
class ProposerConfig(ABC):
    """The settings of a proposer, as a file in `conf/proposer/` names them."""

    rounds: int | str = setting(AUTO, ROUNDS, experimental=True)
    overlap: str = setting(
        AUTO,
        "Whether the draft works while the stages compute, or only while they wait for a batch, "
        "which takes best_first with policy.row_cost=null; auto measures both and keeps the faster "
        "for these models and machines, and is yes where times are emulated.",
        choices=OVERLAPS,
        experimental=True,
    )

    def __post_init__(self) -> None:
        check_settings("proposer", self)
        check_rounds(self.rounds)

    @property
    def needs_draft(self) -> bool:
        """Whether rank 0 loads the draft model."""
        return False

    @property
    def needs_head(self) -> bool:
        """Whether rank 0 loads a draft head, from `model.draft` or the target's own checkpoint. It
        proposes from hidden states of the target, so one batch at a time is in the pipeline, and
        trees are drafted anew after each verdict."""
        return False

    @property
    def synthetic(self) -> bool:
        """Whether draft tokens are made from the answer, so that results are labelled."""
        return False

    @abstractmethod
    def make(self, draft: Proposer | None, vocabulary: int, encode: Encode) -> Proposer:
        """The running proposer, given the draft model if `needs_draft`, how many token ids the
        target knows, and what makes tokens of the text of files."""
