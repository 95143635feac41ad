"""Token sources: who proposes the children of a tree node.

Context and tree in, candidate children with log-probabilities out. A source never sees the
pipeline and decides nothing: a bad guess costs speed alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from pipespec.core import (
    DECIDED,
    KIND,
    LAST_DECIDED,
    NO_NODE,
    NOBODY,
    NODE,
    NUM_COLUMNS,
    PARENT,
    POSITION,
    SEQUENCE,
    TOKEN,
    Sampling,
    Verdict,
)
from pipespec.head.paths import Paths
from pipespec.head.tree import Tree


@dataclass(slots=True)
class Context:
    """The decided text of one sequence: token and node id of each position, root included.

    Its first `prompt` tokens are the prompt; what else was known when it began is answer.
    `sampling` is how its tokens are decided, noise included: a source may know what it proposes
    for, though it decides nothing. Its first `shared` tokens are those of `parent`, another
    sequence, which may have ended: who has computed them need not do so again.
    """

    sequence: int
    tokens: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    sampling: Sampling = field(default_factory=Sampling)
    prompt: int = 0
    parent: int = NOBODY
    shared: int = 0

    @property
    def drawn(self) -> bool:
        """Whether tokens are drawn with a noise that a source can know."""
        return self.sampling.temperature > 0 and not self.sampling.lossy

    def rows(self, start: int, stop: int | None = None) -> np.ndarray:
        """Positions `[start, stop)` as decided rows of a batch, `[k, 6]`."""
        stop = len(self.tokens) if stop is None else stop
        positions = np.arange(start, stop)
        before = self.nodes[start - 1 : start] or [NO_NODE]
        rows = np.zeros((len(positions), NUM_COLUMNS), np.int64)
        rows[:, SEQUENCE] = self.sequence
        rows[:, NODE] = self.nodes[start:stop]
        rows[:, PARENT] = (before + self.nodes[start:stop])[: stop - start]
        rows[:, TOKEN] = self.tokens[start:stop]
        rows[:, POSITION] = positions
        rows[:, KIND] = np.where(positions == len(self.tokens) - 1, LAST_DECIDED, DECIDED)
        return rows


@dataclass(frozen=True, slots=True)
class Candidates:
    """Children for the nodes `parents` `[k]`: `tokens` and `logps`, both `[k, children]`.

    The tokens of a row differ. Where a row has fewer candidates than others, the rest of it
    has log-probability -inf. `paths` are guesses further below, if the source has some and was
    asked for any (`Asked.deeper`); they are expanded later like any other node.
    """

    parents: np.ndarray
    tokens: np.ndarray
    logps: np.ndarray
    paths: Paths | None = None

    @classmethod
    def of(cls, parents: np.ndarray, rows: Sequence[Sequence[tuple[int, float]]]) -> Candidates:
        """From one list of (token, probability) per parent, of any lengths."""
        lengths = list(map(len, rows))
        shape = len(rows), max(lengths, default=0)
        there = np.arange(shape[1]) < np.array(lengths, np.int64)[:, None]
        tokens, logps = np.full(shape, -1), np.full(shape, -np.inf)
        tokens[there] = [token for row in rows for token, _ in row]
        with np.errstate(divide="ignore"):
            logps[there] = np.log([probability for row in rows for _, probability in row])
        return cls(parents, tokens, logps)


@dataclass(frozen=True, slots=True)
class Asked:
    """What one sequence asks of a draft round: children for `nodes`, indices into its tree.

    `allowed` says which tokens may follow each of them, as bits (`pipespec.sampling.grammar`),
    int32 `[nodes, words]`; None: any. `deeper` is how many guesses below its children are welcome
    (`Candidates.paths`).
    """

    context: Context
    tree: Tree
    nodes: np.ndarray
    allowed: np.ndarray | None = None
    deeper: int = 0

    def select(self, chosen: np.ndarray) -> Asked:
        """The same for the nodes with `chosen`, bool `[nodes]`."""
        if chosen.all():
            return self
        allowed = None if self.allowed is None else self.allowed[chosen]
        return replace(self, nodes=self.nodes[chosen], allowed=allowed)


# From text to token ids of the target.
Encode = Callable[[str], Sequence[int]]


def forget(by_node: dict[int, Any], alive: np.ndarray) -> None:
    """Drop what is held for nodes whose ids are not among `alive`, once that is the most."""
    if len(by_node) > 2 * len(alive):
        kept = set(alive.tolist())
        for node in [node for node in by_node if node not in kept]:
            del by_node[node]


class TokenSource(Protocol):
    def begin(self, context: Context) -> None:
        """A sequence starts; `context` is what is known of it, and grows as tokens are decided."""
        ...

    def expand(self, asked: Sequence[Asked], children: int) -> list[Candidates | None]:
        """Propose at most `children` children for each node that the sequences ask for.

        One answer for each of `asked`. None: not ready yet (still reading its prompt); ask again.
        """
        ...

    def accept(self, verdict: Verdict) -> None:
        """The target decided these tokens; those that count are in the context already."""
        ...

    def end(self, sequence: int) -> None:
        """The sequence is over."""
        ...


class SourceSpec(Protocol):
    """What `conf/source/*.yaml` names: a frozen dataclass of settings.

    `rounds`: draft rounds per pipeline step at most, or "auto" (see `pipespec.head.feed.rounds`).
    `needs_draft`: rank 0 loads the draft model. `synthetic`: the guesses are made from the
    answer, so results are labelled. `foresight`: guesses of what will be drawn are ranked with
    the target's own noise (docs/sampling.md).
    """

    @property
    def rounds(self) -> int | str: ...
    @property
    def needs_draft(self) -> bool: ...
    @property
    def synthetic(self) -> bool: ...
    @property
    def foresight(self) -> bool: ...

    def make(self, draft: TokenSource | None, vocabulary: int, encode: Encode) -> TokenSource:
        """The running source.

        Args:
            draft: the draft model as a source, given exactly if `needs_draft`.
            vocabulary: how many token ids the target knows.
            encode: makes tokens of the text of files.
        """
        ...


@runtime_checkable
class Cascading(Protocol):
    """What a SourceSpec says further, if a mid-size model scores the tree beside the head
    (`pipespec.head.source.cascade`).

    `mid_rows`: nodes that one pass of it scores; 0: it is not used. `needs_mid`: rank 0 loads
    `model.mid`.
    """

    @property
    def mid_rows(self) -> int: ...
    @property
    def needs_mid(self) -> bool: ...

    def make_mid(self, mid: TokenSource | None, vocabulary: int) -> TokenSource:
        """The mid-size model, which a thread asks; `mid` is the real one, given exactly if
        `needs_mid`."""
        ...
