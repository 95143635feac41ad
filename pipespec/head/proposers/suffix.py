"""Proposes what followed the longest earlier occurrence of the text's ending: in the request's own
text, in past answers, in files (SuffixDecoding, arXiv 2411.04975).

It needs no model, and pays where an answer repeats what is known. Where one continuation is likely,
whole paths of it are proposed at once.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

import numpy as np

from pipespec.core import Verdict
from pipespec.errors import ConfigError
from pipespec.head.paths import DraftPaths
from pipespec.head.proposer import (
    ROUNDS,
    Context,
    Encode,
    Proposal,
    ProposalRequest,
    Proposer,
    ProposerConfig,
    TokenProbabilities,
)
from pipespec.head.proposers.calibration import CalibratedProposer
from pipespec.head.proposers.history import AnswerHistory, MatchAccuracy, read_corpus
from pipespec.head.proposers.node_records import drop_pruned
from pipespec.head.proposers.suffix_automaton import NO_MATCH, Match, SuffixAutomaton
from pipespec.head.tree import ROOT, Tree
from pipespec.settings import setting
from pipespec.system.validation import is_folder

MAX_HELD = 1 << 26
# Tokens of a corpus that are read.
CORPUS_TOKENS = 1 << 18
# Tokens that are read in one round, of all sequences that are behind.
CHUNK = 1024
# Of the tokens that a round has left to read, past answers get one in so many.
PAST_SHARE = 16
# Draft tokens below the candidates of one round, and the least probability of each.
MAX_PATH_TOKENS = 32
MIN_PROBABILITY = 0.1
# Below this share of the probability, shorter suffixes are not consulted.
MIN_REST = 0.02
# Suffixes of different lengths that are consulted for one token.
MAX_SUFFIXES = 4
# Tokens of the text's end by which a match in another text is found again.
REMATCH_TOKENS = 64


@dataclass(frozen=True)
class SuffixConfig(ProposerConfig):
    """Settings of the suffix proposer."""

    rounds: int | str = setting(1, ROUNDS, experimental=True)
    past: int = setting(
        1 << 16,
        "Tokens of past answers that the suffix proposer keeps; with 0 no request uses another's.",
        "tokens",
        limits=(0, MAX_HELD),
        experimental=True,
    )
    corpus: str | None = setting(
        None,
        "Folder of text files, on the head's host, in which the suffix proposer finds matches too.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.corpus is not None and not is_folder(self.corpus):
            raise ConfigError(
                f"proposer.corpus is {self.corpus!r}, but must name a folder of text files."
            )

    def make(self, draft: Proposer | None, vocabulary: int, encode: Encode) -> Proposer:
        return CalibratedProposer(self.suffix_proposer(encode))

    def suffix_proposer(self, encode: Encode) -> SuffixProposer:
        """The proposer, not calibrated."""
        corpus = read_corpus(self.corpus, CORPUS_TOKENS, encode)
        return SuffixProposer(self.past, corpus)


OWN, NEW, OLD, CORPUS = range(4)  # texts: the request's, both halves of past answers, the files
# The longest match of a text's ending in each of the known texts.
Matches = tuple[Match, ...]
probability_of = itemgetter(1)


@dataclass
class _SequenceText:
    """The text of one sequence.

    Attributes:
        foresee: whether its draft tokens are ranked with the target's noise.
        own: the text as an automaton.
        num_read: how many of its tokens are in it.
        matches: of its end.
        draft_matches: of the ends of draft tokens' paths, by node id.
        stated: what may follow a match, by match and number of children; valid until anything is
            read.
        past_length, num_rotations: of the past answers, when `stated` and `matches` were made.
    """

    context: Context
    foresee: bool
    own: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    num_read: int = 0
    matches: Matches = ()
    num_rotations: int = -1
    draft_matches: dict[int, Matches] = field(default_factory=dict)
    stated: dict[tuple[Matches, int], TokenProbabilities] = field(default_factory=dict)
    past_length: int = 0


class SuffixProposer:
    """Matches the text and its draft tokens in the texts that it knows, `past` answers' tokens
    among them."""

    def __init__(self, past: int = 0, corpus: SuffixAutomaton | None = None):
        self.accuracy = MatchAccuracy()
        self.past = AnswerHistory(past)
        self._corpus = corpus or SuffixAutomaton()
        self._texts: dict[int, _SequenceText] = {}
        # The known texts that all sequences share and that are not empty, by origin.
        self._shared: list[tuple[int, SuffixAutomaton]] = []

    def start_sequence(self, context: Context) -> None:
        self._texts[context.sequence] = _SequenceText(context, context.foreseeable)

    def accept_verdict(self, verdict: Verdict) -> None:
        """Nothing: the context holds the new tokens, and the next round reads them."""

    def end_sequence(self, sequence: int) -> None:
        context = self._texts.pop(sequence).context
        if not context.salted:
            self.past.add(context.tokens[context.prompt_len :])

    def propose(self, requests: Sequence[ProposalRequest], children: int) -> list[Proposal | None]:
        left = CHUNK
        shared = self.past.newer, self.past.older, self._corpus
        self._shared = [each for each in enumerate(shared, NEW) if each[1].length]
        found: list[Proposal | None] = []
        for request in requests:
            text = self._texts[request.context.sequence]
            left -= self._catch_up(text, left)
            complete = text.num_read == len(request.context.tokens)
            found.append(self._proposal(text, request, children) if complete else None)
        self.past.read(left // PAST_SHARE)
        return found

    # --- reading ------------------------------------------------------------------------------

    def _known(self, text: _SequenceText) -> tuple[SuffixAutomaton, ...]:
        return text.own, self.past.newer, self.past.older, self._corpus

    def _catch_up(self, text: _SequenceText, limit: int) -> int:
        """Read up to `limit` new tokens, and learn from those of the answer; returns how many."""
        tokens = text.context.tokens
        stop = min(text.num_read + limit, len(tokens))
        count = stop - text.num_read
        known = self._known(text)
        if count or text.past_length != self.past.length:
            text.past_length = self.past.length
            text.stated.clear()
        if text.num_rotations != self.past.num_rotations:
            text.num_rotations = self.past.num_rotations
            last = tokens[max(text.num_read - REMATCH_TOKENS, 0) : text.num_read]
            text.matches = (text.own.longest_suffix, *(each.match(last) for each in known[NEW:]))
            text.draft_matches.clear()
        for position in range(text.num_read, stop):
            token = tokens[position]
            if position >= text.context.prompt_len:
                self._learn(known, text.matches, token)
            text.own.extend((token,))
            text.matches = self._with_shared(text.own.longest_suffix, text.matches, token)
        text.num_read = stop
        return count

    def _learn(self, known: Sequence[SuffixAutomaton], matches: Matches, token: int) -> None:
        """Observe which of the suffixes that were consulted for `token` it had followed."""
        num_distinct = 0
        for length, origin, state in self._suffixes(known, matches):
            counts = known[origin].follow_counts(state)
            if counts.distinct <= num_distinct:  # nothing else than after longer suffixes
                continue
            num_distinct = counts.distinct
            hit = known[origin].has_followed(state, token)
            self.accuracy.observe(MatchAccuracy.kind(origin, length, counts), hit=hit)
            if hit:
                return

    # --- what may follow a match --------------------------------------------------------------

    def _suffixes(
        self, known: Sequence[SuffixAutomaton], matches: Matches
    ) -> list[tuple[int, int, int]]:
        """Length, origin and state of the suffixes to consult after a match, the longest first."""
        if not self._shared:
            own = known[OWN].suffixes(matches[OWN], MAX_SUFFIXES)
            return [(length, OWN, state) for state, length in own]
        found = [
            (length, origin, state)
            for origin, match in enumerate(matches)
            if match[1]
            for state, length in known[origin].suffixes(match, MAX_SUFFIXES)
        ]
        if len(found) > MAX_SUFFIXES:
            found.sort(key=lambda suffix: (-suffix[0], suffix[1]))
        return found[:MAX_SUFFIXES]

    def _next_tokens(
        self, text: _SequenceText, matches: Matches, position: int, children: int
    ) -> TokenProbabilities:
        """The `children` most probable tokens at `position`, after a match, the likeliest first."""
        key = matches, children
        found = text.stated.get(key)
        if found is None:
            found = text.stated[key] = self._followers(text, matches, children)
        if text.foresee:
            from pipespec.sampling.shared_noise import reweight  # imports torch

            return reweight(found, position, text.context.sampling.seed)[:children]
        return found[:children]

    def _followers(
        self, text: _SequenceText, matches: Matches, children: int
    ) -> TokenProbabilities:
        """At least `children` tokens that may follow a match, if there are so many, the likeliest
        first.

        The tokens that followed the longest suffix share its accuracy in proportion to how often
        each did; the rest of the probability is left to shorter suffixes.
        """
        known = self._known(text)
        stated: dict[int, float] = {}
        left = 1.0
        num_distinct = num_consulted = 0
        for length, origin, state in self._suffixes(known, matches):
            total, distinct, fresh = counts = known[origin].follow_counts(state)
            if distinct <= num_distinct:
                continue
            num_distinct = distinct
            if stated:
                total -= sum([count for token, count in fresh if token in stated])
                fresh = [each for each in fresh if each[0] not in stated]
                if not fresh:
                    continue
            num_consulted += 1
            share = left * self.accuracy.probability(MatchAccuracy.kind(origin, length, counts))
            left -= share
            share /= total
            for token, count in fresh[:children]:
                stated[token] = share * count
            if len(stated) >= children or left < MIN_REST:
                break
        found = list(stated.items())
        if num_consulted > 1:
            found.sort(key=probability_of, reverse=True)
        return found

    # --- matches of nodes ---------------------------------------------------------------------

    def _node_matches(self, text: _SequenceText, tree: Tree, nodes: np.ndarray) -> list[Matches]:
        """The matches of the texts that end with these nodes."""
        ids, parents, tokens = tree.id.tolist(), tree.parent.tolist(), tree.token.tolist()
        held = text.draft_matches
        found: list[Matches] = []
        for node in nodes.tolist():
            path, above = [], node
            while above != ROOT and (above == node or ids[above] not in held):
                path.append(above)
                above = parents[above]
            matches = text.matches if above == ROOT else held[ids[above]]
            for below in reversed(path):
                matches = held[ids[below]] = self._advance(text, matches, tokens[below])
            found.append(matches)
        return found

    def _advance(self, text: _SequenceText, matches: Matches, token: int) -> Matches:
        return self._with_shared(text.own.advance(matches[OWN], token), matches, token)

    def _with_shared(self, own: Match, matches: Matches, token: int) -> Matches:
        """A match in the sequence's own text, and those in all others after one more token."""
        if not self._shared:
            return own, NO_MATCH, NO_MATCH, NO_MATCH
        found = [own, NO_MATCH, NO_MATCH, NO_MATCH]
        for origin, each in self._shared:
            found[origin] = each.advance(matches[origin], token)
        return tuple(found)

    def _proposal(self, text: _SequenceText, request: ProposalRequest, children: int) -> Proposal:
        tree, nodes = request.tree, request.nodes
        drop_pruned(text.draft_matches, tree.id)
        matches = self._node_matches(text, tree, nodes)
        rows = [
            self._next_tokens(text, match, position, children)
            for match, position in zip(matches, (tree.position[nodes] + 1).tolist(), strict=True)
        ]
        found = Proposal.from_lists(nodes, rows)
        if not request.max_path_tokens:
            return found
        return replace(found, paths=self._paths(text, request, rows, matches, children))

    def _paths(
        self,
        text: _SequenceText,
        request: ProposalRequest,
        rows: Sequence[TokenProbabilities],
        matches: Sequence[Matches],
        children: int,
    ) -> DraftPaths:
        width = max(map(len, rows), default=0)
        reached = np.exp(request.tree.cum[request.nodes]).tolist()  # probability of each node
        positions = (request.tree.position[request.nodes] + 1).tolist()
        # To extend: negated probability, index as `DraftPaths.parents` counts, matches before the
        # last token, that token, and the position after it.
        heap = []
        for i, (row, probability) in enumerate(zip(rows, reached, strict=True)):
            if probability <= MIN_PROBABILITY:
                continue
            for j, (token, share) in enumerate(row):
                if probability * share <= MIN_PROBABILITY:
                    break
                heap.append(
                    (-probability * share, i * width + j, matches[i], token, positions[i] + 1)
                )
        heapq.heapify(heap)
        above: list[int] = []
        tokens: list[int] = []
        stated: list[float] = []
        most = min(request.max_path_tokens, MAX_PATH_TOKENS)
        while heap and len(above) < most:
            negated, parent, before, token, position = heapq.heappop(heap)
            here = self._advance(text, before, token)
            for below, share in self._next_tokens(text, here, position, children):
                if -negated * share < MIN_PROBABILITY or len(above) >= most:
                    break
                index = len(rows) * width + len(above)
                heapq.heappush(heap, (negated * share, index, here, below, position + 1))
                above.append(parent)
                tokens.append(below)
                stated.append(share)
        return DraftPaths(np.array(above, np.int64), np.array(tokens, np.int64), np.log(stated))
