"""What the last stage accepts (design: losslessness).

The target alone decides every token: its arg-max, or a draw from its own distribution with
randomness keyed by (seed, position). Only then is it asked whether the tree guessed that
token, i.e. whether the decision after it was computed already. So the tree changes when a
token is known, never which; the lossy rules are the exceptions, and say so.

What is drawn depends on the text before it, so it is drawn only once that text is decided, one
token after the other; but of all sequences together, so that the device is waited for as often as
the longest path has tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pipespec.core import TokenLogprobs
from pipespec.sampling.distribution import logprobs
from pipespec.sampling.draw import draw
from pipespec.sampling.verifier import Verifier


class Walk:
    """The way of one sequence's text through the rows of a batch.

    Attributes:
        row: after which row's token comes next; None: the batch tells no more.
        tokens: what was decided: nothing if the tip is not in the batch, else one more than the
            number of guesses that were right.
        reports: their log-probabilities, if they are wanted.
        failed: whether the text's grammar does not tell what comes next.
    """

    def __init__(
        self, tip: int, nodes: Sequence[int], parents: Sequence[int], guesses: Sequence[int]
    ):
        """
        Args:
            tip: node id of the last committed row.
            nodes, parents, guesses: the batch's rows `[rows]`; a guess is a row's token.
        """
        self.tokens: list[int] = []
        self.reports: list[TokenLogprobs] = []
        self.failed = False
        self.nodes = nodes
        self.row: int | None = nodes.index(tip) if tip in nodes else None
        self._row_of = {guess: i for i, guess in enumerate(zip(parents, guesses, strict=True))}

    def go_on(self, token: int) -> None:
        """The next token is decided."""
        assert self.row is not None
        self.tokens.append(token)
        self.row = self._row_of.get((self.nodes[self.row], token))

    def fail(self) -> None:
        """What comes next cannot be said."""
        self.row, self.failed = None, True


def decide(asked: Sequence[tuple[Verifier, Walk]], logits: Tensor) -> None:
    """Let every walk go on as far as the batch tells; its verifier knows the text then.

    `logits` `[rows, vocab]` are of the rows of all walks, one walk's after the other's. Rows off
    the accepted paths cost an arg-max at most.
    """
    first, row = {}, 0
    for _, walk in asked:
        first[walk], row = row, row + len(walk.nodes)
    plain = [(verifier, walk) for verifier, walk in asked if verifier.sampling.plain]
    drawn = [(verifier, walk) for verifier, walk in asked if not verifier.sampling.plain]
    rows = [first[walk] + i for _, walk in plain for i in range(len(walk.nodes))]
    likeliest = iter(_rows(logits, rows).argmax(-1).tolist() if rows else ())
    for verifier, walk in plain:
        mine = [next(likeliest) for _ in walk.nodes]
        while walk.row is not None:
            walk.go_on(mine[walk.row])
        verifier.length += len(walk.tokens)
    while drawn := [(verifier, walk) for verifier, walk in drawn if _goes_on(verifier, walk)]:
        rows = [first[walk] + walk.row for _, walk in drawn if walk.row is not None]
        _go_on(drawn, _rows(logits, rows))


def _goes_on(verifier: Verifier, walk: Walk) -> bool:
    """Whether a walk's next token is to be decided."""
    if walk.row is not None and not verifier.look():
        walk.fail()
    return walk.row is not None


def _go_on(asked: Sequence[tuple[Verifier, Walk]], logits: Tensor) -> None:
    """Decide the next token of every walk, of which these are the logits `[walks, vocab]`."""
    scores = logits.to(torch.float64, copy=True)
    tokens: dict[int, int] = {}
    for i, (verifier, walk) in enumerate(asked):
        as_said = scores[i]
        wanted = verifier.adjusted(as_said)
        if wanted is not as_said:
            scores[i] = wanted
        assert walk.row is not None
        preferred = verifier.preferred(walk.nodes[walk.row], wanted)
        if preferred is not None:
            tokens[i] = preferred
    samplings = [verifier.sampling for verifier, _ in asked]
    left = [i for i in range(len(asked)) if i not in tokens]
    if greedy := [i for i in left if samplings[i].temperature == 0]:
        tokens |= zip(greedy, _rows(scores, greedy).argmax(-1).tolist(), strict=True)
    if drawn := [i for i in left if samplings[i].temperature > 0]:
        lengths = [asked[i][0].length for i in drawn]
        found = draw(_rows(scores, drawn), [samplings[i] for i in drawn], lengths)
        tokens |= zip(drawn, found, strict=True)
    if told := [(i, one.logprobs) for i, one in enumerate(samplings) if one.logprobs is not None]:
        rows, counts = zip(*told, strict=True)
        reports = logprobs(_rows(logits, rows), [tokens[i] for i in rows], max(counts))
        for i, count, report in zip(rows, counts, reports, strict=True):
            asked[i][1].reports.append(replace(report, top=report.top[:count]))
    for i, (verifier, walk) in enumerate(asked):
        verifier.append(tokens[i])
        walk.go_on(tokens[i])
        if tokens[i] in verifier.eos:
            walk.row = None


def _rows(values: Tensor, rows: Sequence[int]) -> Tensor:
    """Some of the rows; without a copy if that is all."""
    return values if len(rows) == len(values) else values[list(rows)]
