"""Verification: which tokens follow, and so which draft tokens are accepted (design: losslessness).

The target alone decides every token: its arg-max, or a draw from its own distribution with
randomness keyed by (seed, position). Only then the verifier looks whether the tree contains that
token, so that the logits after it are in the batch too. So the tree changes when a token is
decided, never which; the lossy rules (`pipespec.sampling.sampling_state`) are the exceptions.

A draw depends on the text before it, so the tokens of a sequence are drawn one after the other. All
sequences are drawn together, so the host waits for the device as often as the longest accepted path
has tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pipespec.core import GRAMMAR, NOT_FINITE, TokenLogprobs
from pipespec.sampling.distribution import logprobs, select_rows
from pipespec.sampling.draw import draw
from pipespec.sampling.sampling_state import SamplingState
from pipespec.system.device_copy import to_host


class AcceptedPath:
    """The accepted path of one sequence through the rows of a batch.

    Attributes:
        row: the row whose logits decide the next token; None: the path has ended. One that is left
            after `verify_batch` waits for a grammar's mask.
        tokens: those decided, one more than the accepted draft tokens; none if the tip is not in
            the batch.
        logprobs: of these tokens, if requested.
        failure: why the next token cannot be decided: GRAMMAR or NOT_FINITE, as in `Verdict`.
    """

    def __init__(
        self, tip: int, nodes: Sequence[int], parents: Sequence[int], row_tokens: Sequence[int]
    ):
        """`tip`: node id of the last committed row; the others are of the sequence's rows of the
        batch, `[rows]`."""
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.failure: str | None = None
        self.nodes = nodes
        self.row: int | None = nodes.index(tip) if tip in nodes else None
        self._row_of = {key: row for row, key in enumerate(zip(parents, row_tokens, strict=True))}

    def append(self, token: int) -> None:
        """Add the decided token, and continue at its row if the batch has one."""
        assert self.row is not None
        self.tokens.append(token)
        self.row = self._row_of.get((self.nodes[self.row], token))

    def fail(self, why: str) -> None:
        self.row, self.failure = None, why


# A sequence of the batch.
Part = tuple[SamplingState, AcceptedPath]


def verify_batch(parts: Sequence[Part], logits: Tensor) -> None:
    """Extend every path as far as the batch allows, and move the sampling states with them.

    `logits` `[rows, vocab]` are of the rows of all paths, path by path. Rows off the accepted paths
    cost an arg-max at most. A path fails if the logits that choose its next token are not finite;
    tokens that a grammar or a bias bars do not count.
    """
    first_row, row = {}, 0
    for state, path in parts:
        first_row[path], row = row, row + len(path.nodes)
        if state.prompt_failed:
            path.fail(NOT_FINITE)
    greedy = [each for each in parts if each[0].sampling.is_plain_greedy]
    rows = [first_row[path] + i for _, path in greedy for i in range(len(path.nodes))]
    if rows:
        best = select_rows(logits, rows).max(-1)
        verify_plain_greedy(greedy, best.values, best.indices)
    others = [each for each in parts if not each[0].sampling.is_plain_greedy]
    while others := [(state, path) for state, path in others if _continues(state, path)]:
        rows = [first_row[path] + path.row for _, path in others if path.row is not None]
        _decide_next(others, select_rows(logits, rows))


def verify_plain_greedy(parts: Sequence[Part], values: Tensor, tokens: Tensor) -> None:
    """The same for paths that are decided by the arg-max of unadjusted logits, given the largest
    logit of each of their rows and its token, `[rows]`."""
    best = iter(_finite(values, tokens))
    for state, path in parts:
        if state.prompt_failed:
            path.fail(NOT_FINITE)
        by_row = [next(best) for _ in path.nodes]
        while path.row is not None:
            token = by_row[path.row]
            if token is None:
                path.fail(NOT_FINITE)
            else:
                path.append(token)
        state.length += len(path.tokens)


def _continues(state: SamplingState, path: AcceptedPath) -> bool:
    """Whether the next token of a path is to be decided now; it waits for the mask otherwise."""
    if path.row is None:
        return False
    if state.update_allowed():
        return True
    if state.failure is not None:
        path.fail(GRAMMAR)
    return False


def _decide_next(parts: Sequence[Part], logits: Tensor) -> None:
    """Decide the next token of every path, given its logits `[paths, vocab]`."""
    tokens = _choose(parts, logits)
    _add_logprobs(parts, logits, tokens)
    for (state, path), token in zip(parts, tokens, strict=True):
        if token is None:
            path.fail(NOT_FINITE)
            continue
        state.append(token)
        path.append(token)
        if token in state.eos:
            path.row = None


def _choose(parts: Sequence[Part], logits: Tensor) -> list[int | None]:
    """The next token of every path, by its lossy rule, arg-max or draw; None: the logits are not
    finite."""
    scores = logits.to(torch.float64, copy=True)
    tokens: list[int | None] = [None] * len(parts)
    undecided = []
    for i, (state, path) in enumerate(parts):
        original = scores[i]
        adjusted = state.adjust(original)
        if adjusted is not original:
            scores[i] = adjusted
        assert path.row is not None
        chosen = state.lossy_choice(path.nodes[path.row], adjusted)
        if chosen is None:
            undecided.append(i)
        elif bool(adjusted.amax().isfinite()):
            tokens[i] = chosen
    samplings = [state.sampling for state, _ in parts]
    if greedy := [i for i in undecided if samplings[i].temperature == 0]:
        best = select_rows(scores, greedy).max(-1)
        for i, token in zip(greedy, _finite(best.values, best.indices), strict=True):
            tokens[i] = token
    if drawn := [i for i in undecided if samplings[i].temperature > 0]:
        positions = [parts[i][0].length for i in drawn]
        found = draw(select_rows(scores, drawn), [samplings[i] for i in drawn], positions)
        for i, token in zip(drawn, found, strict=True):
            tokens[i] = token
    return tokens


def _add_logprobs(parts: Sequence[Part], logits: Tensor, tokens: list[int | None]) -> None:
    """Add the log-probabilities of the tokens to the paths that want them. A token becomes None
    where its log-probability is not finite."""
    wanted = [
        (i, token, count)
        for i, ((state, _), token) in enumerate(zip(parts, tokens, strict=True))
        if (count := state.sampling.logprobs) is not None and token is not None
    ]
    if not wanted:
        return
    rows, chosen, counts = zip(*wanted, strict=True)
    found = logprobs(select_rows(logits, rows), chosen, max(counts))
    for i, count, of_token in zip(rows, counts, found, strict=True):
        if math.isfinite(of_token.logprob):
            parts[i][1].logprobs.append(replace(of_token, top=of_token.top[:count]))
        else:  # only what was barred has no finite logit
            tokens[i] = None


def _finite(values: Tensor, tokens: Tensor) -> list[int | None]:
    """The tokens whose logits are finite, else None, as where a row has a NaN."""
    # NumPy has no bfloat16.
    found = zip(*(each.tolist() for each in to_host(values.double(), tokens)), strict=True)
    return [token if math.isfinite(value) else None for value, token in found]
