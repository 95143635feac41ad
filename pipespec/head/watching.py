"""What the head shows of its steps to whoever watches: rows by kind, and the trees of requests.

A step is shown as one entry with opaque fields: "step", and for each request that is watched its
number. Numbers are little-endian and of four bytes, but for those of the step. Pure.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # who unpacks needs no scheduler
    from pipespec.head.sequence import Sequence
    from pipespec.head.tree import Tree
    from pipespec.head.work import Totals

STEP = "step"
# Nodes of a tree that are shown, and trees of a step.
MOST_NODES = 128
MOST_TREES = 4
_STEP = struct.Struct("<4q")
_HEADER = 4


@dataclass(frozen=True, slots=True)
class ShownStep:
    """What a step fed, in rows: decided tokens that nobody had guessed, guesses, and prompts."""

    step: int
    decided: int
    guess: int
    prompt: int

    def pack(self) -> bytes:
        return _STEP.pack(self.step, self.decided, self.guess, self.prompt)

    @classmethod
    def unpack(cls, payload: bytes) -> ShownStep:
        """The inverse of `pack`."""
        return cls(*_STEP.unpack(payload))


@dataclass(frozen=True, slots=True, eq=False)
class ShownTree:
    """The tree of a request once a step has fed its batch, its most important nodes.

    Attributes:
        length: of the sequence, prompt included; its last token is the root.
        size: nodes of the whole tree, the root included.
        accepted: the tokens that have joined the sequence since the tree was shown before.
        id, parent, token: int32 `[nodes]`, in breadth-first order; `parent` is an index here, the
            root's its own.
        fed: int32 `[nodes]`, 1: the node has entered the pipeline. But for the root, it is in
            flight then.
        logp: float32 `[nodes]`, log-probability given the parent, as the source stated it.
    """

    length: int
    size: int
    accepted: tuple[int, ...]
    id: np.ndarray
    parent: np.ndarray
    token: np.ndarray
    fed: np.ndarray
    logp: np.ndarray

    def pack(self) -> bytes:
        """Lengths, then the accepted tokens, then the columns one after the other."""
        header = (self.length, self.size, len(self.accepted), len(self.id))
        columns = (self.id, self.parent, self.token, self.fed)
        numbers = np.concatenate((header, self.accepted, *columns)).astype("<i4")
        return numbers.tobytes() + self.logp.astype("<f4").tobytes()

    @classmethod
    def unpack(cls, payload: bytes) -> ShownTree:
        """The inverse of `pack`."""
        numbers = np.frombuffer(payload, "<i4")
        length, size, accepted, nodes = numbers[:_HEADER].tolist()
        tokens, columns = np.split(numbers[_HEADER:], [accepted])
        found = columns.reshape(5, nodes)
        node, parent, token, fed, logp = found
        return cls(
            *(length, size, tuple(tokens.tolist())),
            *(node, parent, token, fed, logp.view("<f4")),
        )

    @classmethod
    def of(cls, tree: Tree, length: int, accepted: tuple[int, ...]) -> ShownTree:
        """Up to MOST_NODES of a tree: what was fed first, then the most probable; with every node
        its ancestors."""
        fed = tree.best(tree.fed.nonzero()[0], MOST_NODES)
        kept = np.zeros(len(tree), bool)
        kept[fed] = kept[0] = True
        if (room := MOST_NODES - int(np.count_nonzero(kept))) > 0:
            kept[tree.best(np.flatnonzero(~kept), room)] = True
        nodes = kept.nonzero()[0]
        place = np.cumsum(kept) - 1
        return cls(
            *(length, len(tree), accepted),
            *(tree.id[nodes], place[tree.parent[nodes]], tree.token[nodes]),
            *(tree.fed[nodes], tree.logp[nodes]),
        )


class Watching:
    """What is shown of the steps, while anybody watches."""

    def __init__(self) -> None:
        self._lengths: dict[int, int] | None = None  # of what is watched, as shown last; by request
        self._rows = (0, 0, 0)

    @property
    def on(self) -> bool:
        """Whether anybody watches."""
        return self._lengths is not None

    def look(self, watched: Iterable[int] | None, totals: Totals) -> None:
        """Which requests are watched from now on; None: nobody watches anything."""
        if watched is None:
            self._lengths = None
            return
        if self._lengths is None:
            self._rows = _rows(totals)
        known = self._lengths or {}
        chosen = sorted(watched)[:MOST_TREES]
        self._lengths = {request: known.get(request, 0) for request in chosen}

    def shown(
        self, step: int, totals: Totals, sequences: Mapping[int, Sequence]
    ) -> dict[str, bytes]:
        """The entry of a step: what it fed, and the trees that are watched."""
        assert self._lengths is not None
        before, self._rows = self._rows, _rows(totals)
        decided, guess, prompt = (now - then for now, then in zip(self._rows, before, strict=True))
        entry = {STEP: ShownStep(step, decided, guess, prompt).pack()}
        for sequence in sequences.values() if self._lengths else ():
            request = sequence.request.id
            if (known := self._lengths.get(request)) is not None:
                tokens = sequence.context.tokens
                accepted = tuple(tokens[known:]) if known else ()
                self._lengths[request] = len(tokens)
                entry[str(request)] = ShownTree.of(sequence.tree, len(tokens), accepted).pack()
        return entry


def _rows(totals: Totals) -> tuple[int, int, int]:
    return int(totals.fed[0]), int(totals.fed[1:].sum()), totals.prompt_rows
