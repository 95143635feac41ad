"""What a grammar says of a tree of guesses: which can come true, and which must.

The last stage holds the text to its grammar; this only spares the stages rows that it would refuse,
and makes guesses of what nobody needs to be asked about: where a grammar allows one token alone,
that token follows for certain.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from pipespec.head.source.protocol import Candidates
from pipespec.head.tree import Tree
from pipespec.sampling.grammar import WORD, GrammarFailed, Matcher, as_bools, only


class Guide:
    """Where the decided text of one sequence stands in its grammar, and its guesses below.

    The matcher goes down to a node and back. If it fails there is nothing to say any more: guesses
    are then what the source proposes.
    """

    def __init__(self, matcher: Matcher, eos: Collection[int], answer: Sequence[int] = ()):
        """`eos` end the text; `answer` is what was decided of it before."""
        self._matcher: Matcher | None = matcher
        self._eos = eos
        self._path: list[int] = []  # tokens from the root down to where the matcher stands
        matcher.consume(answer)

    def accept(self, token: int) -> None:
        """The text goes on with a token, which is the root now."""
        if self._go(()) and token not in self._eos:
            assert self._matcher is not None
            self._matcher.consume([token])

    def allowed(self, tree: Tree, nodes: np.ndarray) -> np.ndarray | None:
        """Which tokens may follow each node: bits as of a matcher, int32 `[nodes, words]`; None:
        it cannot be said."""
        found = [self._after(_text(tree, node)) for node in nodes.tolist()]
        told = [bits for bits in found if bits is not None]
        return np.stack(told) if told and len(told) == len(found) else None

    def extend(self, tree: Tree, nodes: np.ndarray, end: int) -> np.ndarray:
        """Hang below each of the nodes all that must follow it, at positions below `end`.

        Returns the nodes after which something else than the end of the text may follow: those
        where a choice begins.
        """
        ends = []
        for node in tree.id[nodes].tolist():
            at = tree.index(node)
            forced, goes_on = self._forced(_text(tree, at), end - 1 - int(tree.position[at]))
            last = tree.hang(at, forced) if forced else node
            if goes_on:
                ends.append(last)
            else:
                tree.leave(last)
        return np.flatnonzero(np.isin(tree.id, ends))

    def _forced(self, text: list[int], room: int) -> tuple[list[int], bool]:
        """What must follow a text of guesses, `room` tokens at most, and whether it goes on then:
        it may have to end, or not be able to come true."""
        forced: list[int] = []
        while (bits := self._after([*text, *forced])) is not None:
            token = only(bits)
            if token in self._eos or not bits.any():
                return forced, False
            if token is None or len(forced) >= room:
                break
            forced.append(token)
        return forced, True

    def _after(self, text: Sequence[int]) -> np.ndarray | None:
        """What may follow a text of guesses: nothing, if it cannot come true; None: it cannot be
        said."""
        there = self._go(text)
        if self._matcher is None:
            return None
        try:
            bits = self._matcher.allowed()
        except GrammarFailed:
            self._matcher = None
            return None
        return bits if there else np.zeros_like(bits)

    def _go(self, text: Sequence[int]) -> bool:
        """Let the matcher stand after a text of guesses; False: the grammar does not allow it."""
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


def held_to(found: Candidates, nodes: np.ndarray, allowed: np.ndarray) -> Candidates:
    """The candidates that may come true; where one token alone may follow, it is certain.

    `allowed` are bits of what may follow each of `nodes`, int32 `[nodes, words]`.
    """
    row_of = {node: i for i, node in enumerate(nodes.tolist())}
    bits = allowed[[row_of[node] for node in found.parents.tolist()]]
    known = bits.shape[1] * WORD
    tokens, logps = found.tokens, found.logps
    if not tokens.shape[1]:
        tokens, logps = np.full((len(bits), 1), -1), np.full((len(bits), 1), -np.inf)
    may = np.take_along_axis(as_bools(bits, known), tokens.clip(0, known - 1), axis=1)
    tokens, logps = tokens.copy(), np.where(may & (tokens < known), logps, -np.inf)
    for row, mine in enumerate(bits):
        if (token := only(mine)) is not None:
            tokens[row], logps[row] = -1, -np.inf
            tokens[row, 0], logps[row, 0] = token, 0.0
    return Candidates(found.parents, tokens, logps)


def _text(tree: Tree, node: int) -> list[int]:
    """What a node says and the nodes above it, below the root."""
    text: list[int] = tree.token[tree.path(node)[1:]].tolist()
    return text
