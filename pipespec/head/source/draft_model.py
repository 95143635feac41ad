"""The draft model as a token source: a slice that holds all of its layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
                if len(fitting.nodes):
                    ready.append((i, fitting, slice(end - len(fitting.nodes), end)))
                else:
                    found[i] = Candidates.of(NOTHING, [])
            elif not len(rows) and not free:
                found[i] = Candidates.of(NOTHING, [])
            parts.append(rows)
            start += len(rows)
        if not start:
            return found
        hidden = self.runner.compute(Batch(step=0, rows=np.concatenate(parts))).hidden
        assert hidden is not None and len(hidden) == start, "the draft lost a parent"
        # Those whose draws are foreseen are ranked together, and so are the others: the device is
        # waited for no more often than for one sequence.
        for foreseen, children_of in ((False, self._likeliest), (True, self._foreseen)):
            if mine := [each for each in ready if self._foresees(each[1].context) == foreseen]:
                logits = self._logits(hidden, [where for _, _, where in mine])
                told = children_of([fitting for _, fitting, _ in mine], logits, children)
                for (i, _, _), candidates in zip(mine, told, strict=True):
                    found[i] = candidates
        return found

    def _foresees(self, context: Context) -> bool:
        return self.foresight and context.drawn

    def _logits(self, hidden: Tensor, rows: Sequence[slice]) -> Tensor:
        """Of some rows, of the tokens that the target knows, `[k, vocab]` float32."""
        import torch  # whoever only reads settings can do without

        wanted = torch.cat([hidden[where] for where in rows])
        return self.runner.model.logits(wanted)[:, : self.vocabulary].float()

    def _likeliest(
        self, asked: Sequence[Asked], logits: Tensor, children: int
    ) -> Iterator[Candidates]:
        """The children of each sequence's nodes, by the logits after these, `[nodes, vocab]`."""
        top = logits.log_softmax(-1).topk(min(children, logits.shape[1]))
        tokens, logps = top.indices.cpu().numpy(), top.values.double().cpu().numpy()
        for each, rows in _spans(asked):
            yield Candidates(each.nodes, tokens[rows], logps[rows])

    def _foreseen(
        self, asked: Sequence[Asked], logits: Tensor, children: int
    ) -> Iterator[Candidates]:
        """The same as the target's own noise ranks them."""
        from pipespec.sampling.foresight import scores

        positions = np.concatenate([each.tree.position[each.nodes] + 1 for each in asked]).tolist()
        samplings = [each.context.sampling for each in asked for _ in each.nodes]
        tokens, scored, share = (x.cpu().numpy() for x in scores(logits, positions, samplings))
        for each, rows in _spans(asked):
            sequence, ids = each.context.sequence, each.tree.id
            self.confidence.keep(sequence, ids)
            best = self.confidence.propose(
                sequence, ids[each.nodes], tokens[rows], scored[rows], share[rows], children
            )
            yield Candidates(each.nodes, *best)


def _spans(asked: Sequence[Asked]) -> Iterator[tuple[Asked, slice]]:
    """Each with the rows of its nodes."""
    start = 0
    for each in asked:
        end = start + len(each.nodes)
        yield each, slice(start, end)
        start = end


def _fitting(asked: Asked, free: int) -> Asked:
    """With the nodes for which there are so many slots, the likeliest; the root needs none."""
    guesses = asked.nodes[asked.nodes != ROOT]
    if len(guesses) <= free:
        return asked
    kept = asked.tree.best(guesses, free)
    return replace(asked, nodes=asked.nodes[(asked.nodes == ROOT) | np.isin(asked.nodes, kept)])
