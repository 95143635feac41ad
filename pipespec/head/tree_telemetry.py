"""Snapshots of the head's steps for clients that watch: rows by kind, and the trees of requests.

A step is one entry with opaque fields: "step", and one field for each watched request, named by its
id. Numbers are little-endian and of four bytes, but for those of the step. Pure.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # unpacking needs no scheduler
    from pipespec.head.scheduler_types import Totals
    from pipespec.head.sequence import Sequence
    from pipespec.head.tree import Tree

STEP = "step"
# Nodes of a tree, and trees of a step, that an entry holds at most.
MAX_NODES = 128
MAX_TREES = 4
_STEP = struct.Struct("<4q")
_HEADER = 4


@dataclass(frozen=True, slots=True)
class StepSnapshot:
    """The rows of a step: decided tokens that no draft token matched, draft tokens, prompts."""

    step: int
    decided: int
    draft: int
    prompt: int

    def pack(self) -> bytes:
        return _STEP.pack(self.step, self.decided, self.draft, self.prompt)

    @classmethod
    def unpack(cls, payload: bytes) -> StepSnapshot:
        """The inverse of `pack`."""
        return cls(*_STEP.unpack(payload))


@dataclass(frozen=True, slots=True, eq=False)
class TreeSnapshot:
    """The most important nodes of a request's tree after a step has sent its batch.

    Attributes:
        length: of the sequence, prompt included; its last token is the root.
        size: nodes of the whole tree, the root included.
        accepted: the tokens that were accepted since the last snapshot.
        id, parent, token: int32 `[nodes]`, in breadth-first order; `parent` is an index here, the
            root's its own.
        fed: int32 `[nodes]`, 1: the node has entered the pipeline. But for the root, it is in
            flight then.
        logp: float32 `[nodes]`, log-probability given the parent, by the proposer.
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
    def unpack(cls, payload: bytes) -> TreeSnapshot:
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
    def of(cls, tree: Tree, length: int, accepted: tuple[int, ...]) -> TreeSnapshot:
        """Up to MAX_NODES of a tree: fed nodes first, then the most probable ones; with every node
        its ancestors."""
        fed = tree.most_probable(tree.fed.nonzero()[0], MAX_NODES)
        kept = np.zeros(len(tree), bool)
        kept[fed] = kept[0] = True
        if (room := MAX_NODES - int(np.count_nonzero(kept))) > 0:
            kept[tree.most_probable(np.flatnonzero(~kept), room)] = True
        nodes = kept.nonzero()[0]
        place = np.cumsum(kept) - 1
        return cls(
            *(length, len(tree), accepted),
            *(tree.id[nodes], place[tree.parent[nodes]], tree.token[nodes]),
            *(tree.fed[nodes], tree.logp[nodes]),
        )


class TreeTelemetry:
    """Makes the snapshots of steps while a client watches."""

    def __init__(self) -> None:
        self._lengths: dict[int, int] | None = None  # of watched requests at their last snapshot
        self._rows = (0, 0, 0)

    @property
    def enabled(self) -> bool:
        """Whether a client watches."""
        return self._lengths is not None

    def update_watchers(self, watched: Iterable[int] | None, totals: Totals) -> None:
        """Set which requests are watched from now on; None: no client watches."""
        if watched is None:
            self._lengths = None
            return
        if self._lengths is None:
            self._rows = _rows(totals)
        known = self._lengths or {}
        chosen = sorted(watched)[:MAX_TREES]
        self._lengths = {request: known.get(request, 0) for request in chosen}

    def snapshot(
        self, step: int, totals: Totals, sequences: Mapping[int, Sequence]
    ) -> dict[str, bytes]:
        """The entry of a step: its rows, and the watched trees."""
        assert self._lengths is not None
        before, self._rows = self._rows, _rows(totals)
        decided, draft, prompt = (now - then for now, then in zip(self._rows, before, strict=True))
        entry = {STEP: StepSnapshot(step, decided, draft, prompt).pack()}
        for sequence in sequences.values() if self._lengths else ():
            request = sequence.request.id
            if (known := self._lengths.get(request)) is not None:
                tokens = sequence.context.tokens
                accepted = tuple(tokens[known:]) if known else ()
                self._lengths[request] = len(tokens)
                entry[str(request)] = TreeSnapshot.of(sequence.tree, len(tokens), accepted).pack()
        return entry


def _rows(totals: Totals) -> tuple[int, int, int]:
    return int(totals.fed[0]), int(totals.fed[1:].sum()), totals.prompt_rows
