"""Several sources as one: their candidates merged, each weighed by how right it has been."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pipespec.core import Verdict
from pipespec.errors import ConfigError
from pipespec.head.feed.rounds import check_rounds
from pipespec.head.source.ngram import MAX_MATCH, NGramSource
from pipespec.head.source.protocol import Asked, Candidates, Context, TokenSource, forget
from pipespec.limits import check_whole

WORKERS = ("draft_model", "ngram")
# Stated probabilities of (1/2, 1], (1/4, 1/2], ... are calibrated apart; the last bucket is open.
NUM_BUCKETS = 12
# A source is believed as if so many hits had come exactly as often as it stated.
PRIOR_HITS = 4.0
# The share of what was observed that is still held after one more decided token.
MEMORY = 0.995
# No candidate is certain.
MOST = 0.999


@dataclass(frozen=True)
class Hybrid:
    """Settings: `rounds`, draft rounds per step at most; `sources`, who is asked; `longest`,
    tokens of an n-gram match; `foresight`, whether they rank with the target's own noise."""

    rounds: int | str = 2
    sources: list[str] = field(default_factory=lambda: ["draft_model", "ngram"])
    longest: int = 4
    foresight: bool = True

    def __post_init__(self) -> None:
        check_rounds(self.rounds)
        check_whole("source.longest", self.longest, 1, MAX_MATCH)
        if not self.sources or len(set(self.sources)) < len(self.sources):
            raise ConfigError("source.sources must name one or more sources, each once.")
        for name in self.sources:
            if name not in WORKERS:
                raise ConfigError(
                    f"source.sources holds {name!r}, but a hybrid is made of {', '.join(WORKERS)}."
                )

    @property
    def needs_draft(self) -> bool:
        return "draft_model" in self.sources

    @property
    def synthetic(self) -> bool:
        return False

    def make(self, draft: TokenSource | None, vocabulary: int) -> TokenSource:
        made = {"draft_model": draft, "ngram": NGramSource(self.longest, foresight=self.foresight)}
        workers = {name: made[name] for name in self.sources}
        return HybridSource({name: s for name, s in workers.items() if s is not None})


class Calibration:
    """Turns the probabilities that one source states into those that were observed.

    Per bucket of stated probabilities it counts hits and the hits that were stated; their ratio
    corrects what is stated next. Old observations fade.
    """

    def __init__(self) -> None:
        self.hits = np.full(NUM_BUCKETS, PRIOR_HITS)
        self.stated = np.full(NUM_BUCKETS, PRIOR_HITS)

    def observe(self, probabilities: Sequence[float], hit: int | None) -> None:
        """The candidates of one node, and which of them was the target's, if any was."""
        self.hits += (1 - MEMORY) * (PRIOR_HITS - self.hits)
        self.stated += (1 - MEMORY) * (PRIOR_HITS - self.stated)
        for i, probability in enumerate(probabilities):
            bucket = _bucket(probability)
            self.stated[bucket] += probability
            self.hits[bucket] += i == hit

    def correct(self, probability: float) -> float:
        bucket = _bucket(probability)
        return min(probability * float(self.hits[bucket] / self.stated[bucket]), MOST)


def _bucket(probability: float) -> int:
    return min(int(-math.log2(probability)), NUM_BUCKETS - 1) if probability > 0 else -1


# Per source, what it stated for the children of one node: (token, probability).
Proposals = dict[str, list[tuple[int, float]]]


class HybridSource:
    """Asks every source about every node, merges what they propose, and learns from verdicts.

    A token that several sources propose counts once, with the highest of its calibrated
    probabilities; where the sources together claim more than everything, all are scaled down.
    Nothing is proposed until all sources are ready, so that none falls behind the tree.
    """

    def __init__(self, workers: Mapping[str, TokenSource]):
        self.workers = workers
        self.calibrations = {name: Calibration() for name in workers}
        self._context: dict[int, Context] = {}
        self._proposed: dict[int, dict[int, Proposals]] = {}

    def begin(self, context: Context) -> None:
        self._context[context.sequence] = context
        self._proposed[context.sequence] = {}
        for worker in self.workers.values():
            worker.begin(context)

    def end(self, sequence: int) -> None:
        del self._context[sequence], self._proposed[sequence]
        for worker in self.workers.values():
            worker.end(sequence)

    def accept(self, verdict: Verdict) -> None:
        for worker in self.workers.values():
            worker.accept(verdict)
        context, proposed = self._context[verdict.sequence], self._proposed[verdict.sequence]
        for position in range(verdict.base, len(context.tokens)):
            proposals = proposed.pop(context.nodes[position - 1], {})
            for name, candidates in proposals.items():
                tokens = [token for token, _ in candidates]
                token = context.tokens[position]
                hit = tokens.index(token) if token in tokens else None
                self.calibrations[name].observe([p for _, p in candidates], hit)

    def expand(self, asked: Sequence[Asked], children: int) -> list[Candidates | None]:
        answers = {name: worker.expand(asked, children) for name, worker in self.workers.items()}
        found: list[Candidates | None] = []
        for i, each in enumerate(asked):
            mine = {name: of_all[i] for name, of_all in answers.items()}
            ready = {name: candidates for name, candidates in mine.items() if candidates}
            found.append(self._of_one(each, ready, children) if len(ready) == len(mine) else None)
        return found

    def _of_one(self, asked: Asked, answers: Mapping[str, Candidates], children: int) -> Candidates:
        """What the sources have proposed for one sequence, merged: for the nodes that all of
        them have answered."""
        proposed = self._proposed[asked.context.sequence]
        forget(proposed, asked.tree.id)
        place = {
            name: {node: row for row, node in enumerate(candidates.parents.tolist())}
            for name, candidates in answers.items()
        }
        nodes = [
            node for node in asked.nodes.tolist() if all(node in rows for rows in place.values())
        ]
        merged = []
        for node in nodes:
            proposals = {name: _row(answers[name], rows[node]) for name, rows in place.items()}
            proposed[int(asked.tree.id[node])] = proposals
            merged.append(self._merge(proposals, children))
        return Candidates.of(np.array(nodes, np.int64), merged)

    def _merge(self, proposals: Proposals, children: int) -> list[tuple[int, float]]:
        best: dict[int, float] = {}
        for name, candidates in proposals.items():
            correct = self.calibrations[name].correct
            for token, stated in candidates:
                best[token] = max(best.get(token, 0.0), correct(stated))
        scale = 1 / max(1.0, sum(best.values()))
        ordered = sorted(best.items(), key=lambda pair: -pair[1])[:children]
        return [(token, probability * scale) for token, probability in ordered]


def _row(candidates: Candidates, row: int) -> list[tuple[int, float]]:
    present = np.isfinite(candidates.logps[row])
    tokens = candidates.tokens[row, present].tolist()
    return list(zip(tokens, np.exp(candidates.logps[row, present]).tolist(), strict=True))
