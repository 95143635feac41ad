"""The draft model as a token source: a slice that holds all of its layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pipespec.core import Batch, Verdict
from pipespec.head.feed.rounds import check_rounds
from pipespec.head.source.confidence import Confidence
from pipespec.head.source.protocol import Candidates, Context, TokenSource
from pipespec.head.tree import ROOT, Tree

if TYPE_CHECKING:  # it imports models, which whoever only reads settings can do without
    from torch import Tensor

    from pipespec.engine.runner import SliceRunner


@dataclass(frozen=True)
class DraftModel:
    """Settings: `rounds`, how often the draft expands the tree in one pipeline step; `foresight`,
    whether it ranks what will be drawn with the target's own noise."""

    rounds: int | str = 2
    foresight: bool = True

    def __post_init__(self) -> None:
        check_rounds(self.rounds)

    @property
    def needs_draft(self) -> bool:
        return True

    @property
    def synthetic(self) -> bool:
        return False

    def make(self, draft: TokenSource | None, vocabulary: int) -> TokenSource:
        assert draft is not None
        return draft


class DraftModelSource:
    """Runs tree nodes through the draft and proposes its most probable continuations.

    The draft keeps its own KV by the same parent rule as every stage. Decided tokens that it
    has not computed (the prompt at first, later every token it failed to guess) are computed
    before the nodes that were asked for. Where tokens are drawn, it ranks with the target's own
    noise (`pipespec.sampling.foresight`).
    """

    def __init__(self, runner: SliceRunner, chunk: int, vocabulary: int, *, foresight: bool = True):
        """`chunk`: prompt rows per pass; `vocabulary`: token ids that the target knows."""
        self.runner = runner
        self.chunk = chunk
        self.vocabulary = vocabulary
        self.foresight = foresight
        self.confidence = Confidence()
        self._contexts: dict[int, Context] = {}

    def begin(self, context: Context) -> None:
        self._contexts[context.request] = context
        self.runner.open(context.request)
        self.runner.apply([Verdict(context.request, 0, tuple(context.tokens))])

    def accept(self, verdict: Verdict) -> None:
        self.runner.apply([verdict])
        context = self._contexts[verdict.request]
        for position in range(verdict.base, len(context.tokens)):
            self.confidence.learn(
                context.request, context.nodes[position - 1], context.tokens[position]
            )

    def end(self, request: int) -> None:
        self.runner.release(request)
        self.confidence.end(request)
        del self._contexts[request]

    def expand(
        self, context: Context, tree: Tree, nodes: np.ndarray, children: int
    ) -> Candidates | None:
        behind = context.rows(self.runner.length(context.request))
        if len(behind) > self.chunk:
            self.runner.compute(Batch(step=0, rows=behind[: self.chunk]))
            return None
        guesses = nodes[nodes != ROOT]
        if len(guesses) < len(nodes):
            assert len(behind), "the root was expanded before"
        rows = np.concatenate((behind, tree.rows(context.request, guesses)))
        hidden = self.runner.compute(Batch(step=0, rows=rows)).hidden
        assert hidden is not None and len(hidden) == len(rows), "the draft lost a parent"
        logits = self.runner.model.logits(hidden[len(rows) - len(nodes) :])
        import torch  # whoever only reads settings can do without

        logits = logits[:, : self.vocabulary].float()
        if self.foresight and context.drawn:
            return self._foreseen(context, tree, nodes, logits, children)
        top = torch.log_softmax(logits, -1).topk(min(children, logits.shape[-1]))
        return Candidates(nodes, top.indices.cpu().numpy(), top.values.double().cpu().numpy())

    def _foreseen(
        self, context: Context, tree: Tree, nodes: np.ndarray, logits: Tensor, children: int
    ) -> Candidates:
        """The children as the target's own noise ranks them."""
        from pipespec.sampling.foresight import scores

        found = scores(logits, (tree.position[nodes] + 1).tolist(), context.sampling)
        tokens, scored, share = (part.cpu().numpy() for part in found)
        self.confidence.keep(context.request, tree.id)
        best = self.confidence.propose(
            context.request, tree.id[nodes], tokens, scored, share, children
        )
        return Candidates(nodes, *best)
