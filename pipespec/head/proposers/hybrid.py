"""Several proposers as one: their candidates are mixed, each weighed by how often it was right.

That is logistic mixing as in PAQ (Mahoney, "Adaptive weighing of context models", 2005): the
log-odds that each proposer states are weighted and added. The weights are learnt by the gradient of
the logarithmic loss; there is one set of weights for each subset of the proposers, used for the
tokens that exactly these have named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from pipespec.core import Verdict
from pipespec.head.paths import DraftPaths
from pipespec.head.policies.policy import AUTO
from pipespec.head.proposer import (
    ROUNDS,
    Context,
    Encode,
    Proposal,
    ProposalRequest,
    Proposer,
    TokenProbabilities,
)
from pipespec.head.proposers.calibration import CalibratedProposer, from_odds, log_odds
from pipespec.head.proposers.node_records import NodeRecords
from pipespec.head.proposers.suffix import SuffixConfig
from pipespec.settings import setting


@dataclass(frozen=True)
class HybridConfig(SuffixConfig):
    """Settings of a mixture of the draft model and the suffix proposer."""

    needs_draft = True

    rounds: int | str = setting(AUTO, ROUNDS, experimental=True)

    def make(self, draft: Proposer | None, vocabulary: int, encode: Encode) -> Proposer:
        assert draft is not None
        return CalibratedProposer(HybridProposer([draft, self.suffix_proposer(encode)]))


# The probability of a token that a proposer does not name.
UNNAMED = 0.003
RATE = 0.01


class LogOddsMixture:
    """The weights of so many proposers; at first those that name a token have equal shares."""

    def __init__(self, num_proposers: int):
        named = np.arange(1 << num_proposers)[:, None] >> np.arange(num_proposers) & 1
        # By the subset that names a token, as bits: a weight for each proposer, and a bias.
        self._weights = np.zeros((1 << num_proposers, num_proposers + 1))
        self._weights[:, :-1] = named / np.maximum(named.sum(1, keepdims=True), 1)
        self._bits = 1 << np.arange(num_proposers)

    def mix(self, stated: np.ndarray) -> np.ndarray:
        """The probabilities `[k]` of tokens, given those that each proposer states,
        `[k, proposers]`; 0: not named."""
        odds, subset = self._inputs(stated)
        return from_odds((odds * self._weights[subset]).sum(1))

    def learn(self, stated: np.ndarray, hits: np.ndarray) -> None:
        """Learn which of the tokens below one node the target decided, bool `[k]`."""
        odds, subset = self._inputs(stated)
        error = hits - from_odds((odds * self._weights[subset]).sum(1))
        np.add.at(self._weights, subset, RATE * error[:, None] * odds)

    def _inputs(self, stated: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        odds = np.ones((len(stated), stated.shape[1] + 1))
        odds[:, :-1] = log_odds(np.maximum(stated, UNNAMED))
        return odds, (stated > 0) @ self._bits


# The tokens that may follow a node, and the probabilities that each proposer states for them,
# `[k, proposers]`.
ProbabilitiesByToken = tuple[list[int], np.ndarray]


class HybridProposer:
    """Sends every request to every proposer and mixes what they state.

    A token that several of them propose counts once. Nothing is proposed until all are ready, so
    that none falls behind the tree.
    """

    def __init__(self, members: Sequence[Proposer]):
        self.parts = [CalibratedProposer(member) for member in members]
        self.mixture = LogOddsMixture(len(self.parts))
        self._stated: NodeRecords[ProbabilitiesByToken] = NodeRecords()

    def start_sequence(self, context: Context) -> None:
        self._stated.start_sequence(context)
        for member in self.parts:
            member.start_sequence(context)

    def end_sequence(self, sequence: int) -> None:
        self._stated.end_sequence(sequence)
        for member in self.parts:
            member.end_sequence(sequence)

    def accept_verdict(self, verdict: Verdict) -> None:
        for member in self.parts:
            member.accept_verdict(verdict)
        for (tokens, stated), token, _ in self._stated.take_decided(verdict):
            self.mixture.learn(stated, np.array(tokens) == token)

    def propose(self, requests: Sequence[ProposalRequest], children: int) -> list[Proposal | None]:
        by_member = [member.propose(requests, children) for member in self.parts]
        found: list[Proposal | None] = []
        for request, answers in zip(requests, zip(*by_member, strict=True), strict=True):
            ready = [proposal for proposal in answers if proposal is not None]
            complete = len(ready) == len(answers)
            found.append(self._mixed(request, ready, children) if complete else None)
        return found

    def _mixed(
        self, request: ProposalRequest, answers: Sequence[Proposal], children: int
    ) -> Proposal:
        """The mixture for one sequence, of the nodes that all proposers have answered."""
        ids = request.tree.id
        row_of = [{node: i for i, node in enumerate(each.parents.tolist())} for each in answers]
        nodes = [node for node in request.nodes.tolist() if all(node in rows for rows in row_of)]
        rows = [[each[node] for node in nodes] for each in row_of]  # in each answer
        by_token = [
            stated_by_token(
                [_stated(each, row) for each, row in zip(answers, of_node, strict=True)]
            )
            for of_node in zip(*rows, strict=True)
        ]
        self._stated.update(
            request.context.sequence, request.tree, zip(ids[nodes].tolist(), by_token, strict=True)
        )
        stated = np.concatenate([np.zeros((0, len(answers))), *(each for _, each in by_token)])
        mixed = iter(self.mixture.mix(stated).tolist())
        found = []
        for tokens, _ in by_token:
            pairs = zip(tokens, islice(mixed, len(tokens)), strict=True)
            found.append(sorted(pairs, key=lambda pair: -pair[1])[:children])
        merged = Proposal.from_lists(np.array(nodes, np.int64), found)
        return replace(merged, paths=_merged_paths(answers, rows, merged))


def stated_by_token(rows: Sequence[TokenProbabilities]) -> ProbabilitiesByToken:
    """What several proposers stated of one node, by token."""
    tokens = list(dict.fromkeys(token for row in rows for token, _ in row))
    place = {token: i for i, token in enumerate(tokens)}
    stated = np.zeros((len(tokens), len(rows)))
    for proposer, row in enumerate(rows):
        for token, probability in row:
            stated[place[token], proposer] = probability
    return tokens, stated


def _stated(proposal: Proposal, row: int) -> TokenProbabilities:
    present = np.isfinite(proposal.logps[row])
    tokens = proposal.tokens[row, present].tolist()
    return list(zip(tokens, np.exp(proposal.logps[row, present]).tolist(), strict=True))


def _merged_paths(
    answers: Sequence[Proposal], rows: Sequence[Sequence[int]], merged: Proposal
) -> DraftPaths | None:
    """The paths of all answers below the candidates that `merged` has kept; what several answers
    have in common is taken from the first.

    `rows` are the rows of each answer that became the rows of `merged`.
    """
    columns = [{token: j for j, token in enumerate(row)} for row in merged.tokens.tolist()]
    width = merged.tokens.shape[1]
    index_of: dict[tuple[int, int], int] = {}  # in the merged paths, by parent and token
    above: list[int] = []
    tokens: list[int] = []
    logps: list[float] = []
    with_paths = [
        (answer, answer.paths, its_rows)
        for answer, its_rows in zip(answers, rows, strict=True)
        if answer.paths is not None and len(answer.paths.parents)
    ]
    for answer, paths, its_rows in with_paths:
        new_index: dict[int, int] = {}  # by index in this answer, as `DraftPaths.parents` counts
        for i, row in enumerate(its_rows):
            for j, token in enumerate(answer.tokens[row].tolist()):
                if token in columns[i] and np.isfinite(answer.logps[row, j]):
                    new_index[row * answer.tokens.shape[1] + j] = i * width + columns[i][token]
        entries = zip(
            paths.parents.tolist(), paths.tokens.tolist(), paths.logps.tolist(), strict=True
        )
        for index, (parent, token, logp) in enumerate(entries, answer.tokens.size):
            if parent not in new_index:
                continue
            key = new_index[parent], token
            if key not in index_of:
                index_of[key] = merged.tokens.size + len(above)
                above.append(key[0])
                tokens.append(token)
                logps.append(logp)
            new_index[index] = index_of[key]
    if not with_paths:
        return None
    return DraftPaths(np.array(above, np.int64), np.array(tokens, np.int64), np.array(logps))
