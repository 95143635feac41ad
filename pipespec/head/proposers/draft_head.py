"""A draft head as a proposer (EAGLE-3, MTP): one layer that reads, with each token, what is known
of the position before it. Of decided text that are hidden states of the target (its *features*);
below it in the tree, the head's own states."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from pipespec.core import (
    DRAFT,
    KIND,
    NODE,
    NUM_COLUMNS,
    PARENT,
    POSITION,
    SEQUENCE,
    TOKEN,
    Batch,
    Verdict,
)
from pipespec.head.proposer import Context, Proposal, ProposalRequest
from pipespec.head.proposers.draft_model import DraftModelConfig, DraftModelProposer
from pipespec.head.proposers.token_map import ReadText
from pipespec.head.tree import Tree
from pipespec.system.device_copy import to_device

if TYPE_CHECKING:  # the runner imports models, which reading settings does not need
    from torch import Tensor

    from pipespec.engine.slice.head_slice import HeadSlice
    from pipespec.engine.slice.runner import SliceRunner

# Rows of decided text that a draft round reads at most, beside nodes.
MOST_READ = 16


@dataclass(frozen=True)
class DraftHeadConfig(DraftModelConfig):
    """Settings of a draft head."""

    needs_draft = False
    needs_head = True


class HeadText(ReadText):
    """The decided text of a sequence as a draft head reads it: `own`, without the tokens before
    which it has no features. That is the first one; and of a text that begins in the prefix cache,
    those that the head has not kept, and the one behind them.

    Attributes:
        places: the positions of the own tokens in the text, rising.
        before: what the head reads of the positions before those that it has not computed.
    """

    def __init__(self, context: Context, places: list[int]) -> None:
        """It begins with the tokens at `places`, which the head has computed of another text."""
        super().__init__(context, None)
        self.places = places
        tokens, nodes = ([of[place] for place in places] for of in (context.tokens, context.nodes))
        self.own = replace(context, tokens=tokens, nodes=nodes, shared_len=len(places))
        self.before: list[Tensor] = []
        self._pending: dict[int, Tensor] = {}
        self._next = context.shared_len  # the position of the next features

    def add(self, position: int, before: Tensor) -> None:
        """What the head reads of a position of the text."""
        self._pending[position] = before
        self._next = position + 1

    def read_new(self) -> None:
        """Read the tokens behind positions whose features have arrived."""
        context, own = self._context, self.own
        for position in sorted(self._pending):
            if (place := position + 1) >= len(context.tokens):
                break
            self.before.append(self._pending.pop(position))
            self.places.append(place)
            own.tokens.append(context.tokens[place])
            own.nodes.append(context.nodes[place])

    @property
    def has_root(self) -> bool:
        """Whether the last token can be read."""
        return self.places[-1:] == [len(self._context.tokens) - 1]

    @property
    def awaits_features(self) -> bool:
        """Whether the features before the last token are still to come."""
        return self._next < len(self._context.tokens) - 1

    def tree_rows(self, tree: Tree, nodes: np.ndarray) -> np.ndarray:
        """As `Tree.rows`, at the positions of the own text."""
        rows = tree.rows(self.own.sequence, nodes)
        rows[:, POSITION] += len(self.own.tokens) - len(self._context.tokens)
        return rows


class DraftHeadProposer(DraftModelProposer):
    """Proposes the most probable continuations of tree nodes by a draft head.

    Its rows of decided text are computed from features. Those of nodes are computed level by level,
    each from the state of its parent, and dropped with the next verdict, as the tree is.
    """

    def __init__(
        self, runner: SliceRunner, model: HeadSlice, chunk: int, vocabulary: int, max_retained: int
    ):
        super().__init__(runner, chunk, vocabulary, max_retained=max_retained)
        self._model = model
        self.known = model.tokens
        # What a token below reads of each node computed since the last verdict, by sequence.
        self._states: dict[int, dict[int, Tensor]] = {}
        self._places: dict[int, list[int]] = {}  # of texts in the KV cache

    def start_sequence(self, context: Context) -> None:
        runner = self.runner
        kept = runner.lineages.keys() | runner.cached.keys()
        self._places = {number: each for number, each in self._places.items() if number in kept}
        shared = self._places.get(context.parent, [])[: runner.length(context.parent)]
        if context.parent in runner.memory.failed:
            shared = []
        places = shared[: bisect_left(shared, context.shared_len)]
        self._contexts[context.sequence] = context
        self.read[context.sequence] = text = HeadText(context, places)
        self._places[context.sequence] = text.places
        self._states[context.sequence] = {}
        self.texts.start(text.own)

    def add_features(self, computed: Batch) -> None:
        """The features of rows of decided text, `hidden` `[rows, columns]`."""
        if not len(computed):
            return
        assert computed.hidden is not None
        known = self._model.fused(computed.hidden)
        places = computed.rows[:, [SEQUENCE, POSITION]].tolist()
        for row, (sequence, position) in enumerate(places):
            if sequence in self.read:  # else it has ended
                self._text(sequence).add(position, known[row])

    def accept_verdict(self, verdict: Verdict) -> None:
        nodes, sequence = self.runner.nodes, verdict.sequence
        live = nodes.of(sequence)
        rows = np.zeros((len(live), NUM_COLUMNS), np.int64)
        rows[:, SEQUENCE], rows[:, NODE] = sequence, nodes.node[live]
        self.runner.discard(rows)
        self._states[sequence].clear()
        self._learn(verdict)

    def end_sequence(self, sequence: int) -> None:
        super().end_sequence(sequence)
        del self._states[sequence]

    def propose(self, requests: Sequence[ProposalRequest], children: int) -> list[Proposal | None]:
        """See `DraftModelProposer`. While features of a prompt are to come, it is read as far as
        they reach; and a pass that reads many of them proposes nothing, as its time would count as
        that of a draft round."""
        texts = [self._text(each.context.sequence) for each in requests]
        for text in texts:
            text.read_new()
        reads = [text.awaits_features or len(text.before) > MOST_READ for text in texts]
        found = super().propose(requests, children)
        return [None if some else each for some, each in zip(reads, found, strict=True)]

    def _readable(self, request: ProposalRequest) -> ProposalRequest:
        text = self._text(request.context.sequence)
        if text.has_root and len(text.before) <= MOST_READ:
            return request
        return request.select(np.zeros(len(request.nodes), bool))

    def _missing(self, sequence: int) -> np.ndarray:
        rows = super()._missing(sequence)
        # The last token is computed in the pass that proposes what may follow it.
        return rows[:-1] if len(rows) > MOST_READ else rows

    def _computed(self, rows: np.ndarray) -> Tensor:
        import torch

        known: list[Tensor | None] = [None] * len(rows)
        places: list[tuple[int, int, int]] = rows[:, [SEQUENCE, NODE, PARENT]].tolist()
        for sequence in dict.fromkeys(rows[:, SEQUENCE].tolist()):
            text = self._text(sequence)
            decided = np.flatnonzero((rows[:, SEQUENCE] == sequence) & (rows[:, KIND] != DRAFT))
            for row, before in zip(decided.tolist(), text.before, strict=False):
                known[row] = before
            del text.before[: len(decided)]
        found, left = None, np.arange(len(rows))
        while len(left):  # one level after another
            for row in left.tolist():
                sequence, _, parent = places[row]
                if known[row] is None:
                    known[row] = self._states[sequence].get(parent)
            ready = np.array([row for row in left.tolist() if known[row] is not None], np.int64)
            assert len(ready), "the head lacks what is above a node"
            before = torch.stack([each for row in ready if (each := known[row]) is not None])
            hidden = self._run(rows[ready], before)
            self._keep_states(rows[ready], hidden)
            found = hidden.new_empty(len(rows), hidden.shape[1]) if found is None else found
            found[to_device(ready, found.device)] = hidden
            left = np.setdiff1d(left, ready)
        assert found is not None
        return found

    def _run(self, rows: np.ndarray, before: Tensor) -> Tensor:
        """The states of some rows, `[rows, hidden]`, given what the head reads of the positions
        before them."""
        tokens = np.minimum(rows[:, TOKEN], self._model.vocab_size - 1)
        joined = self._model.joined(to_device(tokens, self._model.device), before)
        hidden = self.runner.compute(Batch(0, rows, joined)).hidden
        assert hidden is not None and len(hidden) == len(rows), "the head lost a parent"
        return hidden

    def _keep_states(self, rows: np.ndarray, hidden: Tensor) -> None:
        """Keep what rows below these would read: below nodes, and below the last decided token."""
        below = self._model.state_below(hidden)
        for row, (sequence, node, kind) in enumerate(rows[:, [SEQUENCE, NODE, KIND]].tolist()):
            if kind == DRAFT or node == self._text(sequence).own.nodes[-1]:
                self._states[sequence][node] = below[row]

    def _text(self, sequence: int) -> HeadText:
        text = self.read[sequence]
        assert isinstance(text, HeadText)
        return text
