"""What several sources together make of a guess: logistic mixing, as in PAQ (Mahoney, "Adaptive
weighing of context models", 2005).

The log-odds that each source states are weighed and added. The weights are learnt, by the gradient
of the logarithmic loss; guesses that only some of the sources name have weights of their own.
"""

from __future__ import annotations

import numpy as np

from pipespec.head.source.odds import from_odds, log_odds

# What a source states of a guess that it does not name.
UNNAMED = 0.003
RATE = 0.01


class Mixture:
    """The weights of so many sources; until something was learnt those that name a guess have equal
    shares in it."""

    def __init__(self, sources: int):
        named = np.arange(1 << sources)[:, None] >> np.arange(sources) & 1
        # By which sources name a guess, as bits: a weight for each, and what is added to the sum.
        self._weights = np.zeros((1 << sources, sources + 1))
        self._weights[:, :-1] = named / np.maximum(named.sum(1, keepdims=True), 1)
        self._bits = 1 << np.arange(sources)

    def of(self, stated: np.ndarray) -> np.ndarray:
        """The probabilities `[k]` of guesses of which the sources stated `[k, sources]`; 0: not
        named."""
        odds, who = self._inputs(stated)
        return from_odds((odds * self._weights[who]).sum(1))

    def learn(self, stated: np.ndarray, hits: np.ndarray) -> None:
        """Which of the guesses of one node came, bool `[k]`."""
        odds, who = self._inputs(stated)
        wrong = hits - from_odds((odds * self._weights[who]).sum(1))
        np.add.at(self._weights, who, RATE * wrong[:, None] * odds)

    def _inputs(self, stated: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        odds = np.ones((len(stated), stated.shape[1] + 1))
        odds[:, :-1] = log_odds(np.maximum(stated, UNNAMED))
        return odds, (stated > 0) @ self._bits
