"""The draft model as a token source: a slice that holds all of its layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pipespec.core import Batch, Verdict
from pipespec.head.feed.policy import NOTHING
from pipespec.head.feed.rounds import check_rounds
from pipespec.head.source.calibration import Calibrated
from pipespec.head.source.confidence import Confidence
from pipespec.head.source.parallel import Parallel, best_paths
from pipespec.head.source.protocol import Asked, Candidates, Context, Encode, TokenSource
from pipespec.head.tree import ROOT
from pipespec.limits import MAX_PARALLEL, check_whole
from pipespec.sampling.grammar import as_bools

if TYPE_CHECKING:  # it imports models, which whoever only reads settings can do without
    from torch import Tensor

    from pipespec.engine.runner import SliceRunner


@dataclass(frozen=True)
class DraftModel:
    """Settings: `rounds`, how often the draft expands the tree in one pipeline step; `foresight`,
    whether it ranks what will be drawn with the target's own noise; `parallel`, how many tokens a
    parallel draft guesses per pass (None: as its checkpoint says)."""

    rounds: int | str = 2
    foresight: bool = True
    parallel: int | None = None

    def __post_init__(self) -> None:
        check_rounds(self.rounds)
        if self.parallel is not None:
            check_whole("source.parallel", self.parallel, 1, MAX_PARALLEL)

    @property
    def needs_draft(self) -> bool:
        return True

    @property
    def synthetic(self) -> bool:
        return False

    def make(self, draft: TokenSource | None, vocabulary: int, encode: Encode) -> TokenSource:
        assert draft is not None
        return Calibrated(draft)


class DraftModelSource:
    """Runs tree nodes through the draft and proposes its most probable continuations.

    The draft keeps its own KV by the same parent rule as every stage. Decided tokens that it
    has not computed (the prompt at first, later every token it failed to guess) are computed
    before the nodes that were asked for. The text of a sequence that has left stays until its slots
    are needed here, least recently used first; the head chooses who begins with whose, and what is
    not here any more is read. Where tokens are drawn, it ranks with the target's own
    noise (`pipespec.sampling.foresight`). A parallel draft also computes masks below the nodes that
    are expanded (`pipespec.head.source.parallel`) and frees them at once: nothing follows them.
    """

    def __init__(
        self,
        runner: SliceRunner,
        chunk: int,
        vocabulary: int,
        *,
        foresight: bool = True,
        max_retained: int = 0,
        parallel: Parallel | None = None,
    ):
        """`chunk`: prompt rows per pass; `vocabulary`: token ids that the target knows;
        `max_retained`: sequences that have left whose text may stay; `parallel`: if a pass guesses
        several tokens."""
        self.runner = runner
        self.chunk = chunk
        self.vocabulary = vocabulary
        self.foresight = foresight
        self.max_retained = max_retained
        self.parallel = parallel
        self.confidence = Confidence()
        # Of the marginals of each mask: the farther ahead, the less sure.
        self._ahead = [Confidence() for _ in range(parallel.masks if parallel else 0)]
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
            for back, confidence in enumerate((self.confidence, *self._ahead), 1):
                if position >= back:
                    node, token = context.nodes[position - back], context.tokens[position]
                    confidence.learn(context.sequence, node, token)

    def end(self, sequence: int) -> None:
        kept = self.runner.length(sequence) if self.max_retained else 0
        self.runner.release(sequence, kept)
        if kept:
            self._retained[sequence] = None
        if len(self._retained) > self.max_retained:
            self._forget_oldest()
        for confidence in (self.confidence, *self._ahead):
            confidence.end(sequence)
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
        wanted = min(self.chunk, sum(map(len, behind)))
        wanted += sum(len(each.nodes) * (1 + self._masks(each)) for each in asked)
        self._make_room(wanted)
        found: list[Candidates | None] = [None] * len(asked)
        parts: list[np.ndarray] = []
        masks: list[np.ndarray] = []
        ready: list[_Ready] = []
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
                tree, sequence = asked[i].tree, asked[i].context.sequence
                rows = np.concatenate((rows, tree.rows(sequence, guesses)))
                below = NOTHING
                if self.parallel is not None and self._masks(asked[i]):
                    below = self.parallel.below(tree, fitting.nodes, free)
                    masks.append(self.parallel.rows(tree, sequence, below))
                    rows = np.concatenate((rows, masks[-1]))
                    free -= len(masks[-1])
                if len(fitting.nodes):
                    end = start + len(rows)
                    ahead = np.arange(end - len(below) * self._masks(asked[i]), end)
                    ready.append(_Ready(i, fitting, below, np.concatenate((at, ahead))))
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
        if masks:
            self.runner.discard(np.concatenate(masks))
        # Those whose draws are foreseen are ranked together, and so are the others: the device is
        # waited for no more often than for one sequence.
        for foreseen, ranked in ((False, self._likeliest), (True, self._foreseen)):
            if mine := [each for each in ready if self._foresees(each.asked.context) == foreseen]:
                logits = self._logits(hidden, np.concatenate([each.rows for each in mine]))
                told = ranked(mine, self._allowed(mine, logits), children)
                for each, (tokens, logps) in zip(mine, told, strict=True):
                    found[each.place] = each.candidates(tokens, logps)
        return found

    def _masks(self, asked: Asked) -> int:
        """Rows of masks that each of the nodes could have."""
        return self.parallel.masks if self.parallel is not None and asked.deeper else 0

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

    def _allowed(self, ready: Sequence[_Ready], logits: Tensor) -> Tensor:
        """The logits without tokens that may not follow the nodes, where any may."""
        held = [(each.asked.allowed, rows.start) for each, rows in _spans(ready)]
        if all(allowed is None for allowed, _ in held):
            return logits
        import torch

        barred = np.zeros(tuple(logits.shape), bool)
        for allowed, start in held:
            if allowed is not None:
                may = as_bools(allowed, logits.shape[1])
                barred[start : start + len(may)] = ~may & may.any(1, keepdims=True)
        return logits.masked_fill(torch.from_numpy(barred).to(logits.device), -torch.inf)

    def _likeliest(
        self, ready: Sequence[_Ready], logits: Tensor, children: int
    ) -> Iterator[Ranked]:
        """What may follow each sequence's rows, by the logits after these, `[rows, vocab]`."""
        top = logits.log_softmax(-1).topk(min(children, logits.shape[1]))
        tokens, logps = top.indices.cpu().numpy(), top.values.double().cpu().numpy()
        for _, rows in _spans(ready):
            yield tokens[rows], logps[rows]

    def _foreseen(self, ready: Sequence[_Ready], logits: Tensor, children: int) -> Iterator[Ranked]:
        """The same as the target's own noise ranks them."""
        from pipespec.sampling.foresight import scores

        positions = np.concatenate([each.positions for each in ready]).tolist()
        samplings = [each.asked.context.sampling for each in ready for _ in each.rows]
        tokens, scored, share = (x.cpu().numpy() for x in scores(logits, positions, samplings))
        for each, rows in _spans(ready):
            sequence, ids = each.asked.context.sequence, each.asked.tree.id
            count = len(each.asked.nodes)
            parts = [(self.confidence, each.asked.nodes, slice(rows.start, rows.start + count))]
            parts += [
                (confidence, each.below, slice(rows.start + count + i, rows.stop, len(self._ahead)))
                for i, confidence in enumerate(self._ahead if len(each.below) else ())
            ]
            best = []
            for confidence, nodes, mine in parts:
                confidence.keep(sequence, ids)
                best.append(
                    confidence.propose(
                        sequence, ids[nodes], tokens[mine], scored[mine], share[mine], children
                    )
                )
            told, logps = (
                np.concatenate([first, *(_row_by_row(ahead))])
                for first, *ahead in zip(*best, strict=True)
            )
            yield told, logps


# What may follow some rows, the likeliest first: tokens and log-probabilities, `[rows, n]`.
Ranked = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, slots=True)
class _Ready:
    """Who is answered in a pass: what was asked in its `place`, as far as it fits, which of the
    nodes have masks `below`, and the `rows` of the pass: of the nodes, then of the masks, node by
    node."""

    place: int
    asked: Asked
    below: np.ndarray
    rows: np.ndarray

    @property
    def masks(self) -> int:
        """Rows of each node that has some."""
        return (len(self.rows) - len(self.asked.nodes)) // max(len(self.below), 1)

    @property
    def positions(self) -> np.ndarray:
        """Where the tokens stand that the rows tell of."""
        position = self.asked.tree.position
        ahead = position[self.below, None] + np.arange(2, 2 + self.masks)
        return np.concatenate((position[self.asked.nodes] + 1, ahead.ravel()))

    def candidates(self, tokens: np.ndarray, logps: np.ndarray) -> Candidates:
        """What the rows tell, `[rows, n]`, as children of the nodes and guesses further below."""
        nodes, count = self.asked.nodes, len(self.asked.nodes)
        paths = None
        if len(self.below):
            shape = (count, self.masks, tokens.shape[1])
            told, stated = np.zeros(shape, np.int64), np.full(shape, -np.inf)
            has = np.isin(nodes, self.below)
            told[has] = tokens[count:].reshape(-1, *shape[1:])
            stated[has] = logps[count:].reshape(-1, *shape[1:])
            cum = self.asked.tree.cum[nodes]
            paths = best_paths(cum, logps[:count], told, stated, self.asked.deeper)
        return Candidates(nodes, tokens[:count], logps[:count], paths)


def _row_by_row(levels: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Of the marginals of each level, `[nodes, n]`, those of all, node by node, `[rows, n]`."""
    return [np.stack(levels, 1).reshape(-1, levels[0].shape[1])] if levels else []


def _spans(ready: Sequence[_Ready]) -> Iterator[tuple[_Ready, slice]]:
    """Each with its rows among those of all."""
    start = 0
    for each in ready:
        end = start + len(each.rows)
        yield each, slice(start, end)
        start = end
