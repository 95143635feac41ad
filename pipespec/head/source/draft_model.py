"""The draft model as a token source: a slice that holds all of its layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from pipespec.core import Batch, Verdict
from pipespec.head.feed.policy import NOTHING
from pipespec.head.feed.rounds import check_rounds
from pipespec.head.source.confidence import Confidence
from pipespec.head.source.protocol import Asked, Candidates, Context, TokenSource
from pipespec.head.tree import ROOT

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
        self._contexts[context.sequence] = context
        self.runner.open(context.sequence)
        self.runner.apply([Verdict(context.sequence, 0, tuple(context.tokens))])

    def accept(self, verdict: Verdict) -> None:
        context = self._contexts[verdict.sequence]
        end = verdict.base + len(verdict.tokens)
        # The tree may have dropped what the draft still holds, and guessed it again.
        self.runner.apply([verdict], context.nodes[verdict.base : end])
        for position in range(verdict.base, len(context.tokens)):
            self.confidence.learn(
                context.sequence, context.nodes[position - 1], context.tokens[position]
            )

    def end(self, sequence: int) -> None:
        self.runner.release(sequence)
        self.confidence.end(sequence)
        del self._contexts[sequence]

    def expand(self, asked: Sequence[Asked], children: int) -> list[Candidates | None]:
        """One pass of the draft for all sequences.

        Of decided text it reads `chunk` rows, those first who miss least of it: they are asked
        for guesses now, and a long prompt takes what they leave. Who finds no KV slot free gets
        no candidates.
        """
        behind = [each.context.rows(self.runner.length(each.context.sequence)) for each in asked]
        found: list[Candidates | None] = [None] * len(asked)
        parts: list[np.ndarray] = []
        ready: list[tuple[int, Asked, slice]] = []  # who is answered, where its nodes' rows are
        start, left, free = 0, self.chunk, self.runner.slots.num_free
        for i in sorted(range(len(asked)), key=lambda i: len(behind[i])):
            rows = behind[i][: min(left, free)]
            left -= len(rows)
            free -= len(rows)
            if len(rows) == len(behind[i]):
                fitting = _fitting(asked[i], free)
                guesses = fitting.nodes[fitting.nodes != ROOT]
                assert len(guesses) == len(fitting.nodes) or len(rows), "the root was expanded"
                free -= len(guesses)
                tree_rows = asked[i].tree.rows(asked[i].context.sequence, guesses)
                rows = np.concatenate((rows, tree_rows))
                end = start + len(rows)
                ready.append((i, fitting, slice(end - len(fitting.nodes), end)))
            elif not len(rows) and not free:
                found[i] = Candidates.of(NOTHING, [])
            parts.append(rows)
            start += len(rows)
        if not start:
            for i, _, _ in ready:
                found[i] = Candidates.of(NOTHING, [])
            return found
        hidden = self.runner.compute(Batch(step=0, rows=np.concatenate(parts))).hidden
        assert hidden is not None and len(hidden) == start, "the draft lost a parent"
        if ready:
            import torch  # whoever only reads settings can do without

            wanted = torch.cat([hidden[where] for _, _, where in ready])
            logits = self.runner.model.logits(wanted)[:, : self.vocabulary].float()
            of_each = logits.split([where.stop - where.start for _, _, where in ready])
            for (i, fitting, _), mine in zip(ready, of_each, strict=True):
                of_one = self._of_one(fitting, mine, children) if len(mine) else None
                found[i] = of_one or Candidates.of(NOTHING, [])
        return found

    def _of_one(self, asked: Asked, logits: Tensor, children: int) -> Candidates:
        """The children of one sequence's nodes, by the draft's logits after them."""
        context, tree, nodes = asked.context, asked.tree, asked.nodes
        if not (self.foresight and context.drawn):
            top = logits.log_softmax(-1).topk(min(children, logits.shape[-1]))
            return Candidates(nodes, top.indices.cpu().numpy(), top.values.double().cpu().numpy())
        from pipespec.sampling.foresight import scores

        # As the target's own noise ranks them.
        positions = (tree.position[nodes] + 1).tolist()
        found = scores(logits, positions, context.sampling)
        tokens, scored, share = (part.cpu().numpy() for part in found)
        self.confidence.keep(context.sequence, tree.id)
        best = self.confidence.propose(
            context.sequence, tree.id[nodes], tokens, scored, share, children
        )
        return Candidates(nodes, *best)


def _fitting(asked: Asked, free: int) -> Asked:
    """With the nodes for which there are so many slots, the likeliest; the root needs none."""
    guesses = asked.nodes[asked.nodes != ROOT]
    if len(guesses) <= free:
        return asked
    kept = asked.tree.best(guesses, free)
    return replace(asked, nodes=asked.nodes[(asked.nodes == ROOT) | np.isin(asked.nodes, kept)])
