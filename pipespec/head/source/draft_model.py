"""The draft model as a token source: a slice that holds all of its layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pipespec.core import Batch, Verdict
from pipespec.head.feed.rounds import check_rounds
from pipespec.head.source.protocol import Candidates, Context, TokenSource
from pipespec.head.tree import ROOT, Tree

if TYPE_CHECKING:  # it imports models, which whoever only reads settings can do without
    from pipespec.engine.runner import SliceRunner


@dataclass(frozen=True)
class DraftModel:
    """Settings: `rounds`, how often the draft expands the tree in one pipeline step."""

    rounds: int | str = 2

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
    before the nodes that were asked for.
    """

    def __init__(self, runner: SliceRunner, chunk: int, vocabulary: int):
        """`chunk`: prompt rows per pass; `vocabulary`: token ids that the target knows."""
        self.runner = runner
        self.chunk = chunk
        self.vocabulary = vocabulary

    def begin(self, context: Context) -> None:
        self.runner.open(context.request)
        self.accept(Verdict(context.request, 0, tuple(context.tokens)))

    def accept(self, verdict: Verdict) -> None:
        self.runner.apply([verdict])

    def end(self, request: int) -> None:
        self.runner.release(request)

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
        top = torch.log_softmax(logits, -1).topk(min(children, logits.shape[-1]))
        return Candidates(nodes, top.indices.cpu().numpy(), top.values.double().cpu().numpy())
