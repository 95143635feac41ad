"""What the last stage accepts (design: losslessness).

The target alone decides every token: its arg-max, or a draw from its own distribution with
randomness keyed by (seed, position). Only then is it asked whether the tree guessed that
token, i.e. whether the decision after it was computed already. So the tree changes when a
token is known, never which; the lossy rules are the exceptions, and say so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pipespec.core import Request, Sampling, TokenLogprobs
from pipespec.sampling.distribution import Tally, adjust, distribution, logprobs
from pipespec.sampling.draw import draw


class Verifier:
    """Decides the tokens of one request, at the last stage.

    It keeps the length of the text and, if there are penalties, its tally. All tokens that it
    decides join the text, so both only ever move forward.

    Args:
        request: what was asked for.
        answer: what was accepted before this verifier existed (after a failure), in order.
    """

    def __init__(self, request: Request, answer: Sequence[int] = ()):
        self.sampling = request.sampling
        self.length = len(request.prompt) + len(answer)
        self._text = (request.prompt, tuple(answer))
        self._tally: Tally | None = None

    def decide(
        self,
        tip: int,
        nodes: Sequence[int],
        parents: Sequence[int],
        guesses: Sequence[int],
        logits: torch.Tensor,
    ) -> tuple[list[int], list[TokenLogprobs]]:
        """The tokens that follow the tip, as far as this batch tells, and their log-probabilities.

        Args:
            tip, nodes, parents, guesses: see `walk`.
            logits: of the batch's rows, `[rows, vocab]`.

        Rows off the accepted path cost an arg-max at most: what is drawn depends on the text
        before it, so it is drawn only once that text is decided.
        """
        reports: list[TokenLogprobs] = []
        if self.sampling.plain:
            tokens = walk(tip, nodes, parents, guesses, logits.argmax(-1).tolist().__getitem__)
            self.length += len(tokens)
            return tokens, reports

        def draw_after(row: int) -> int:
            children = [
                guess
                for parent, guess in zip(parents, guesses, strict=True)
                if parent == nodes[row] and self.sampling.lossy
            ]
            token = self._next(logits[row], children)
            if self.sampling.logprobs is not None:
                reports.append(logprobs(logits[row], token, self.sampling.logprobs))
            return token

        return walk(tip, nodes, parents, guesses, draw_after), reports

    def _next(self, logits: torch.Tensor, guesses: Sequence[int]) -> int:
        """Decide one token from its logits `[vocab]`; the text then ends with it."""
        sampling = self.sampling
        if sampling.penalises and self._tally is None:
            self._tally = Tally(*self._text, len(logits), logits.device)
        scores = adjust(logits, sampling, self._tally)
        token = None
        if guesses:
            token = acceptable(distribution(scores, sampling), guesses, sampling)
        if token is None and sampling.temperature == 0:
            token = int(scores.argmax())
        if token is None:
            token = draw(distribution(scores, sampling), sampling.seed, self.length)
        if self._tally is not None:
            self._tally.append(token)
        self.length += 1
        return token


def acceptable(logprobs: torch.Tensor, guesses: Sequence[int], sampling: Sampling) -> int | None:
    """The most probable of the guesses that the lossy rule accepts, or None.

    A guess is accepted if fewer than `accept_top` tokens are more probable and its probability
    is at least `accept_ratio` of the highest, both in the distribution that a token would be
    drawn from, `logprobs` `[vocab]`.
    """
    best = max(guesses, key=lambda guess: (float(logprobs[guess]), -guess))
    value = logprobs[best]
    rank = int((logprobs > value).sum())
    # exp of a difference, so that a guess that cannot be drawn (-inf) has no probability.
    ratio = float(torch.exp(value - logprobs.max()))
    accepted = rank < sampling.accept_top and ratio > 0 and ratio >= sampling.accept_ratio
    return best if accepted else None


def walk(
    tip: int,
    nodes: Sequence[int],
    parents: Sequence[int],
    guesses: Sequence[int],
    draw_after: Callable[[int], int],
) -> list[int]:
    """The tokens that follow the tip, as far as this batch tells.

    Args:
        tip: node id of the last committed row.
        nodes, parents, guesses: the batch's rows `[rows]`; a guess is a row's token.
        draw_after: the token that follows a row, given its index; called along the path only.

    Returns the drawn tokens along the successor chain: empty if the tip is not in the batch,
    else one more than the number of guesses that were right.
    """
    row_of = {node: i for i, node in enumerate(nodes)}
    row_by_guess = {guess: i for i, guess in enumerate(zip(parents, guesses, strict=True))}
    accepted: list[int] = []
    row = row_of.get(tip)
    while row is not None:
        accepted.append(draw_after(row))
        row = row_by_guess.get((nodes[row], accepted[-1]))
    return accepted
