"""The draft model as a token source: a slice that holds all of its layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pipespec.core import Batch, Verdict
from pipespec.head.feed.policy import NOTHING
from pipespec.head.feed.rounds import check_rounds
from pipespec.head.source.confidence import Confidence
from pipespec.head.source.protocol import Asked, Candidates, Context, TokenSource
from pipespec.head.tree import ROOT
from pipespec.sampling.grammar import as_bools

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
    before the nodes that were asked for. The text of a sequence that has left stays until its slots
    are needed here, least recently used first; the head chooses who begins with whose, and what is
    not here any more is read. Where tokens are drawn, it ranks with the target's own
    noise (`pipespec.sampling.foresight`).
    """

    def __init__(
        self,
        runner: SliceRunner,
        chunk: int,
        vocabulary: int,
        *,
        foresight: bool = True,
        max_retained: int = 0,
    ):
        """`chunk`: prompt rows per pass; `vocabulary`: token ids that the target knows;
        `max_retained`: sequences that have left whose text may stay."""
        self.runner = runner
        self.chunk = chunk
        self.vocabulary = vocabulary
        self.foresight = foresight
        self.max_retained = max_retained
        self.confidence = Confidence()
        self._contexts: dict[int, Context] = {}
        self._retained: dict[int, None] = {}  # who was used last stands last

    def begin(self, context: Context) -> None:
        self._contexts[context.sequence] = context
        shared = min(context.shared, self.runner.length(context.parent))
        self.runner.open(context.sequence, context.parent, shared)
        self._retained.pop(context.parent, None)
        if context.parent in self.runner.retained:
            self._retained[context.parent] = None
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
        kept = self.runner.length(sequence) if self.max_retained else 0
        self.runner.release(sequence, kept)
        if kept:
            self._retained[sequence] = None
        if len(self._retained) > self.max_retained:
            self._forget_oldest()
        self.confidence.end(sequence)
        del self._contexts[sequence]

    def _forget_oldest(self) -> None:
        oldest = next(iter(self._retained))
        del self._retained[oldest]
        self.runner.release(oldest)

    def _make_room(self, rows: int) -> None:
        """Have so many slots, as far as text that stays holds them."""
        while self.runner.slots.num_free < rows and self._retained:
            self._forget_oldest()

    def expand(self, asked: Sequence[Asked], children: int) -> list[Candidates | None]:
        """One pass of the draft for all sequences.

        Of decided text it reads `chunk` rows, those first who miss least of it: they are asked
        for guesses now, and a long prompt takes what they leave. Who finds no KV slot free gets
        no candidates.
        """
        behind = [each.context.rows(self.runner.length(each.context.sequence)) for each in asked]
        wanted = min(self.chunk, sum(map(len, behind))) + sum(len(each.nodes) for each in asked)
        self._make_room(wanted)
        found: list[Candidates | None] = [None] * len(asked)
        parts: list[np.ndarray] = []
        ready: list[tuple[int, Asked, np.ndarray]] = []  # who is answered, its nodes' rows
        start, left, free = 0, self.chunk, self.runner.slots.num_free
        for i in sorted(range(len(asked)), key=lambda i: len(behind[i])):
            rows = behind[i][: min(left, free)]
            left -= len(rows)
            free -= len(rows)
            if len(rows) == len(behind[i]):
                fitting, guesses = self._fitting(asked[i], free)
                assert ROOT not in fitting.nodes or len(rows), "the root was expanded"
                free -= len(guesses)
                at = start + len(rows) + np.searchsorted(guesses, fitting.nodes)
                at[fitting.nodes == ROOT] = start + len(rows) - 1
                tree_rows = asked[i].tree.rows(asked[i].context.sequence, guesses)
                rows = np.concatenate((rows, tree_rows))
                if len(fitting.nodes):
                    ready.append((i, fitting, at))
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
                fitted = [fitting for _, fitting, _ in mine]
                logits = self._logits(hidden, np.concatenate([rows for _, _, rows in mine]))
                told = children_of(fitted, self._allowed(fitted, logits), children)
                for (i, _, _), candidates in zip(mine, told, strict=True):
                    found[i] = candidates
        return found

    def _foresees(self, context: Context) -> bool:
        return self.foresight and context.drawn

    def _fitting(self, asked: Asked, free: int) -> tuple[Asked, np.ndarray]:
        """With the nodes for which there are so many slots, the likeliest; and those that are to be
        computed for them, rising: themselves, but for the root, and whatever stands above them and
        was hung there without asking the draft."""
        tree, sequence = asked.tree, asked.context.sequence
        wanted = np.zeros(len(tree), bool)
        wanted[asked.nodes] = True
        above = np.unique(tree.parent[asked.nodes])
        while len(above := above[above != ROOT]):
            held = [self.runner.holds(sequence, node) for node in tree.id[above].tolist()]
            above = above[~np.array(held)]
            wanted[above] = True
            above = np.unique(tree.parent[above])
        wanted[ROOT] = False  # its row is of the decided text
        guesses = tree.best(np.flatnonzero(wanted), max(free, 0))
        return asked.select((asked.nodes == ROOT) | np.isin(asked.nodes, guesses)), guesses

    def _logits(self, hidden: Tensor, rows: np.ndarray) -> Tensor:
        """Of some rows, of the tokens that the target knows, `[k, vocab]` float32."""
        import torch  # whoever only reads settings can do without

        wanted = hidden.index_select(0, torch.from_numpy(rows).to(hidden.device))
        return self.runner.model.logits(wanted)[:, : self.vocabulary].float()

    def _allowed(self, asked: Sequence[Asked], logits: Tensor) -> Tensor:
        """The logits without tokens that may not follow, where any may."""
        held = [(rows, each.allowed) for each, rows in _spans(asked) if each.allowed is not None]
        if not held:
            return logits
        import torch

        barred = np.zeros(tuple(logits.shape), bool)
        for rows, allowed in held:
            may = as_bools(allowed, logits.shape[1])
            barred[rows] = ~may & may.any(1, keepdims=True)
        return logits.masked_fill(torch.from_numpy(barred).to(logits.device), -torch.inf)

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
