"""The draft model as a proposer: one slice with all of its layers. Above 350 lines, as texts,
rounds and late states are of one model."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pipespec.core import NODE, Batch, Verdict
from pipespec.head.kept_states import KeptStates
from pipespec.head.policies.policy import NO_NODES
from pipespec.head.proposer import (
    Context,
    Encode,
    Proposal,
    ProposalRequest,
    Proposer,
    ProposerConfig,
)
from pipespec.head.proposers.calibration import CalibratedProposer
from pipespec.head.proposers.draft_texts import DraftTexts
from pipespec.head.proposers.foresight_confidence import ForesightConfidence
from pipespec.head.proposers.parallel import ParallelDraft, best_paths
from pipespec.head.proposers.token_map import FIRST_PART, ProposedTokens, ReadText, TokenMap
from pipespec.head.tree import ROOT
from pipespec.sampling.grammar import unpack_mask
from pipespec.system.device_copy import to_device, to_host

log = logging.getLogger(__name__)

if TYPE_CHECKING:  # the runner imports models, which reading settings does not need
    from torch import Tensor

    from pipespec.engine.slice.runner import SliceRunner


@dataclass(frozen=True)
class DraftModelConfig(ProposerConfig):
    """Settings of the draft model."""

    needs_draft = True

    def make(self, draft: Proposer | None, vocabulary: int, encode: Encode) -> Proposer:
        assert draft is not None
        return CalibratedProposer(draft)


class DraftModelProposer:
    """Runs tree nodes through the draft and proposes its most probable continuations.

    The draft keeps its own KV by the same parent rule as every stage, in its own tokens where its
    vocabulary is another one (`pipespec.head.proposers.token_map`). Decided tokens that it has
    not computed (the prompt at first, later every token that it did not propose) are computed
    before the requested nodes. `texts` are those in its KV cache, `read` those of running sequences
    as it reads them.

    Where tokens are drawn, candidates are ranked with the target's own noise
    (`pipespec.sampling.shared_noise`). A parallel draft also computes mask rows below the nodes
    that are expanded (`pipespec.head.proposers.parallel`) and frees them at once, as nothing
    follows them.
    """

    def __init__(
        self,
        runner: SliceRunner,
        chunk: int,
        vocabulary: int,
        *,
        max_retained: int = 0,
        states: KeptStates | None = None,
        parallel: ParallelDraft | None = None,
        tokens: TokenMap | None = None,
    ):
        """A pass reads `chunk` prompt rows; the target knows `vocabulary` tokens; the KV of
        `max_retained` ended sequences may be retained, with running `states` if the draft has some;
        `parallel`: a pass proposes several tokens; `tokens`: of another vocabulary, for which there
        is no parallel draft."""
        assert parallel is None or tokens is None
        self.runner = runner
        self.chunk = chunk
        self.vocabulary = vocabulary
        self.texts = DraftTexts(runner, max_retained, states)
        self.parallel = parallel
        self.confidence = ForesightConfidence()
        # Of each level of mask rows: the farther ahead, the less sure.
        num_masks = parallel.num_masks if parallel else 0
        self._mask_confidence = [ForesightConfidence() for _ in range(num_masks)]
        self.tokens = tokens
        self.proposed = None if tokens is None else ProposedTokens(tokens)
        # Which of the target's tokens the draft's logits are of, rising; None: the first ones.
        self.known: np.ndarray | None = None
        self._contexts: dict[int, Context] = {}
        self.read: dict[int, ReadText] = {}
        self._warned = False  # about logits that are not finite

    def start_sequence(self, context: Context) -> None:
        self._contexts[context.sequence] = context
        self.read[context.sequence] = read = ReadText(context, self.tokens)
        self._count(context, context.shared_len)
        self.texts.start(read.own)

    def accept_verdict(self, verdict: Verdict) -> None:
        own, nodes = self.read[verdict.sequence].accept(verdict)
        # The tree may have dropped nodes that the draft still holds, and added them again.
        self.runner.apply([own], nodes)
        self._count(self._contexts[verdict.sequence], verdict.base)
        self._learn(verdict)

    def _count(self, context: Context, start: int) -> None:
        """Learn from a text, from a position on, which tokens that the draft lacks it may have."""
        if self.proposed is not None:
            if not context.salted:
                self.proposed.learn(context.tokens[start:])
            self.known = self.proposed.known

    def _learn(self, verdict: Verdict) -> None:
        """Learn from a verdict how sure candidates are where tokens are drawn."""
        context = self._contexts[verdict.sequence]
        for position in range(verdict.base, len(context.tokens)):
            for back, confidence in enumerate((self.confidence, *self._mask_confidence), 1):
                if position >= back:
                    node, token = context.nodes[position - back], context.tokens[position]
                    confidence.learn(context.sequence, node, token)

    def end_sequence(self, sequence: int) -> None:
        self.texts.end(sequence)
        for confidence in (self.confidence, *self._mask_confidence):
            confidence.end_sequence(sequence)
        del self._contexts[sequence], self.read[sequence]

    def propose(self, requests: Sequence[ProposalRequest], children: int) -> list[Proposal | None]:
        """One pass of the draft for all sequences.

        It computes up to `chunk` rows of decided text, of the sequences that miss least first:
        these need draft tokens now, and a long prompt takes the rows that they leave. A sequence
        for which no KV slot is free gets no candidates, and neither does a node that the draft
        cannot read.
        """
        readable = [*map(self._readable, requests)]
        found = self._answers(readable, children)
        for i, (whole, read) in enumerate(zip(requests, readable, strict=True)):
            if (answer := found[i]) is not None and len(read.nodes) < len(whole.nodes):
                found[i] = answer.with_leaves(np.setdiff1d(whole.nodes, read.nodes))
        return found

    def _answers(self, requests: Sequence[ProposalRequest], children: int) -> list[Proposal | None]:
        nothing = Proposal.from_lists(NO_NODES, [])
        missing = [self._missing(each.context.sequence) for each in requests]
        wanted = min(self.chunk, sum(map(len, missing)))
        for asked in requests:
            wanted += len(asked.nodes) * self._num_masks(asked)
            wanted += int(self.read[asked.context.sequence].num_rows(asked.tree, asked.nodes).sum())
        free = self._make_room(wanted)
        found: list[Proposal | None] = [None] * len(requests)
        parts: list[np.ndarray] = []
        masks: list[np.ndarray] = []
        ready: list[_Ready] = []
        start, left = 0, self.chunk
        for i in sorted(range(len(requests)), key=lambda i: len(missing[i])):
            if requests[i].context.sequence in self.runner.memory.failed:
                found[i] = nothing
                continue
            rows = self.texts.chunk(requests[i].context.sequence, missing[i][: min(left, free)])
            left -= len(rows)
            free -= len(rows)
            if len(rows) == len(missing[i]):
                fitting, drafted = self._fitting(requests[i], free)
                assert ROOT not in fitting.nodes or len(rows), "the root was expanded"
                tree, sequence = requests[i].tree, requests[i].context.sequence
                below = self.read[sequence].tree_rows(tree, drafted)
                free -= len(below)
                last = np.flatnonzero(np.append(below[:, NODE], -1) < FIRST_PART)  # of each node
                at = start + len(rows) + last[np.searchsorted(drafted, fitting.nodes)]
                at[fitting.nodes == ROOT] = start + len(rows) - 1
                rows = np.concatenate((rows, below))
                masked = NO_NODES
                if self.parallel is not None and self._num_masks(requests[i]):
                    masked = self.parallel.select_nodes(tree, fitting.nodes, free)
                    masks.append(self.parallel.mask_rows(tree, sequence, masked))
                    rows = np.concatenate((rows, masks[-1]))
                    free -= len(masks[-1])
                if len(fitting.nodes):
                    end = start + len(rows)
                    mask_rows = np.arange(end - len(masked) * self._num_masks(requests[i]), end)
                    ready.append(_Ready(i, fitting, masked, np.concatenate((at, mask_rows))))
                else:
                    found[i] = nothing
            elif not len(rows) and not free:
                found[i] = nothing
            parts.append(rows)
            start += len(rows)
        if not start:
            return found
        hidden = self._computed(np.concatenate(parts))
        if masks:
            self.runner.discard(np.concatenate(masks))
        # All sequences with foresight are ranked together, and so are all others, so that the host
        # waits for the device as often as for one sequence.
        for foreseen, rank in ((False, self._by_probability), (True, self._by_foresight)):
            mine = [x for x in ready if x.request.context.foreseeable == foreseen]
            if not mine:
                continue
            mine, logits = self._logits(hidden, mine)
            if logits is not None:
                ranked = rank(mine, self._allowed(mine, logits), children)
                for each, (tokens, logps) in zip(mine, ranked, strict=True):
                    found[each.index] = each.proposal(tokens, self._finite(logps))
        for each in ready:
            if found[each.index] is None:  # there was no memory
                found[each.index] = nothing
        return found

    def _computed(self, rows: np.ndarray) -> Tensor:
        """The hidden states of the rows of a pass, `[rows, hidden]`."""
        batch = Batch(0, rows, kept_states=self.texts.take_unsent())
        hidden = self.runner.compute(batch).hidden
        assert hidden is not None and len(hidden) == len(rows), "the draft lost a parent"
        return hidden

    def _make_room(self, rows: int) -> int:
        """See `DraftTexts.make_room`."""
        return self.texts.make_room(rows)

    def _missing(self, sequence: int) -> np.ndarray:
        """The rows of decided text to compute before nodes, `[k, 6]`."""
        return self.read[sequence].own.rows(self.runner.length(sequence))

    def _readable(self, request: ProposalRequest) -> ProposalRequest:
        """The request for the nodes that the draft can read."""
        return request

    def _finite(self, logps: np.ndarray) -> np.ndarray:
        """Log-probabilities `[rows, n]`, -inf (no candidate) where the draft's logits are NaN or
        +inf; that is logged once."""
        wrong = np.isnan(logps)
        if not wrong.any():
            return logps
        if not self._warned:
            self._warned = True
            log.warning(
                "The logits of a draft model are not finite, so decoding continues without its "
                "draft tokens there; choose another draft, or set model.dtype=float32."
            )
        return np.where(wrong, -np.inf, logps)

    def _num_masks(self, request: ProposalRequest) -> int:
        """How many mask rows each of the nodes may have."""
        if self.parallel is None or not request.max_path_tokens:
            return 0
        return self.parallel.num_masks

    def _fitting(self, request: ProposalRequest, free: int) -> tuple[ProposalRequest, np.ndarray]:
        """The request for the likeliest nodes for which `free` slots suffice, and the nodes to
        compute for them, rising: themselves but for the root, and all nodes above them that were
        added to the tree without a pass of the draft."""
        tree, sequence = request.tree, request.context.sequence
        wanted = {*request.nodes.tolist(), ROOT}
        above = {*tree.parent[request.nodes].tolist()} - wanted
        while above:
            lacking = {
                each for each in above if not self.runner.holds(sequence, int(tree.id[each]))
            }
            wanted |= lacking
            above = {*tree.parent[[*lacking]].tolist()} - wanted
        nodes = np.array(sorted(wanted - {ROOT}), np.int64)  # the root's row is of the decided text
        num_rows = self.read[sequence].num_rows(tree, nodes)
        if num_rows.sum() <= free:
            return request, nodes
        order = np.argsort(-tree.cum[nodes], kind="stable")
        nodes = np.sort(nodes[order[num_rows[order].cumsum() <= free]])
        return request.select((request.nodes == ROOT) | np.isin(request.nodes, nodes)), nodes

    def _logits(self, hidden: Tensor, ready: list[_Ready]) -> tuple[list[_Ready], Tensor | None]:
        """Those sequences for which there is memory, and the logits after their rows, of the tokens
        `known`, `[k, tokens]` float32; None: there is no row."""
        numbers = [each.request.context.sequence for each in ready for _ in each.rows]
        rows = np.concatenate([NO_NODES, *(each.rows for each in ready)])

        def compute(kept: np.ndarray) -> Tensor:
            wanted = hidden.index_select(0, to_device(rows[kept], hidden.device))
            return self._of_target(self.runner.model.logits(wanted)).float()

        _, logits = self.runner.memory.compute(np.array(numbers), compute)
        failed = self.runner.memory.failed
        return [each for each in ready if each.request.context.sequence not in failed], logits

    def _of_target(self, logits: Tensor) -> Tensor:
        """The logits of the target's tokens."""
        if self.proposed is None:
            return logits[:, : self.vocabulary]
        return self.proposed.logits(logits)

    def _allowed(self, ready: Sequence[_Ready], logits: Tensor) -> Tensor:
        """The logits with -inf for tokens that must not follow a node, unless none may."""
        masks = [(each.request.allowed, rows.start) for each, rows in _spans(ready)]
        if all(allowed is None for allowed, _ in masks):
            return logits
        barred = np.zeros(tuple(logits.shape), bool)
        known = slice(logits.shape[1]) if self.known is None else self.known
        for allowed, start in masks:
            if allowed is not None:
                may = unpack_mask(allowed, self.vocabulary)[:, known]
                barred[start : start + len(may)] = ~may & may.any(1, keepdims=True)
        return logits.masked_fill(to_device(barred, logits.device), -np.inf)

    def _by_probability(
        self, ready: Sequence[_Ready], logits: Tensor, children: int
    ) -> Iterator[Ranked]:
        """The most probable tokens after the rows of each sequence, given their logits
        `[rows, tokens]`."""
        top = logits.log_softmax(-1).topk(min(children, logits.shape[1]))
        tokens, logps = to_host(top.indices, top.values.double())
        tokens = tokens if self.known is None else self.known[tokens]
        for _, rows in _spans(ready):
            yield tokens[rows], logps[rows]

    def _by_foresight(
        self, ready: Sequence[_Ready], logits: Tensor, children: int
    ) -> Iterator[Ranked]:
        """The tokens that the target will most probably draw, as its own noise ranks them."""
        from pipespec.sampling.shared_noise import score_tokens

        positions = np.concatenate([each.positions for each in ready]).tolist()
        samplings = [each.request.context.sampling for each in ready for _ in each.rows]
        known = None if self.known is None else to_device(self.known, logits.device)
        tokens, scores, share = to_host(*score_tokens(logits, positions, samplings, known))
        levels = self._mask_confidence
        for each, rows in _spans(ready):
            sequence, ids = each.request.context.sequence, each.request.tree.id
            first_mask = rows.start + len(each.request.nodes)
            parts = [(self.confidence, each.request.nodes, slice(rows.start, first_mask))]
            if len(each.masked):
                parts += [
                    (level, each.masked, slice(first_mask + i, rows.stop, len(levels)))
                    for i, level in enumerate(levels)
                ]
            best = []
            for confidence, nodes, mine in parts:
                confidence.drop_pruned(sequence, ids)
                best.append(
                    confidence.rank(
                        sequence, ids[nodes], tokens[mine], scores[mine], share[mine], children
                    )
                )
            ranked, logps = (
                np.concatenate([of_nodes, *_node_by_node(of_masks)])
                for of_nodes, *of_masks in zip(*best, strict=True)
            )
            yield ranked, logps


# What may follow some rows, the likeliest first: tokens and log-probabilities, `[rows, n]`.
Ranked = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, slots=True)
class _Ready:
    """A sequence that one pass of the draft answers.

    Attributes:
        index: of its request among those of the round.
        request: as far as its nodes fit.
        masked: the nodes with mask rows below them.
        rows: its rows of the pass: of the nodes, then of the masks, node by node.
    """

    index: int
    request: ProposalRequest
    masked: np.ndarray
    rows: np.ndarray

    @property
    def num_masks(self) -> int:
        """Mask rows of each node that has any."""
        return (len(self.rows) - len(self.request.nodes)) // max(len(self.masked), 1)

    @property
    def positions(self) -> np.ndarray:
        """The positions of the tokens after the rows."""
        position = self.request.tree.position
        ahead = position[self.masked, None] + np.arange(2, 2 + self.num_masks)
        return np.concatenate((position[self.request.nodes] + 1, ahead.ravel()))

    def proposal(self, tokens: np.ndarray, logps: np.ndarray) -> Proposal:
        """The ranked tokens `[rows, n]` as children of the nodes and paths below these."""
        nodes, count = self.request.nodes, len(self.request.nodes)
        paths = None
        if len(self.masked):
            shape = (count, self.num_masks, tokens.shape[1])
            ahead, stated = np.zeros(shape, np.int64), np.full(shape, -np.inf)
            has_masks = np.isin(nodes, self.masked)
            ahead[has_masks] = tokens[count:].reshape(-1, *shape[1:])
            stated[has_masks] = logps[count:].reshape(-1, *shape[1:])
            cum = self.request.tree.cum[nodes]
            paths = best_paths(cum, logps[:count], ahead, stated, self.request.max_path_tokens)
        return Proposal(nodes, tokens[:count], logps[:count], paths)


def _node_by_node(levels: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The rows of all levels of masks, each `[nodes, n]`, node by node, `[rows, n]`."""
    return [np.stack(levels, 1).reshape(-1, levels[0].shape[1])] if levels else []


def _spans(ready: Sequence[_Ready]) -> Iterator[tuple[_Ready, slice]]:
    """Each sequence with the range of its rows among the rows of all."""
    start = 0
    for each in ready:
        end = start + len(each.rows)
        yield each, slice(start, end)
        start = end
