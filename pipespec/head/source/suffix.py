"""What followed the longest run of tokens that stood before: in the request's own text, in past
answers, in files (SuffixDecoding, arXiv 2411.04975).

It needs no model and no GPU, and pays where an answer repeats what is known: code that is edited,
passages that are quoted, tables that go on. Where one continuation is likely, whole paths of it
are proposed at once.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

import numpy as np

from pipespec.core import Verdict
from pipespec.errors import ConfigError
from pipespec.head.feed.rounds import check_rounds
from pipespec.head.paths import Paths
from pipespec.head.source.automaton import NOWHERE, Place, SuffixAutomaton
from pipespec.head.source.calibration import Calibrated
from pipespec.head.source.known import Past, Trust, read_corpus
from pipespec.head.source.protocol import Asked, Candidates, Context, Encode, TokenSource, forget
from pipespec.head.tree import ROOT, Tree
from pipespec.limits import check_whole
from pipespec.system.reading import is_folder

MAX_HELD = 1 << 26
# Tokens that are read in one round, of all texts that are behind.
CHUNK = 1024
# Of the tokens that a round could read, one of so many is of answers that are over.
IDLE = 16
# Guesses below candidates of one round, and how likely each is at least.
MOST_DEEPER = 32
LEAST_LIKELY = 0.1
# What is left to shorter runs at least.
LEAST_LEFT = 0.02
# Runs of different lengths that are asked for one token.
MOST_RUNS = 4
# Tokens of the newest text by which a place in another text is found again.
FOUND_BY = 64


@dataclass(frozen=True)
class Suffix:
    """Settings: `rounds`, tree expansions per step at most; `past`, tokens of past answers that
    are held, 0: none; `corpus`, a folder of text files that are known from the start, of which
    `corpus_tokens` are read; `foresight`, whether what will be drawn is ranked with the target's
    own noise."""

    rounds: int | str = 1
    past: int = 1 << 16
    corpus: str | None = None
    corpus_tokens: int = 1 << 18
    foresight: bool = True

    def __post_init__(self) -> None:
        check_rounds(self.rounds)
        check_memory(self.past, self.corpus, self.corpus_tokens)

    @property
    def needs_draft(self) -> bool:
        return False

    @property
    def synthetic(self) -> bool:
        return False

    def make(self, draft: TokenSource | None, vocabulary: int, encode: Encode) -> TokenSource:
        corpus = read_corpus(self.corpus, self.corpus_tokens, encode)
        return Calibrated(SuffixSource(self.past, corpus, foresight=self.foresight))


def check_memory(past: int, corpus: str | None, corpus_tokens: int) -> None:
    """Raises ConfigError."""
    check_whole("source.past", past, 0, MAX_HELD)
    check_whole("source.corpus_tokens", corpus_tokens, 1, MAX_HELD)
    if corpus is not None and not is_folder(corpus):
        raise ConfigError(f"source.corpus is {corpus!r}, but must name a folder of text files.")


OWN, NEW, OLD, CORPUS = range(4)
# Where a text stands in each of those that are known, by origin.
Places = tuple[Place, ...]
Stated = list[tuple[int, float]]
probability_of = itemgetter(1)


@dataclass
class _Text:
    """A request: whether its noise is foreseen, its text as an automaton, `read` tokens of it, and
    where its end stands in all that is known, itself first; the same of its guesses, by node id.
    `stated` is what was said to follow a place since anything was last read."""

    context: Context
    foreseen: bool
    own: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    read: int = 0
    places: Places = ()
    turns: int = -1
    guesses: dict[int, Places] = field(default_factory=dict)
    stated: dict[tuple[Places, int], Stated] = field(default_factory=dict)
    of_past: int = 0


class SuffixSource:
    """Follows the text and its guesses through the texts that it knows."""

    def __init__(
        self, past: int = 0, corpus: SuffixAutomaton | None = None, *, foresight: bool = True
    ):
        """`past`: tokens of answers that may be held."""
        self.foresight = foresight
        self.trust = Trust()
        self.past = Past(past)
        self._corpus = corpus or SuffixAutomaton()
        self._texts: dict[int, _Text] = {}
        self._others: list[tuple[int, SuffixAutomaton]] = []  # that hold anything, by origin

    def begin(self, context: Context) -> None:
        self._texts[context.sequence] = _Text(context, self.foresight and context.drawn)

    def accept(self, verdict: Verdict) -> None:
        """The context holds the new tokens; they are read when next asked."""

    def end(self, sequence: int) -> None:
        context = self._texts.pop(sequence).context
        self.past.add(context.tokens[context.prompt :])

    def expand(self, asked: Sequence[Asked], children: int) -> list[Candidates | None]:
        left = CHUNK
        others = self.past.newer, self.past.older, self._corpus
        self._others = [each for each in enumerate(others, NEW) if each[1].length]
        found: list[Candidates | None] = []
        for each in asked:
            text = self._texts[each.context.sequence]
            left -= self._catch_up(text, left)
            whole = text.read == len(each.context.tokens)
            found.append(self._of_one(text, each, children) if whole else None)
        self.past.read(left // IDLE)
        return found

    def _known(self, text: _Text) -> tuple[SuffixAutomaton, ...]:
        """The texts that one request knows, by origin."""
        return text.own, self.past.newer, self.past.older, self._corpus

    def _catch_up(self, text: _Text, most: int) -> int:
        """Read so many of the tokens that a text has gained, and learn from those of the answer."""
        tokens = text.context.tokens
        stop = min(text.read + most, len(tokens))
        count = stop - text.read
        known = self._known(text)
        if count or text.of_past != self.past.length:
            text.of_past = self.past.length
            text.stated.clear()
        if text.turns != self.past.turns:
            text.turns = self.past.turns
            last = tokens[max(text.read - FOUND_BY, 0) : text.read]
            text.places = (text.own.end, *(each.follow(last) for each in known[NEW:]))
            text.guesses.clear()
        for position in range(text.read, stop):
            token = tokens[position]
            if position >= text.context.prompt:
                self._learn(known, text.places, token)
            text.own.read((token,))
            text.places = self._with_others(text.own.end, text.places, token)
        text.read = stop
        return count

    def _runs(self, known: Sequence[SuffixAutomaton], places: Places) -> list[tuple[int, int, int]]:
        """What may be asked for the token after a place: length, origin and state of each run, the
        longest first."""
        if not self._others:
            runs = known[OWN].runs(places[OWN], MOST_RUNS)
            return [(length, OWN, state) for state, length in runs]
        found = [
            (length, origin, state)
            for origin, place in enumerate(places)
            if place[1]
            for state, length in known[origin].runs(place, MOST_RUNS)
        ]
        if len(found) > MOST_RUNS:
            found.sort(key=lambda run: (-run[0], run[1]))
        return found[:MOST_RUNS]

    def _learn(self, known: Sequence[SuffixAutomaton], places: Places, token: int) -> None:
        """`token` has come: the runs that were asked before it was found are told."""
        passed = 0
        for length, origin, state in self._runs(known, places):
            seen = known[origin].seen(state)
            if seen.distinct <= passed:  # nothing else than after longer runs
                continue
            passed = seen.distinct
            hit = known[origin].followed(state, token)
            self.trust.learn(Trust.kind(origin, length, seen), hit=hit)
            if hit:
                return

    def _next(self, text: _Text, places: Places, position: int, children: int) -> Stated:
        """Tokens that may stand at `position`, after a place, and how likely each is, the likeliest
        first."""
        key = places, children
        found = text.stated.get(key)
        if found is None:
            found = text.stated[key] = self._after(text, places, children)
        if text.foreseen:
            from pipespec.sampling.foresight import reweigh  # imports torch

            return reweigh(found, position, text.context.sampling.seed)[:children]
        return found[:children]

    def _after(self, text: _Text, places: Places, children: int) -> Stated:
        """Tokens that may follow a place, and how likely each is, the likeliest first; `children`
        of them are enough.

        What followed the longest run shares what it is trusted with by how often it came; the rest
        is left to what followed shorter ones.
        """
        known = self._known(text)
        stated: dict[int, float] = {}
        left = 1.0
        passed = asked = 0
        for length, origin, state in self._runs(known, places):
            total, distinct, fresh = seen = known[origin].seen(state)
            if distinct <= passed:
                continue
            passed = distinct
            if stated:
                total -= sum([count for token, count in fresh if token in stated])
                fresh = [each for each in fresh if each[0] not in stated]
                if not fresh:
                    continue
            asked += 1
            share = left * self.trust.of(Trust.kind(origin, length, seen))
            left -= share
            share /= total
            for token, count in fresh[:children]:
                stated[token] = share * count
            if len(stated) >= children or left < LEAST_LEFT:
                break
        found = list(stated.items())
        if asked > 1:
            found.sort(key=probability_of, reverse=True)
        return found

    def _places(self, text: _Text, tree: Tree, nodes: np.ndarray) -> list[Places]:
        """Where the text that ends with each of these nodes of the tree stands."""
        parents = tree.parent[nodes]
        asked = (nodes, tree.id[nodes], parents, tree.id[parents], tree.token[nodes])
        found: list[Places] = []
        held = text.guesses
        for node, name, parent, above, token in zip(*(e.tolist() for e in asked), strict=True):
            before = text.places if parent == ROOT else held.get(above)
            if node == ROOT or before is None:
                places = self._walk(text, tree, node)
            else:
                places = held[name] = self._step(text, before, token)
            found.append(places)
        return found

    def _walk(self, text: _Text, tree: Tree, node: int) -> Places:
        """The same of one node, from the nearest node above it whose place is known."""
        above: list[int] = []
        places = text.places
        while node != ROOT:
            if (held := text.guesses.get(int(tree.id[node]))) is not None:
                places = held
                break
            above.append(node)
            node = int(tree.parent[node])
        for below in reversed(above):
            places = self._step(text, places, int(tree.token[below]))
            text.guesses[int(tree.id[below])] = places
        return places

    def _step(self, text: _Text, places: Places, token: int) -> Places:
        return self._with_others(text.own.step(places[OWN], token), places, token)

    def _with_others(self, own: Place, places: Places, token: int) -> Places:
        """A place in the request's own text, and where a token leads in all else that is known."""
        if not self._others:
            return own, NOWHERE, NOWHERE, NOWHERE
        found = [own, NOWHERE, NOWHERE, NOWHERE]
        for origin, each in self._others:
            found[origin] = each.step(places[origin], token)
        return tuple(found)

    def _of_one(self, text: _Text, asked: Asked, children: int) -> Candidates:
        tree, nodes = asked.tree, asked.nodes
        forget(text.guesses, tree.id)
        places = self._places(text, tree, nodes)
        rows = [
            self._next(text, at, position, children)
            for at, position in zip(places, (tree.position[nodes] + 1).tolist(), strict=True)
        ]
        found = Candidates.of(nodes, rows)
        if not asked.deeper:
            return found
        return replace(found, paths=self._paths(text, asked, rows, places, children))

    def _paths(
        self,
        text: _Text,
        asked: Asked,
        rows: Sequence[Stated],
        places: Sequence[Places],
        children: int,
    ) -> Paths:
        """Guesses below the candidates, the likeliest first."""
        width = max(map(len, rows), default=0)
        cum = np.exp(asked.tree.cum[asked.nodes]).tolist()
        positions = (asked.tree.position[asked.nodes] + 1).tolist()
        heap = []
        for i, (row, chance) in enumerate(zip(rows, cum, strict=True)):
            if chance <= LEAST_LIKELY:
                continue
            for j, (token, probability) in enumerate(row):
                if chance * probability <= LEAST_LIKELY:
                    break
                heap.append(
                    (-chance * probability, i * width + j, places[i], token, positions[i] + 1)
                )
        heapq.heapify(heap)
        above: list[int] = []
        tokens: list[int] = []
        stated: list[float] = []
        while heap and len(above) < min(asked.deeper, MOST_DEEPER):
            chance, candidate, before, token, position = heapq.heappop(heap)
            at = self._step(text, before, token)
            for below, probability in self._next(text, at, position, children):
                if -chance * probability < LEAST_LIKELY or len(above) >= asked.deeper:
                    break
                guess = len(rows) * width + len(above)
                heapq.heappush(heap, (chance * probability, guess, at, below, position + 1))
                above.append(candidate)
                tokens.append(below)
                stated.append(probability)
        return Paths(np.array(above, np.int64), np.array(tokens, np.int64), np.log(stated))
