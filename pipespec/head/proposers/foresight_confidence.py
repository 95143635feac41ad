"""The confidence of a draft in tokens that it ranks with the target's noise, learnt while decoding.

`pipespec.sampling.shared_noise` scores tokens. How likely a lead in score makes a token depends on
how near the draft is to the target, which is not known. The stated probabilities are

    softmax(sharpness * scores)

and every decided token moves `sharpness` along the gradient of the log-likelihood. It is limited,
as a draft that equals the target but for rounding would let it grow without end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from pipespec.head.proposers.node_records import drop_pruned

# The learning rate of the logarithm of the sharpness, the largest slope, and the limits.
RATE = 0.03
STEEPEST = 3.0
LEAST, MOST = math.log(0.2), math.log(20.0)


@dataclass(frozen=True, slots=True)
class _Scored:
    """What was proposed below a node: tokens and their scores `[children]`, falling, the expected
    score of the target's token, and the probability that it has a score."""

    tokens: np.ndarray
    scores: np.ndarray
    expected: float
    share: float


@dataclass
class ForesightConfidence:
    """The sharpness of one proposer, over all of its sequences."""

    sharpness: float = 1.0
    _scored: dict[int, dict[int, _Scored]] = field(default_factory=dict)

    def rank(
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
            nodes: ids of the parents, `[k]`.
            tokens, scores: `[k, n]`.
            share: the probability that the target's token is among them, `[k]`.
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
            # Copies, as the rows are long.
            scored[node] = _Scored(
                tokens[i, kept].copy(), scores[i, kept].copy(), float(expected[i]), float(share[i])
            )
        with np.errstate(divide="ignore"):  # a token too far behind is no candidate
            return tokens[:, kept], np.log(share[:, None] * stated[:, kept])

    def learn(self, sequence: int, node: int, token: int) -> None:
        """Learn from `token`, which was decided after `node`."""
        scored = self._scored.get(sequence, {}).pop(node, None)
        if scored is None:
            return
        place = np.flatnonzero(scored.tokens == token)
        # A token that was not proposed scores below the last one that was, if it has a score.
        score, weight = scored.scores[-1], scored.share
        if len(place):
            score, weight = scored.scores[place[0]], 1.0
        slope = self.sharpness * (float(score) - scored.expected)
        if not math.isfinite(slope):
            return
        step = RATE * weight * min(max(slope, -STEEPEST), STEEPEST)
        self.sharpness = math.exp(min(max(math.log(self.sharpness) + step, LEAST), MOST))

    def drop_pruned(self, sequence: int, nodes: np.ndarray) -> None:
        """Drop the records of nodes other than these, once they are the majority."""
        drop_pruned(self._scored.get(sequence, {}), nodes)

    def end_sequence(self, sequence: int) -> None:
        self._scored.pop(sequence, None)
