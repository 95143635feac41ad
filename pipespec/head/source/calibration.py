"""Probabilities that are true: what a source states, corrected by what came.

A source says of a guess that it follows, given that the text before it does. How often it did is
counted by the guess's rank among its siblings, how likely it was said to be, and its depth below
the root; old counts fade. In odds, the corrections by rank and likelihood and by depth multiply.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipespec.core import Verdict
from pipespec.head.paths import Paths
from pipespec.head.source.protocol import Asked, Candidates, Context, TokenSource, forget

# Ranks 1, 2, 3 to 4, 5 to 8 and beyond are told apart, and depths likewise.
NUM_GROUPS = 5
# So are log-odds, in steps of one, up to so far from even.
FARTHEST = 7
# A source is believed as if so many guesses of each kind had come as often as it stated.
PRIOR = 8.0
# The share of what was observed that is still held after one more guess of the kind.
MEMORY = 0.998
# Nothing is certain.
MOST = 0.999
LEAST = 1e-9


KINDS = 2 * FARTHEST + 1


def group(numbers: np.ndarray) -> np.ndarray:
    """The groups of ranks or depths, which begin at 1."""
    return np.minimum(np.ceil(np.log2(numbers)).astype(np.int64), NUM_GROUPS - 1)


def log_odds(probability: np.ndarray) -> np.ndarray:
    probability = np.clip(probability, LEAST, 1 - LEAST)
    return np.log(probability / (1 - probability))


def from_odds(logarithm: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logarithm))


class Counts:
    """Of each kind of guess how many there were, how many hits were stated, and how many came, as
    fading sums; `shift` is what these add to stated log-odds."""

    def __init__(self, shape: tuple[int, ...]):
        self._sums = np.zeros((3, *shape))
        self.shift = np.zeros(shape)

    def add(self, kinds: tuple[np.ndarray, ...], stated: np.ndarray, hits: np.ndarray) -> None:
        """Guesses `[k]` of these kinds."""
        for i, (probability, hit) in enumerate(zip(stated.tolist(), hits.tolist(), strict=True)):
            at = tuple(int(kind[i]) for kind in kinds)
            for sums, more in zip(self._sums, (1.0, probability, hit), strict=True):
                sums[at] = MEMORY * sums[at] + more
        guesses, expected, came = (sums[kinds] for sums in self._sums)
        mean = expected / guesses
        self.shift[kinds] = log_odds((came + PRIOR * mean) / (guesses + PRIOR)) - log_odds(mean)


class Calibration:
    """Turns the probabilities that one source states into those that were observed."""

    def __init__(self) -> None:
        self._ranks = Counts((NUM_GROUPS, KINDS))
        self._depths = Counts((NUM_GROUPS,))

    def _by_rank(self, stated: np.ndarray) -> np.ndarray:
        """Log-odds corrected by rank and likelihood, `[k, children]`, between the middles of
        neighbouring kinds."""
        odds = log_odds(stated)
        at = np.clip(odds + FARTHEST, 0, KINDS - 1 - 1e-9)
        low = at.astype(np.int64)
        ranks = group(np.arange(1, stated.shape[1] + 1))
        shift = self._ranks.shift
        near, far = shift[ranks, low], shift[ranks, low + 1]
        return odds + near + (at - low) * (far - near)

    def observe(self, stated: np.ndarray, depth: int, hit: int | None) -> None:
        """The candidates of one node at a depth, likeliest first, `[children]`; which of them came,
        if any did."""
        hits = np.arange(len(stated)) == (-1 if hit is None else hit)
        there = stated > LEAST
        ranks = group(np.arange(1, len(stated) + 1))[there]
        if not len(ranks):
            return
        corrected = from_odds(self._by_rank(stated[None])[0])[there]
        depths = np.repeat(group(np.array([depth])), len(ranks))
        self._depths.add((depths,), corrected, hits[there])
        kinds = np.clip(np.rint(log_odds(stated)[there]) + FARTHEST, 0, KINDS - 1).astype(np.int64)
        self._ranks.add((ranks, kinds), stated[there], hits[there])

    def correct(self, stated: np.ndarray, depths: np.ndarray) -> np.ndarray:
        """The probabilities `[k, children]` of the candidates of nodes at these depths, likeliest
        first; those of a row are no more than everything together."""
        if not stated.size:
            return stated
        odds = self._by_rank(stated) + self._depths.shift[group(depths)][:, None]
        true = np.where(stated > LEAST, np.minimum(from_odds(odds), MOST), 0.0)
        # Scaling all of them would make the surest ones, of which most is known, too small.
        others = true[:, 1:].sum(1, keepdims=True)
        true[:, 1:] *= np.minimum((1 - true[:, :1]) / np.maximum(others, LEAST), 1.0)
        return true


@dataclass(frozen=True, slots=True)
class _Told:
    """What a source said may follow a node: `tokens` and how likely it `stated` each to be, the
    likeliest first, at a depth. `guesses` are their numbers in `paths`, which say what may follow
    them."""

    tokens: np.ndarray
    stated: np.ndarray
    depth: int
    guesses: np.ndarray
    paths: Paths | None
    candidates: int

    def after(self, place: int) -> _Told | None:
        """What was said to follow one of the tokens; None: nothing."""
        if self.paths is None:
            return None
        below = np.flatnonzero(self.paths.above == self.guesses[place])
        if not len(below):
            return None
        stated = np.exp(self.paths.logps[below])
        numbers = self.candidates + below
        tokens = self.paths.tokens[below]
        return _Told(tokens, stated, self.depth + 1, numbers, self.paths, self.candidates)


class Calibrated:
    """A source whose probabilities are true, as far as it has been observed."""

    def __init__(self, source: TokenSource):
        self.source = source
        self.calibration = Calibration()
        self._contexts: dict[int, Context] = {}
        self._told: dict[int, dict[int, _Told]] = {}

    def begin(self, context: Context) -> None:
        self._contexts[context.sequence] = context
        self._told[context.sequence] = {}
        self.source.begin(context)

    def end(self, sequence: int) -> None:
        del self._contexts[sequence], self._told[sequence]
        self.source.end(sequence)

    def accept(self, verdict: Verdict) -> None:
        self.source.accept(verdict)
        context, held = self._contexts[verdict.sequence], self._told[verdict.sequence]
        for position in range(verdict.base, len(context.tokens)):
            told = held.pop(context.nodes[position - 1], None)
            if told is None:
                continue
            places = np.flatnonzero(told.tokens == context.tokens[position])
            hit = int(places[0]) if len(places) else None
            self.calibration.observe(told.stated, told.depth, hit)
            if hit is not None and (after := told.after(hit)) is not None:
                held.setdefault(context.nodes[position], after)

    def expand(self, asked: Sequence[Asked], children: int) -> list[Candidates | None]:
        found = self.source.expand(asked, children)
        return [
            None if answer is None else self._of_one(each, answer)
            for each, answer in zip(asked, found, strict=True)
        ]

    def _of_one(self, asked: Asked, found: Candidates) -> Candidates:
        held, tree = self._told[asked.context.sequence], asked.tree
        forget(held, tree.id)
        stated = np.exp(found.logps)
        depths = tree.depth[found.parents] + 1
        size, width = stated.size, stated.shape[1]
        for i, (node, depth) in enumerate(
            zip(tree.id[found.parents].tolist(), depths.tolist(), strict=True)
        ):
            numbers = np.arange(i * width, (i + 1) * width)
            held[node] = _Told(found.tokens[i], stated[i], depth, numbers, found.paths, size)
        with np.errstate(divide="ignore"):
            if found.paths is None or not len(found.paths.above):
                return replace(found, logps=np.log(self.calibration.correct(stated, depths)))
            return self._with_paths(found, found.paths, stated, depths)

    def _with_paths(
        self, found: Candidates, paths: Paths, candidates: np.ndarray, depths: np.ndarray
    ) -> Candidates:
        """The candidates, stated so `[k, children]`, and what hangs below them, a row for each that
        something hangs from."""
        size, width = candidates.shape
        above = paths.above
        depth = np.repeat(depths, width).tolist()
        first: dict[int, int] = {}  # the row of what something hangs from
        at: list[int] = []
        held: list[int] = []  # how much stands in each row
        rows, places = [], []
        for one in above.tolist():
            depth.append(depth[one] + 1)
            row = first.setdefault(one, len(held))
            if row == len(held):
                at.append(depth[one] + 1)
                held.append(0)
            rows.append(size + row)
            places.append(held[row])
            held[row] += 1
        stated = np.zeros((size + len(held), max(width, *held)))
        stated[:size, :width] = candidates
        stated[rows, places] = np.exp(paths.logps)
        logps = np.log(self.calibration.correct(stated, np.concatenate((depths, at))))
        paths = replace(paths, logps=logps[rows, places])
        return replace(found, logps=logps[:size, :width], paths=paths)
