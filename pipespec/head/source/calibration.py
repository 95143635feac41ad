"""Probabilities that are true: what a source states, corrected by what came.

A source says of a guess that it follows, given that the text before it does. How often it did is
counted, over all texts, by the guess's rank among its siblings, how likely it was said to be, and
its depth below the root; and by rank and likelihood within the text itself, which is believed as
far as texts have been found to differ. Old counts fade. In odds, the corrections multiply.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipespec.core import Verdict
from pipespec.head.paths import Paths
from pipespec.head.source.odds import LEAST, between, from_odds, log_odds
from pipespec.head.source.protocol import Asked, Candidates, Context, TokenSource, forget

# Ranks 1, 2, 3 to 4, 5 to 8 and beyond are told apart, and depths likewise.
NUM_GROUPS = 5
# So are log-odds, in steps of one, up to so far from even.
FARTHEST = 7
# Within one text ranks 1, 2 and beyond are told apart, and log-odds below, between and above these.
LIKELY, SURE = 0.0, 2.0
NUM_OWN = 3 * 3
# Nothing is certain.
MOST = 0.999

KINDS = 2 * FARTHEST + 1
# What is held of a kind of guess when it is seen again, and how many guesses a source is believed
# for as if they had come as often as it stated: over all texts, and within one.
MEMORY, PRIOR = 0.995, 8.0
OWN_MEMORY, OWN_PRIOR = 0.95, 4.0
# How fast it is learnt how much texts differ.
RATE = 0.03
# The groups of ranks and depths by their numbers, which begin at 1; the last has all greater ones.
GROUPS = np.array([0, 0, 1, 2, 2, 3, 3, 3, 3, NUM_GROUPS - 1])


def group(numbers: np.ndarray) -> np.ndarray:
    """The groups of ranks or depths."""
    return GROUPS[np.minimum(numbers, len(GROUPS) - 1)]


def own(groups: np.ndarray, odds: np.ndarray) -> np.ndarray:
    """The kinds of guesses within one text: of ranks of these groups `[k]`, with log-odds
    `[..., k]`."""
    return 3 * np.minimum(groups, 2) + (odds > LIKELY) + (odds > SURE)


class Counts:
    """Of each kind of guess how many there were, how many hits were stated, and how many came, as
    fading sums; `shift` `[kinds]` is what these add to stated log-odds.

    `memory` is the share of what was observed of a kind that is still held when it is observed
    again; a source is believed as if `prior` guesses of each kind had come as often as it stated.
    """

    def __init__(self, kinds: int, memory: float, prior: float):
        self.memory = memory
        self.prior = prior
        self.shift = np.zeros(kinds)
        self._sums = np.zeros((3, kinds))

    def add(self, kinds: np.ndarray, stated: np.ndarray, hits: np.ndarray) -> None:
        """The guesses `[k]` of one node, of these kinds."""
        size = len(self.shift)
        guesses = np.bincount(kinds, minlength=size)
        seen = guesses.nonzero()[0]
        more = guesses, np.bincount(kinds, stated, size), np.bincount(kinds, hits, size)
        self._sums[:, seen] = self.memory * self._sums[:, seen] + np.stack(more)[:, seen]
        guesses, expected, came = self._sums[:, seen]
        mean, prior = expected / guesses, self.prior
        self.shift[seen] = log_odds((came + prior * mean) / (guesses + prior)) - log_odds(mean)


class Calibration:
    """Turns the probabilities that one source states into those that were observed."""

    def __init__(self) -> None:
        self._ranks = Counts(NUM_GROUPS * KINDS, MEMORY, PRIOR)
        self._depths = Counts(NUM_GROUPS, MEMORY, PRIOR)
        self._own: dict[int, Counts] = {}
        # How far a text is believed to differ from the others, by kind of guess: where texts are
        # alike, what one shows by itself is chance.
        self._differ = np.full(NUM_OWN, 0.5)

    def begin(self, text: int) -> None:
        self._own[text] = Counts(NUM_OWN, OWN_MEMORY, OWN_PRIOR)

    def end(self, text: int) -> None:
        del self._own[text]

    def correct(self, text: int, stated: np.ndarray, depths: np.ndarray) -> np.ndarray:
        """The probabilities `[k, children]` of the candidates of nodes of a text at these depths,
        likeliest first."""
        if not stated.size:
            return stated
        ranks = group(np.arange(1, stated.shape[1] + 1))
        odds = self._by_rank(log_odds(stated), ranks) + self._depths.shift[group(depths)][:, None]
        kinds = own(ranks, odds)
        odds += self._differ[kinds] * self._own[text].shift[kinds]
        return np.minimum(from_odds(odds), MOST) * (stated > LEAST)

    def observe(self, text: int, stated: np.ndarray, depth: int, hit: int | None) -> None:
        """The candidates of one node of a text at a depth, likeliest first, `[children]`; which of
        them came, if any did."""
        there = np.flatnonzero(stated > LEAST)
        if not len(there):
            return
        ranks, stated = group(there + 1), stated[there]
        hits = there == (-1 if hit is None else hit)
        odds = log_odds(stated)
        by_rank = self._by_rank(odds, ranks)
        depths = np.repeat(group(np.array([depth])), len(ranks))
        by_depth = by_rank + self._depths.shift[depths]
        kinds, mine = own(ranks, by_depth), self._own[text]
        # A step down the gradient of the logarithmic loss.
        shift = mine.shift[kinds]
        wrong = hits - from_odds(by_depth + self._differ[kinds] * shift)
        self._differ += RATE * np.bincount(kinds, wrong * shift, NUM_OWN)
        self._differ.clip(0, 1, out=self._differ)
        mine.add(kinds, from_odds(by_depth), hits)
        self._depths.add(depths, from_odds(by_rank), hits)
        likely = np.clip(np.rint(odds) + FARTHEST, 0, KINDS - 1).astype(np.int64)
        self._ranks.add(ranks * KINDS + likely, stated, hits)

    def _by_rank(self, odds: np.ndarray, ranks: np.ndarray) -> np.ndarray:
        """Log-odds `[..., k]` of guesses whose ranks are of these groups `[k]`, corrected by rank
        and likelihood, between the middles of neighbouring kinds."""
        at = between(odds + FARTHEST, 0, KINDS - 1 - 1e-9)
        low = at.astype(np.int64)
        kinds = ranks * KINDS + low
        near, far = self._ranks.shift[kinds], self._ranks.shift[kinds + 1]
        return odds + near + (at - low) * (far - near)


@dataclass(frozen=True, slots=True)
class _Said:
    """What a source said of one sequence in one round, and how likely it `stated` the candidates to
    be, `[k, width]`.

    What may be followed has numbers: first the `k` nodes that were asked about, then the
    candidates row by row, then the guesses of `paths`.
    """

    candidates: Candidates
    stated: np.ndarray

    def after(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What was said to follow: tokens, how likely each was stated to be, the likeliest first,
        and their numbers."""
        found, paths = self.candidates, self.candidates.paths
        rows, width = self.stated.shape
        if number < rows:
            first = rows + number * width
            return found.tokens[number], self.stated[number], np.arange(first, first + width)
        if paths is None:
            nothing = np.zeros(0, np.int64)
            return nothing, np.zeros(0), nothing
        below = np.flatnonzero(paths.above == number - rows)
        return paths.tokens[below], np.exp(paths.logps[below]), rows + rows * width + below


class Calibrated:
    """A source whose probabilities are true, as far as it has been observed."""

    def __init__(self, source: TokenSource):
        self.source = source
        self.calibration = Calibration()
        self._contexts: dict[int, Context] = {}
        # Of each sequence by node: where something was said to follow it, as which number there,
        # and how deep that lies.
        self._told: dict[int, dict[int, tuple[_Said, int, int]]] = {}

    def begin(self, context: Context) -> None:
        self._contexts[context.sequence] = context
        self._told[context.sequence] = {}
        self.calibration.begin(context.sequence)
        self.source.begin(context)

    def end(self, sequence: int) -> None:
        del self._contexts[sequence], self._told[sequence]
        self.calibration.end(sequence)
        self.source.end(sequence)

    def accept(self, verdict: Verdict) -> None:
        self.source.accept(verdict)
        text = verdict.sequence
        context, held = self._contexts[text], self._told[text]
        for position in range(verdict.base, len(context.tokens)):
            told = held.pop(context.nodes[position - 1], None)
            if told is None:
                continue
            said, number, depth = told
            tokens, stated, numbers = said.after(number)
            places = np.flatnonzero(tokens == context.tokens[position])
            hit = int(places[0]) if len(places) else None
            self.calibration.observe(text, stated, depth, hit)
            if hit is not None:
                held.setdefault(context.nodes[position], (said, int(numbers[hit]), depth + 1))

    def expand(self, asked: Sequence[Asked], children: int) -> list[Candidates | None]:
        found = self.source.expand(asked, children)
        return [
            None if answer is None else self._of_one(each, answer)
            for each, answer in zip(asked, found, strict=True)
        ]

    def _of_one(self, asked: Asked, found: Candidates) -> Candidates:
        text, tree = asked.context.sequence, asked.tree
        held = self._told[text]
        forget(held, tree.id)
        stated = np.exp(found.logps)
        depths = tree.depth[found.parents] + 1
        said = _Said(found, stated)
        named = zip(tree.id[found.parents].tolist(), depths.tolist(), strict=True)
        held.update({node: (said, number, depth) for number, (node, depth) in enumerate(named)})
        with np.errstate(divide="ignore"):
            if found.paths is None or not len(found.paths.above):
                true = self.calibration.correct(text, stated, depths)
                return replace(found, logps=np.log(true))
            return self._with_paths(text, found, found.paths, stated, depths)

    def _with_paths(
        self,
        text: int,
        found: Candidates,
        paths: Paths,
        candidates: np.ndarray,
        depths: np.ndarray,
    ) -> Candidates:
        """The candidates, stated so `[k, children]`, and what hangs below them, a row for each that
        something hangs from."""
        size, width = candidates.shape
        above = paths.above
        deep = depths.tolist()
        depth: list[int] = []  # of what is guessed below the candidates
        first: dict[int, int] = {}  # the row of what something hangs from
        at: list[int] = []
        held: list[int] = []  # how much stands in each row
        rows, places = [], []
        for one in above.tolist():
            guess = one - size * width
            below = 1 + (deep[one // width] if guess < 0 else depth[guess])
            depth.append(below)
            row = first.setdefault(one, len(held))
            if row == len(held):
                at.append(below)
                held.append(0)
            rows.append(size + row)
            places.append(held[row])
            held[row] += 1
        stated = np.zeros((size + len(held), max(width, *held)))
        stated[:size, :width] = candidates
        stated[rows, places] = np.exp(paths.logps)
        depths = np.concatenate((depths, at))
        logps = np.log(self.calibration.correct(text, stated, depths))
        paths = replace(paths, logps=logps[rows, places])
        return replace(found, logps=logps[:size, :width], paths=paths)
