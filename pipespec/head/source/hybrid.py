"""Several sources as one: their candidates mixed, each believed as far as it has been right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np

from pipespec.core import Verdict
from pipespec.errors import ConfigError
from pipespec.head.feed.rounds import check_rounds
from pipespec.head.paths import Paths
from pipespec.head.source.calibration import Calibrated
from pipespec.head.source.known import read_corpus
from pipespec.head.source.mixture import Mixture
from pipespec.head.source.protocol import Asked, Candidates, Context, Encode, TokenSource, forget
from pipespec.head.source.suffix import SuffixSource, check_memory

WORKERS = ("draft_model", "suffix")
# Names that go with the next release.
FORMER = {"ngram": "suffix"}


@dataclass(frozen=True)
class Hybrid:
    """Settings: `rounds`, draft rounds per step at most; `sources`, who is asked; `past`, `corpus`
    and `corpus_tokens`, what a suffix source knows (`Suffix`); `foresight`, whether they rank with
    the target's own noise."""

    rounds: int | str = 2
    sources: list[str] = field(default_factory=lambda: ["draft_model", "suffix"])
    past: int = 1 << 16
    corpus: str | None = None
    corpus_tokens: int = 1 << 18
    foresight: bool = True

    def __post_init__(self) -> None:
        check_rounds(self.rounds)
        check_memory(self.past, self.corpus, self.corpus_tokens)
        names = self._names
        if not names or len(set(names)) < len(names):
            raise ConfigError("source.sources must name one or more sources, each once.")
        for name in names:
            if name not in WORKERS:
                raise ConfigError(
                    f"source.sources holds {name!r}, but a hybrid is made of {', '.join(WORKERS)}."
                )

    @property
    def _names(self) -> list[str]:
        return [FORMER.get(name, name) for name in self.sources]

    @property
    def needs_draft(self) -> bool:
        return "draft_model" in self.sources

    @property
    def synthetic(self) -> bool:
        return False

    def make(self, draft: TokenSource | None, vocabulary: int, encode: Encode) -> TokenSource:
        workers: dict[str, TokenSource] = {}
        for name in self._names:
            if name == "suffix":
                corpus = read_corpus(self.corpus, self.corpus_tokens, encode)
                workers[name] = SuffixSource(self.past, corpus, foresight=self.foresight)
            else:
                assert draft is not None
                workers[name] = draft
        return Calibrated(HybridSource(workers))


# What sources say of the children of one node: (token, probability).
Stated = list[tuple[int, float]]
# Of a node: the tokens that may follow, and what each source stated of each, `[k, sources]`.
Named = tuple[list[int], np.ndarray]


class HybridSource:
    """Asks every source about every node and mixes what they state.

    A token that several sources propose counts once. Nothing is proposed until all sources are
    ready, so that none falls behind the tree.
    """

    def __init__(self, workers: Mapping[str, TokenSource]):
        self.workers = {name: Calibrated(worker) for name, worker in workers.items()}
        self.mixture = Mixture(len(self.workers))
        self._contexts: dict[int, Context] = {}
        self._named: dict[int, dict[int, Named]] = {}  # of each sequence by node

    def begin(self, context: Context) -> None:
        self._contexts[context.sequence] = context
        self._named[context.sequence] = {}
        for worker in self.workers.values():
            worker.begin(context)

    def end(self, sequence: int) -> None:
        del self._contexts[sequence], self._named[sequence]
        for worker in self.workers.values():
            worker.end(sequence)

    def accept(self, verdict: Verdict) -> None:
        for worker in self.workers.values():
            worker.accept(verdict)
        context, held = self._contexts[verdict.sequence], self._named[verdict.sequence]
        for position in range(verdict.base, len(context.tokens)):
            if (said := held.pop(context.nodes[position - 1], None)) is not None:
                tokens, stated = said
                self.mixture.learn(stated, np.array(tokens) == context.tokens[position])

    def expand(self, asked: Sequence[Asked], children: int) -> list[Candidates | None]:
        answers = [worker.expand(asked, children) for worker in self.workers.values()]
        found: list[Candidates | None] = []
        for each, mine in zip(asked, zip(*answers, strict=True), strict=True):
            ready = [candidates for candidates in mine if candidates is not None]
            found.append(self._mixed(each, ready, children) if len(ready) == len(mine) else None)
        return found

    def _mixed(self, asked: Asked, answers: Sequence[Candidates], children: int) -> Candidates:
        """What the sources have proposed for one sequence: for the nodes that all have answered."""
        held, ids = self._named[asked.context.sequence], asked.tree.id
        forget(held, ids)
        places = [{node: i for i, node in enumerate(each.parents.tolist())} for each in answers]
        both = list(zip(answers, places, strict=True))
        nodes = [node for node in asked.nodes.tolist() if all(node in rows for rows in places)]
        rows = [named([_row(answer, place[node]) for answer, place in both]) for node in nodes]
        held.update(zip(ids[nodes].tolist(), rows, strict=True))
        stated = np.concatenate([np.zeros((0, len(both))), *(each for _, each in rows)])
        mixed = iter(self.mixture.of(stated).tolist())
        found = []
        for tokens, _ in rows:
            pairs = zip(tokens, islice(mixed, len(tokens)), strict=True)
            found.append(sorted(pairs, key=lambda pair: -pair[1])[:children])
        candidates = Candidates.of(np.array(nodes, np.int64), found)
        deeper = [
            paths
            for answer, place in both
            if (paths := _moved(answer, [place[node] for node in nodes], candidates)) is not None
        ]
        return replace(candidates, paths=_together(deeper, candidates.tokens.size))


def named(rows: Sequence[Stated]) -> Named:
    """What the sources stated of one node, by token."""
    tokens = list(dict.fromkeys(token for row in rows for token, _ in row))
    place = {token: i for i, token in enumerate(tokens)}
    stated = np.zeros((len(tokens), len(rows)))
    for source, row in enumerate(rows):
        for token, probability in row:
            stated[place[token], source] = probability
    return tokens, stated


def _row(candidates: Candidates, row: int) -> Stated:
    present = np.isfinite(candidates.logps[row])
    tokens = candidates.tokens[row, present].tolist()
    return list(zip(tokens, np.exp(candidates.logps[row, present]).tolist(), strict=True))


def _moved(answer: Candidates, rows: Sequence[int], merged: Candidates) -> Paths | None:
    """The paths of an answer below those of its candidates, of these rows, that were kept."""
    if answer.paths is None or not len(answer.paths.above):
        return None
    old, new = answer.tokens.shape[1], merged.tokens.shape[1]
    number: dict[int, int] = {}  # by what guesses hung from, what they hang from now
    for i, row in enumerate(rows):
        at = {token: j for j, token in enumerate(merged.tokens[i].tolist())}
        for j, token in enumerate(answer.tokens[row].tolist()):
            if token in at and np.isfinite(answer.logps[row, j]):
                number[row * old + j] = i * new + at[token]
    kept: list[int] = []
    above: list[int] = []
    for guess, parent in enumerate(answer.paths.above.tolist()):
        if parent in number:
            number[answer.tokens.size + guess] = merged.tokens.size + len(kept)
            above.append(number[parent])
            kept.append(guess)
    return Paths(np.array(above, np.int64), answer.paths.tokens[kept], answer.paths.logps[kept])


def _together(several: Sequence[Paths], candidates: int) -> Paths | None:
    """The paths below so many candidates, of all sources; what two of them know is taken from the
    first."""
    if not several:
        return None
    number: dict[tuple[int, int], int] = {}  # by what it hangs from and its token
    above: list[int] = []
    tokens: list[int] = []
    logps: list[float] = []
    for paths in several:
        mine = [*range(candidates)]
        for parent, token, logp in zip(
            paths.above.tolist(), paths.tokens.tolist(), paths.logps.tolist(), strict=True
        ):
            key = mine[parent], token
            if key not in number:
                number[key] = candidates + len(above)
                above.append(key[0])
                tokens.append(token)
                logps.append(logp)
            mine.append(number[key])
    return Paths(np.array(above, np.int64), np.array(tokens, np.int64), np.array(logps))
