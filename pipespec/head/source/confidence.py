"""How sure a draft may be of guesses that it ranks with the target's noise, learnt as it goes.

`pipespec.sampling.foresight` scores tokens; how far ahead a token must be to be likely depends on
how near the draft is to the target, which is not known. Stated are the probabilities

    softmax(sharpness * scores)

and `sharpness` follows the text: every decided token moves it along the gradient of the
log-likelihood. A draft that equals the target but for rounding would make it endless.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from pipespec.head.source.protocol import forget

# How far one token moves the logarithm of the sharpness, and how far it goes in all.
RATE = 0.03
STEEPEST = 3.0
LEAST, MOST = math.log(0.2), math.log(20.0)


@dataclass(frozen=True, slots=True)
class _Scored:
    """What was proposed below a node: tokens and their scores `[children]`, falling, the score
    that was to be expected of the target's token, and how likely it had a score at all."""

    tokens: np.ndarray
    scores: np.ndarray
    expected: float
    share: float


@dataclass
class Confidence:
    """The sharpness of one source, over all of its sequences."""

    sharpness: float = 1.0
    _scored: dict[int, dict[int, _Scored]] = field(default_factory=dict)

    def propose(
        self,
        sequence: int,
        nodes: np.ndarray,
        tokens: np.ndarray,
        scores: np.ndarray,
        share: np.ndarray,
        children: int,
    ) -> tuple[np.ndarray, np.ndarray]:
        """The best `children` of the scored tokens and their log-probabilities, `[k, children]`.

        Args:
            nodes: ids of the nodes whose children they are, `[k]`.
            tokens, scores: `[k, n]`.
            share: how likely the target's token is among them, `[k]`.
        """
        order = np.argsort(-scores, axis=1, kind="stable")
        tokens = np.take_along_axis(tokens, order, 1)
        scores = np.take_along_axis(scores, order, 1)
        weights = np.exp(self.sharpness * (scores - scores[:, :1]))
        stated = weights / weights.sum(1, keepdims=True)
        expected = (stated * np.where(stated > 0, scores, 0.0)).sum(1)
        kept = slice(min(children, tokens.shape[1]))
        scored = self._scored.setdefault(sequence, {})
        for i, node in enumerate(nodes.tolist()):
            # Copies, for the rest of a row is long.
            scored[node] = _Scored(
                tokens[i, kept].copy(), scores[i, kept].copy(), float(expected[i]), float(share[i])
            )
        with np.errstate(divide="ignore"):  # what is too far behind is no candidate
            return tokens[:, kept], np.log(share[:, None] * stated[:, kept])

    def learn(self, sequence: int, node: int, token: int) -> None:
        """`token` was decided after `node`."""
        scored = self._scored.get(sequence, {}).pop(node, None)
        if scored is None:
            return
        place = np.flatnonzero(scored.tokens == token)
        # A token that was not proposed lay behind the last one that was, if it had a score at all.
        score, weight = scored.scores[-1], scored.share
        if len(place):
            score, weight = scored.scores[place[0]], 1.0
        slope = self.sharpness * (float(score) - scored.expected)
        if not math.isfinite(slope):
            return
        step = RATE * weight * min(max(slope, -STEEPEST), STEEPEST)
        self.sharpness = math.exp(min(max(math.log(self.sharpness) + step, LEAST), MOST))

    def keep(self, sequence: int, nodes: np.ndarray) -> None:
        """Forget what was proposed below other nodes than these, once that is the most."""
        forget(self._scored.get(sequence, {}), nodes)

    def end(self, sequence: int) -> None:
        """The sequence is over."""
        self._scored.pop(sequence, None)
