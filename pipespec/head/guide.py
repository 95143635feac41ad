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
from pipespec.sampling.grammar import GrammarFailed, Matcher, has, only


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
        return _stacked([self._after(_text(tree, node)) for node in nodes.tolist()])

    def extend(
        self, tree: Tree, nodes: np.ndarray, end: int
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Hang below each of the nodes all that must follow it, at positions below `end`.

        Returns the nodes after which something else than the end of the text may follow, those
        where a choice begins, and what may follow them, as `allowed` does.
        """
        ends: dict[int, np.ndarray | None] = {}  # by node id
        for node in tree.id[nodes].tolist():
            at = tree.index(node)
            forced, bits = self._forced(_text(tree, at), end - 1 - int(tree.position[at]))
            last = tree.hang(at, forced) if forced else node
            if bits is None or self._goes_on(bits):
                ends[last] = bits
            else:
                tree.leave(last)
        found = np.flatnonzero(np.isin(tree.id, [*ends]))
        return found, _stacked([ends[node] for node in tree.id[found].tolist()])

    def _forced(self, text: list[int], room: int) -> tuple[list[int], np.ndarray | None]:
        """What must follow a text of guesses, `room` tokens at most, and what may follow then."""
        forced: list[int] = []
        while True:
            bits = self._after([*text, *forced])
            token = None if bits is None else only(bits)
            if token is None or token in self._eos or len(forced) >= room:
                return forced, bits
            forced.append(token)

    def _goes_on(self, bits: np.ndarray) -> bool:
        """Whether something else than the end may follow."""
        return bool(bits.any()) and only(bits) not in self._eos

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


def _stacked(found: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """What may follow some nodes, `[nodes, words]`; None: of one it cannot be said."""
    told = [bits for bits in found if bits is not None]
    return np.stack(told) if told and len(told) == len(found) else None


def held_to(found: Candidates, nodes: np.ndarray, allowed: np.ndarray) -> Candidates:
    """The candidates that may come true; where one token alone may follow, it is certain.

    `allowed` are bits of what may follow each of `nodes`, int32 `[nodes, words]`.
    """
    row_of = {node: i for i, node in enumerate(nodes.tolist())}
    bits = allowed[[row_of[node] for node in found.parents.tolist()]]
    tokens, logps = found.tokens, found.logps
    if not tokens.shape[1]:
        tokens, logps = np.full((len(bits), 1), -1), np.full((len(bits), 1), -np.inf)
    tokens, logps = tokens.copy(), np.where(has(bits, tokens), logps, -np.inf)
    for row, mine in enumerate(bits):
        if (token := only(mine)) is not None:
            tokens[row], logps[row] = -1, -np.inf
            tokens[row, 0], logps[row, 0] = token, 0.0
    return Candidates(found.parents, tokens, logps)


def _text(tree: Tree, node: int) -> list[int]:
    """What a node says and the nodes above it, below the root."""
    text: list[int] = tree.token[tree.path(node)[1:]].tolist()
    return text
