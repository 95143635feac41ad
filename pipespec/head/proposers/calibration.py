"""Calibrated probabilities: what a proposer states, corrected by what the target decided.

How often draft tokens were accepted is counted over all texts: by rank among siblings, by stated
probability, and by depth below the root. Within each text it is counted by rank and probability;
these counts have the weight by which texts have been observed to differ. Old counts fade.
Corrections are added in log-odds. What holds over all texts is kept for the next start.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pipespec.core import Verdict
from pipespec.head.paths import DraftPaths
from pipespec.head.proposer import Context, Proposal, ProposalRequest, Proposer
from pipespec.head.proposers.node_records import NodeRecords

log = logging.getLogger(__name__)

# Probabilities are limited to [LEAST, 1 - LEAST].
LEAST = 1e-9
# Ranks are counted in the buckets 1, 2, 3 to 4, 5 to 8 and beyond, and depths likewise.
NUM_BUCKETS = 5
BUCKETS = np.array([0, 0, 1, 2, 2, 3, 3, 3, 3, NUM_BUCKETS - 1])  # by number, from 1 up
# Log-odds are counted in buckets of width one, up to this distance from even.
FARTHEST = 7
NUM_ODDS = 2 * FARTHEST + 1
# Within one text: the ranks 1, 2 and beyond, and log-odds below, between and above these two.
LIKELY, SURE = 0.0, 2.0
NUM_TEXT_KINDS = 3 * 3
# The highest calibrated probability.
MOST = 0.999

# The share of a count that is held when its kind is observed again, and the weight of the prior
# that probabilities are right as stated, in draft tokens: over all texts, and within one.
MEMORY, PRIOR = 0.995, 8.0
TEXT_MEMORY, TEXT_PRIOR = 0.95, 4.0
# The learning rate of how much texts differ.
RATE = 0.03


def _between(numbers: np.ndarray, least: float, most: float) -> np.ndarray:
    """`np.clip`, which is slower for short arrays."""
    return np.minimum(np.maximum(numbers, least), most)


def log_odds(probability: np.ndarray) -> np.ndarray:
    probability = _between(probability, LEAST, 1 - LEAST)
    return np.log(probability / (1 - probability))


def from_odds(logarithm: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logarithm))


def bucket(numbers: np.ndarray) -> np.ndarray:
    return BUCKETS[np.minimum(numbers, len(BUCKETS) - 1)]


def text_kind(ranks: np.ndarray, odds: np.ndarray) -> np.ndarray:
    """The kinds of draft tokens within one text, from the buckets of their ranks `[k]` and their
    log-odds `[..., k]`."""
    return 3 * np.minimum(ranks, 2) + (odds > LIKELY) + (odds > SURE)


class HitCounts:
    """How many draft tokens of each kind there were, how many hits were stated, and how many were
    observed, as fading sums.

    `shift` `[kinds]` is what these counts add to stated log-odds. When a kind is observed again,
    `memory` is the share of its counts that is held. `prior` is how many draft tokens of each kind
    are assumed to have hit as often as stated. `sums` `[3, kinds]` are these numbers.
    """

    def __init__(self, kinds: int, memory: float, prior: float):
        self.memory = memory
        self.prior = prior
        self.shift = np.zeros(kinds)
        self.sums = np.zeros((3, kinds))

    def add(self, kinds: np.ndarray, stated: np.ndarray, hits: np.ndarray) -> None:
        """Count the candidates `[k]` of one node, given their kinds."""
        size = len(self.shift)
        tokens = np.bincount(kinds, minlength=size)
        seen = tokens.nonzero()[0]
        more = tokens, np.bincount(kinds, stated, size), np.bincount(kinds, hits, size)
        self.sums[:, seen] = self.memory * self.sums[:, seen] + np.stack(more)[:, seen]
        self.correct(seen)

    def correct(self, seen: np.ndarray) -> None:
        """Compute anew what is added to the log-odds of the kinds `seen`, `[k]`."""
        tokens, expected, observed = self.sums[:, seen]
        mean, prior = expected / tokens, self.prior
        self.shift[seen] = log_odds((observed + prior * mean) / (tokens + prior)) - log_odds(mean)


class Calibration:
    """Turns the probabilities that one proposer states into those that were observed."""

    def __init__(self) -> None:
        self._ranks = HitCounts(NUM_BUCKETS * NUM_ODDS, MEMORY, PRIOR)
        self._depths = HitCounts(NUM_BUCKETS, MEMORY, PRIOR)
        self._texts: dict[int, HitCounts] = {}
        # How much texts differ, by kind of draft token. Where they are alike, the counts of one
        # text alone are chance.
        self._differ = np.full(NUM_TEXT_KINDS, 0.5)

    @property
    def _of_all_texts(self) -> tuple[np.ndarray, ...]:
        return self._ranks.sums, self._depths.sums, self._differ

    def stored(self) -> list[list[float]]:
        """What another run may begin with, as JSON can represent it: nothing of a single text."""
        return [each.round(4).tolist() for each in self._of_all_texts]

    def restore(self, stored: Any) -> bool:
        """Go on from what an earlier run has stored; False: it cannot be read, and is ignored."""
        try:
            found = [np.array(each, float) for each in stored]
        except (TypeError, ValueError):
            return False
        own = self._of_all_texts
        valid = all(np.isfinite(each).all() and (each >= 0).all() for each in found)
        if not valid or [each.shape for each in found] != [each.shape for each in own]:
            return False
        for mine, kept in zip(own, found, strict=True):
            mine[:] = kept
        for counts in (self._ranks, self._depths):
            counts.correct(counts.sums[0].nonzero()[0])
        return True

    def start_text(self, text: int) -> None:
        self._texts[text] = HitCounts(NUM_TEXT_KINDS, TEXT_MEMORY, TEXT_PRIOR)

    def end_text(self, text: int) -> None:
        del self._texts[text]

    def correct(self, text: int, stated: np.ndarray, depths: np.ndarray) -> np.ndarray:
        """The calibrated probabilities of candidates, `[k, children]`.

        Args:
            stated: their stated probabilities, the likeliest first, `[k, children]`.
            depths: of the candidates below the root of their tree, `[k]`.
        """
        if not stated.size:
            return stated
        ranks = bucket(np.arange(1, stated.shape[1] + 1))
        odds = self._by_rank(log_odds(stated), ranks) + self._depths.shift[bucket(depths)][:, None]
        kinds = text_kind(ranks, odds)
        odds += self._differ[kinds] * self._texts[text].shift[kinds]
        return np.minimum(from_odds(odds), MOST) * (stated > LEAST)

    def observe(self, text: int, stated: np.ndarray, depth: int, hit: int | None) -> None:
        """Learn from the candidates of one node, the likeliest first, `[children]`; `hit` is the
        index of the one that the target decided, None: of none."""
        present = np.flatnonzero(stated > LEAST)
        if not len(present):
            return
        ranks, stated = bucket(present + 1), stated[present]
        hits = present == (-1 if hit is None else hit)
        odds = log_odds(stated)
        by_rank = self._by_rank(odds, ranks)
        depths = np.repeat(bucket(np.array([depth])), len(ranks))
        by_depth = by_rank + self._depths.shift[depths]
        kinds, counts = text_kind(ranks, by_depth), self._texts[text]
        # A step down the gradient of the logarithmic loss.
        shift = counts.shift[kinds]
        error = hits - from_odds(by_depth + self._differ[kinds] * shift)
        self._differ += RATE * np.bincount(kinds, error * shift, NUM_TEXT_KINDS)
        self._differ.clip(0, 1, out=self._differ)
        counts.add(kinds, from_odds(by_depth), hits)
        self._depths.add(depths, from_odds(by_rank), hits)
        odds_bucket = np.clip(np.rint(odds) + FARTHEST, 0, NUM_ODDS - 1).astype(np.int64)
        self._ranks.add(ranks * NUM_ODDS + odds_bucket, stated, hits)

    def _by_rank(self, odds: np.ndarray, ranks: np.ndarray) -> np.ndarray:
        """Log-odds `[..., k]` corrected by the buckets of ranks `[k]` and by the log-odds
        themselves, interpolated between the middles of neighbouring buckets."""
        at = _between(odds + FARTHEST, 0, NUM_ODDS - 1 - 1e-9)
        low = at.astype(np.int64)
        kinds = ranks * NUM_ODDS + low
        near, far = self._ranks.shift[kinds], self._ranks.shift[kinds + 1]
        return odds + near + (at - low) * (far - near)


@dataclass(frozen=True, slots=True)
class _StatedProposal:
    """A proposal for one sequence, with its `stated` probabilities, `[k, width]`, uncorrected.

    What may have children in it is numbered: first the `k` requested nodes, then the candidates row
    by row, then the draft tokens of its paths.
    """

    proposal: Proposal
    stated: np.ndarray

    def children(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The proposed children of one of these: tokens, stated probabilities, the likeliest first,
        and numbers."""
        proposal, paths = self.proposal, self.proposal.paths
        rows, width = self.stated.shape
        if number < rows:
            first = rows + number * width
            return proposal.tokens[number], self.stated[number], np.arange(first, first + width)
        if paths is None:
            nothing = np.zeros(0, np.int64)
            return nothing, np.zeros(0), nothing
        below = np.flatnonzero(paths.parents == number - rows)
        return paths.tokens[below], np.exp(paths.logps[below]), rows + rows * width + below


@dataclass(frozen=True, slots=True)
class _PendingNode:
    """A node whose next token is not decided: its `number` in a proposal, and the depth of its
    children."""

    proposal: _StatedProposal
    number: int
    depth: int


class CalibratedProposer:
    """A proposer with calibrated probabilities; `calibration` may know other texts already."""

    def __init__(self, proposer: Proposer, calibration: Calibration | None = None):
        self.proposer = proposer
        self.calibration = calibration or Calibration()
        self.stated: NodeRecords[_PendingNode] = NodeRecords()

    @property
    def parts(self) -> tuple[Proposer, ...]:
        """Those whose calibrations are kept too (`calibrations_of`)."""
        return (self.proposer,)

    def start_sequence(self, context: Context) -> None:
        self.stated.start_sequence(context)
        self.calibration.start_text(context.sequence)
        self.proposer.start_sequence(context)

    def end_sequence(self, sequence: int) -> None:
        self.stated.end_sequence(sequence)
        self.calibration.end_text(sequence)
        self.proposer.end_sequence(sequence)

    def accept_verdict(self, verdict: Verdict) -> None:
        self.proposer.accept_verdict(verdict)
        text = verdict.sequence
        for stated, token, node in self.stated.take_decided(verdict):
            tokens, probabilities, numbers = stated.proposal.children(stated.number)
            places = np.flatnonzero(tokens == token)
            hit = int(places[0]) if len(places) else None
            self.calibration.observe(text, probabilities, stated.depth, hit)
            if hit is not None:
                below = _PendingNode(stated.proposal, int(numbers[hit]), stated.depth + 1)
                self.stated.add(text, node, below)

    def propose(self, requests: Sequence[ProposalRequest], children: int) -> list[Proposal | None]:
        found = self.proposer.propose(requests, children)
        return [
            None if proposal is None else self._corrected(request, proposal)
            for request, proposal in zip(requests, found, strict=True)
        ]

    def _corrected(self, request: ProposalRequest, found: Proposal) -> Proposal:
        text, tree = request.context.sequence, request.tree
        stated = np.exp(found.logps)
        depths = tree.depth[found.parents] + 1
        whole = _StatedProposal(found, stated)
        nodes = zip(tree.id[found.parents].tolist(), depths.tolist(), strict=True)
        self.stated.update(
            text,
            tree,
            [
                (node, _PendingNode(whole, number, depth))
                for number, (node, depth) in enumerate(nodes)
            ],
        )
        with np.errstate(divide="ignore"):
            if found.paths is None or not len(found.paths.parents):
                corrected = self.calibration.correct(text, stated, depths)
                return replace(found, logps=np.log(corrected))
            return self._corrected_with_paths(text, found, found.paths, stated, depths)

    def _corrected_with_paths(
        self,
        text: int,
        found: Proposal,
        paths: DraftPaths,
        candidates: np.ndarray,
        depths: np.ndarray,
    ) -> Proposal:
        """The same with the paths below the candidates `[k, children]`: one table has a row for
        each requested node and each draft token with children, and a column for each child."""
        size, width = candidates.shape
        row_depths = depths.tolist()  # of the children in each row
        row_lengths = [width] * size
        row_of: dict[int, int] = {}  # by the number of the parent in `DraftPaths.parents`
        token_depths: list[int] = []  # of the tokens of paths
        rows, columns = [], []
        for above in paths.parents.tolist():
            token = above - size * width
            depth = 1 + (row_depths[above // width] if token < 0 else token_depths[token])
            token_depths.append(depth)
            row = row_of.setdefault(above, len(row_lengths))
            if row == len(row_lengths):
                row_depths.append(depth)
                row_lengths.append(0)
            rows.append(row)
            columns.append(row_lengths[row])
            row_lengths[row] += 1
        stated = np.zeros((len(row_lengths), max(width, *row_lengths)))
        stated[:size, :width] = candidates
        stated[rows, columns] = np.exp(paths.logps)
        logps = np.log(self.calibration.correct(text, stated, np.array(row_depths)))
        paths = replace(paths, logps=logps[rows, columns])
        return replace(found, logps=logps[:size, :width], paths=paths)


def calibrations_of(proposer: object) -> Iterator[Calibration]:
    """The calibrations of a proposer and of the `parts` that it combines, in an order that is the
    same at every start."""
    if isinstance(proposer, CalibratedProposer):
        yield proposer.calibration
    for part in getattr(proposer, "parts", ()):
        yield from calibrations_of(part)


def restore_calibrations(calibrations: Sequence[Calibration], stored: Any) -> None:
    """Let them go on from what those of an earlier run have stored; None: nothing. What cannot be
    read is ignored, which the log says."""
    if stored is None:
        return
    found = stored if isinstance(stored, list) else [None] * len(calibrations)
    restored = [each.restore(kept) for each, kept in zip(calibrations, found, strict=False)]
    if not all(restored):
        log.warning("What was learnt of how often draft tokens hit is ignored: it has other forms.")
