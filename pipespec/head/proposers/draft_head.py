"""A draft head as a proposer (EAGLE-3, MTP): one layer or several, which read, with each token,
what is known of the position before it. Of decided text that are hidden states of the target (its
*features*); below it in the tree, the head's own states.

Of several MTP layers each reads the state that the layer before it has of the token before
(DeepSeek-V3, arXiv 2412.19437, section 2.2); the k-th proposes the k-th token beyond the features,
and the last one all later tokens too. A node at depth d is computed by the layers d+1 and later: as
in training, each attends to all tokens of the path. A layer has a KV cache of its own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
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
from pipespec.head.proposers.draft_texts import DraftTexts
from pipespec.head.proposers.token_map import ReadText
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
    """The decided text of a sequence as a layer of a draft head reads it: `own`, without the tokens
    before which it has no features, or no states of the layer before. That is the first one; and
    of a text that begins in the prefix cache, those that it has not kept, and the one behind them.

    Attributes:
        places: the positions of the own tokens in the text, rising.
        before: what the layer reads of the positions before those that it has not computed.
    """

    def __init__(self, context: Context, places: list[int]) -> None:
        """It begins with the tokens at `places`, which the layer has computed of another text."""
        super().__init__(context, None)
        self.places = places
        tokens, nodes = ([of[place] for place in places] for of in (context.tokens, context.nodes))
        self.own = replace(context, tokens=tokens, nodes=nodes, shared_len=len(places))
        self.before: deque[Tensor] = deque()
        self._pending: dict[int, Tensor] = {}
        self._next = context.shared_len  # the position of the next features

    def add(self, position: int, before: Tensor) -> None:
        """What the layer reads of a position of the text."""
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
    def awaits_features(self) -> bool:
        """Whether the features before the last token are still to come."""
        return self._next < len(self._context.tokens) - 1


class HeadLayer:
    """A layer of a draft head, with its KV cache and the texts in it.

    Attributes:
        read: the decided text of each running sequence.
        states: what a token below reads of the last decided token, and of each node computed since
            the last verdict, by sequence.
    """

    def __init__(self, model: HeadSlice, runner: SliceRunner, texts: DraftTexts):
        self.model, self.runner, self.texts = model, runner, texts
        self.read: dict[int, HeadText] = {}
        self.states: dict[int, dict[int, Tensor]] = {}
        self._places: dict[int, list[int]] = {}  # of texts in the KV cache

    def start(self, context: Context) -> None:
        runner = self.runner
        kept = runner.lineages.keys() | runner.cached.keys()
        self._places = {number: each for number, each in self._places.items() if number in kept}
        shared = self._places.get(context.parent, [])[: runner.length(context.parent)]
        if context.parent in runner.memory.failed:
            shared = []
        places = shared[: bisect_left(shared, context.shared_len)]
        self.read[context.sequence] = text = HeadText(context, places)
        self._places[context.sequence] = text.places
        self.states[context.sequence] = {}
        self.texts.start(text.own)

    def drop_nodes(self, sequence: int) -> None:
        nodes = self.runner.nodes
        live = nodes.of(sequence)
        rows = np.zeros((len(live), NUM_COLUMNS), np.int64)
        rows[:, SEQUENCE], rows[:, NODE] = sequence, nodes.node[live]
        self.runner.discard(rows)
        self.states[sequence].clear()


class DraftHeadProposer(DraftModelProposer):
    """Proposes the most probable continuations of tree nodes by a draft head.

    Its rows of decided text are computed from features. Those of nodes are computed level by level,
    each from the state of its parent, and dropped with the next verdict, as the tree is. The last
    layer, whose runner and texts are those of a draft model, computes all rows, each of the others
    those of decided text and of nodes that are not too deep for it.
    """

    def __init__(
        self, runner: SliceRunner, model: HeadSlice, chunk: int, vocabulary: int, max_retained: int
    ):
        from pipespec.engine.slice.runner import SliceRunner

        super().__init__(runner, chunk, vocabulary, max_retained=max_retained)
        self.known = model.tokens
        self.layers: list[HeadLayer] = []
        for each in model.earlier:
            own = SliceRunner(each, runner.slots.num_slots)
            self.layers.append(HeadLayer(each, own, DraftTexts(own, max_retained, None)))
        self.layers.append(HeadLayer(model, runner, self.texts))

    def start_sequence(self, context: Context) -> None:
        self._contexts[context.sequence] = context
        for layer in self.layers:
            layer.start(context)
        self.read[context.sequence] = self.layers[-1].read[context.sequence]

    def add_features(self, computed: Batch) -> None:
        """The features of rows of decided text, `hidden` `[rows, columns]`."""
        if not len(computed):
            return
        assert computed.hidden is not None
        first = self.layers[0]
        known = first.model.fused(computed.hidden)
        for row, (sequence, position) in enumerate(computed.rows[:, [SEQUENCE, POSITION]].tolist()):
            if sequence in first.read:  # else it has ended
                first.read[sequence].add(position, known[row])

    def accept_verdict(self, verdict: Verdict) -> None:
        for layer in self.layers:
            layer.drop_nodes(verdict.sequence)
        self._learn(verdict)

    def end_sequence(self, sequence: int) -> None:
        super().end_sequence(sequence)  # in the last layer
        for layer in self.layers[:-1]:
            layer.texts.end(sequence)
        for layer in self.layers:
            del layer.read[sequence], layer.states[sequence]

    def propose(self, requests: Sequence[ProposalRequest], children: int) -> list[Proposal | None]:
        """See `DraftModelProposer`. While features of a prompt are to come, it is read as far as
        they reach; and a pass that reads many of them proposes nothing, as its time would count as
        that of a draft round."""
        sequences = [each.context.sequence for each in requests]
        for sequence in sequences:
            self.layers[0].read[sequence].read_new()
        for layer, after in pairwise(self.layers):
            self._read_decided(sequences, layer, after)
        reads = [self._reads(each) for each in sequences]
        found = super().propose(requests, children)
        return [None if some else each for some, each in zip(reads, found, strict=True)]

    def _read_decided(self, sequences: Sequence[int], layer: HeadLayer, after: HeadLayer) -> None:
        """Compute decided text in a layer whose states the one after it reads."""
        unread = {each: layer.read[each].own.rows(layer.runner.length(each)) for each in sequences}
        free = layer.texts.make_room(min(self.chunk, sum(map(len, unread.values()))))
        left, parts = min(self.chunk, free), [np.empty((0, NUM_COLUMNS), np.int64)]
        for sequence in sorted(unread, key=lambda each: len(unread[each])):
            if sequence not in self.runner.memory.failed:
                parts.append(unread[sequence][:left])
                left -= len(parts[-1])
        if len(rows := np.concatenate(parts)):
            states = self._in_layer(layer, rows)
            for row, (sequence, position) in enumerate(rows[:, [SEQUENCE, POSITION]].tolist()):
                after.read[sequence].add(layer.read[sequence].places[position], states[row])
        for sequence in sequences:
            after.read[sequence].read_new()

    def _reads(self, sequence: int) -> bool:
        """Whether features or text are to be read before anything is proposed."""
        first, last = self.layers[0].read[sequence], self.layers[-1].read[sequence]
        left = any(
            layer.read[sequence].before and layer.texts.make_room(1) for layer in self.layers[:-1]
        )
        return left or first.awaits_features or len(last.before) > MOST_READ

    def _make_room(self, rows: int) -> int:
        return min(layer.texts.make_room(rows) for layer in self.layers)

    def _readable(self, request: ProposalRequest) -> ProposalRequest:
        sequence, root = request.context.sequence, request.context.nodes[-1]
        text = self.layers[-1].read[sequence]
        read = all(root in layer.states[sequence] for layer in self.layers[:-1])
        if read and text.own.nodes[-1:] == [root] and len(text.before) <= MOST_READ:
            return request
        return request.select(np.zeros(len(request.nodes), bool))

    def _missing(self, sequence: int) -> np.ndarray:
        rows = super()._missing(sequence)
        # The last token is computed in the pass that proposes what may follow it.
        return rows[:-1] if len(rows) > MOST_READ else rows

    def _computed(self, rows: np.ndarray) -> Tensor:
        import torch

        places = rows[:, [SEQUENCE, NODE, PARENT, KIND]].tolist()
        found: dict[int, Tensor] = {}
        left = [*range(len(rows))]
        while left:  # one level after another
            begins = {row: self._first_layer(*places[row]) for row in left}
            ready = [row for row in left if begins[row] < len(self.layers)]
            assert ready, "the head lacks what is above a node"
            for number, layer in enumerate(self.layers):
                mine = [row for row in ready if begins[row] <= number]
                states = self._in_layer(layer, rows[mine]) if mine else ()
                for row, state in zip(mine, states, strict=True):
                    sequence, node, *_ = places[row]
                    found.setdefault(row, self.layers[0].states[sequence].get(node, state))
            left = [row for row in left if row not in found]
        return torch.stack([found[row] for row in range(len(rows))])

    def _first_layer(self, sequence: int, _: int, parent: int, kind: int) -> int:
        """The first layer that computes a row of a pass; none has that number: what is above it is
        still to be computed. Layers before the last have read decided text already."""
        last = len(self.layers) - 1
        known = (each for each in range(last + 1) if parent in self.layers[each].states[sequence])
        return last if kind != DRAFT else next((min(each + 1, last) for each in known), last + 1)

    def _in_layer(self, layer: HeadLayer, rows: np.ndarray) -> Tensor:
        """The states of rows in a layer, `[rows, hidden]`. A node reads that of its parent in the
        layer before, or, too deep for that, in the last one."""
        import torch

        before: list[Tensor] = []
        above = self.layers[max(self.layers.index(layer) - 1, 0)]
        places = rows[:, [SEQUENCE, NODE, PARENT, KIND]].tolist()
        for row, (sequence, _, parent, kind) in enumerate(places):
            text = layer.read[sequence]
            if kind != DRAFT:
                before.append(text.before.popleft())
                continue
            known = above if parent in above.states[sequence] else layer
            before.append(known.states[sequence][parent])
            rows[row, POSITION] += len(text.own.tokens) - len(self.read[sequence].own.tokens)
        tokens = np.minimum(rows[:, TOKEN], layer.model.vocab_size - 1)
        joined = layer.model.joined(to_device(tokens, layer.model.device), torch.stack(before))
        hidden = layer.runner.compute(Batch(0, rows, joined)).hidden
        assert hidden is not None and len(hidden) == len(rows), "the head lost a parent"
        self.runner.memory.failed |= layer.runner.memory.failed
        for row, (sequence, node, _, kind) in enumerate(places):
            if kind == DRAFT or node == layer.read[sequence].own.nodes[-1]:
                layer.states[sequence][node] = hidden[row]
        return hidden
