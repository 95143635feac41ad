"""Structured output at the head: which draft tokens a grammar allows, and which it determines.

The last stage applies the grammar to the text. Here the head saves the stages rows that the last
one would refuse, and adds tokens without asking the proposer: where a grammar allows a single
token, that token follows for certain.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from pipespec.head.proposer import Proposal
from pipespec.head.tree import Tree
from pipespec.sampling.grammar import GrammarFailed, Matcher, allows, only_token
from pipespec.system.fair_thread import FairThread

# Tokens that must follow one another and are added at once.
MOST_FORCED = 32


@dataclass(frozen=True, slots=True, eq=False)
class LookAhead:
    """What a grammar determines below the node with the id `node`: the `tokens` that must follow
    it, and the `bits` of what may follow these (None: anything); `ends`: nothing but the end."""

    node: int
    tokens: list[int]
    bits: np.ndarray | None
    ends: bool


def add_ahead(tree: Tree, found: Sequence[LookAhead]) -> tuple[np.ndarray, np.ndarray | None]:
    """Add the tokens that must follow some nodes to the tree.

    Returns the last nodes of these paths unless only the end of the text may follow them, and
    what may follow, as `GrammarGuide.allowed` does.
    """
    ends: dict[int, np.ndarray | None] = {}  # by node id
    for each in found:
        last = each.node
        if each.tokens:
            last = tree.append_path(tree.index(each.node), each.tokens)
        if each.ends:
            tree.mark_terminal(last)
        else:
            ends[last] = each.bits
    nodes = np.flatnonzero(np.isin(tree.id, [*ends]))
    return nodes, _stack([ends[node] for node in tree.id[nodes].tolist()])


class GrammarGuide:
    """Applies the grammar of one sequence to its tree of draft tokens.

    The matcher moves from the root to a node and back, in the thread of `masks`; what is found too
    late for one draft round serves a later one. After it has failed, any token is allowed.
    """

    def __init__(
        self,
        matcher: Matcher,
        eos: Collection[int],
        answer: Sequence[int] = (),
        masks: FairThread | None = None,
        grammar: str = "",
    ):
        """`eos` are the tokens that end the text; `answer` holds the tokens decided so far."""
        self._matcher: Matcher | None = matcher
        self._eos = eos
        self._path: list[int] = []  # tokens from the root to the state of the matcher
        self._masks, self._grammar = masks or FairThread(), grammar
        self._asked: Future[list[LookAhead]] | None = None
        self._found: dict[int, LookAhead] = {}  # by the ids of the nodes that were asked for last
        self._masks.submit(grammar, lambda: matcher.consume(answer))

    def accept(self, token: int) -> None:
        """Move on to a decided token, which is the root now."""
        self._masks.submit(self._grammar, lambda: self._accept(token))

    def _accept(self, token: int) -> None:
        if self._move_to(()) and token not in self._eos:
            assert self._matcher is not None
            self._matcher.consume([token])

    def allowed(self, tree: Tree, nodes: np.ndarray) -> np.ndarray | None:
        """The tokens that may follow each node, as bits (`Matcher`), int32 `[nodes, words]`; None:
        any, or one of them is not known in time."""
        found = self.look_ahead(tree, nodes, 0)
        return _stack([each.bits for each in found]) if len(found) == len(nodes) else None

    def look_ahead(self, tree: Tree, nodes: np.ndarray, end: int) -> tuple[LookAhead, ...]:
        """What must follow each of the nodes, at positions below `end`, as far as it is known in
        time."""
        ids, wanted = tree.id[nodes].tolist(), []
        self._found = {node: self._found[node] for node in ids if node in self._found}
        self._take(ids)
        for node, at in zip(ids, nodes.tolist(), strict=True):
            if node not in self._found:
                wanted.append((node, _text(tree, at), end - 1 - int(tree.position[at])))
        if wanted and self._asked is None:
            self._asked = self._masks.submit(self._grammar, lambda: [*map(self._ahead_of, wanted)])
            self._take(ids)
        return tuple(self._found[node] for node in ids if node in self._found)

    def _take(self, ids: Collection[int]) -> None:
        """Take what was found about nodes, if that is there in time."""
        if self._asked is not None and self._masks.wait_for(self._asked):
            self._found |= {each.node: each for each in self._asked.result() if each.node in ids}
            self._asked = None

    def _ahead_of(self, wanted: tuple[int, list[int], int]) -> LookAhead:
        node, text, room = wanted
        forced, bits = self._forced(text, min(room, MOST_FORCED))
        ends = bits is not None and (not bits.any() or only_token(bits) in self._eos)
        return LookAhead(node, forced, bits, ends)

    def _forced(self, text: list[int], room: int) -> tuple[list[int], np.ndarray | None]:
        """The tokens that must follow a text, `room` at most, and what may follow then."""
        forced: list[int] = []
        while True:
            bits = self._allowed_after([*text, *forced])
            token = None if bits is None else only_token(bits)
            if token is None or token in self._eos or len(forced) >= room:
                return forced, bits
            forced.append(token)

    def _allowed_after(self, text: Sequence[int]) -> np.ndarray | None:
        """The tokens that may follow a text: none if the grammar does not allow it; None: any, as
        the matcher has failed."""
        there = self._move_to(text)
        if self._matcher is None:
            return None
        try:
            bits = self._matcher.allowed()
        except GrammarFailed:
            self._matcher = None
            return None
        return bits if there else np.zeros_like(bits)

    def _move_to(self, text: Sequence[int]) -> bool:
        """Move the matcher to the end of a text; False: the grammar does not allow it."""
        if self._matcher is None:
            return False
        common = 0
        for mine, other in zip(self._path, text, strict=False):
            if mine != other:
                break
            common += 1
        self._matcher.rollback(len(self._path) - common)
        wanted = [*text[common:]]
        taken = self._matcher.consume(wanted) if wanted else 0
        self._path = [*text[: common + taken]]
        return taken == len(wanted)


def _stack(found: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """What may follow some nodes, `[nodes, words]`; None: anything may follow one of them."""
    known = [bits for bits in found if bits is not None]
    return np.stack(known) if known and len(known) == len(found) else None


def masked_proposal(found: Proposal, nodes: np.ndarray, allowed: np.ndarray) -> Proposal:
    """The candidates that the grammar allows; a token that it determines is certain.

    `allowed` are bits of what may follow each of `nodes`, int32 `[nodes, words]`.
    """
    row_of = {node: i for i, node in enumerate(nodes.tolist())}
    bits = allowed[[row_of[node] for node in found.parents.tolist()]]
    tokens, logps = found.tokens, found.logps
    if not tokens.shape[1]:
        tokens, logps = np.full((len(bits), 1), -1), np.full((len(bits), 1), -np.inf)
    tokens, logps = tokens.copy(), np.where(allows(bits, tokens), logps, -np.inf)
    for row, mine in enumerate(bits):
        if (token := only_token(mine)) is not None:
            tokens[row], logps[row] = -1, -np.inf
            tokens[row, 0], logps[row, 0] = token, 0.0
    return Proposal(found.parents, tokens, logps)


def _text(tree: Tree, node: int) -> list[int]:
    text: list[int] = tree.token[tree.path(node)[1:]].tolist()
    return text
