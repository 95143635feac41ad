"""Logistic mixing of what several proposers state, as in PAQ (Mahoney, "Adaptive weighing of
context models", 2005).

The log-odds that each proposer states are weighted and added. The weights are learnt by the
gradient of the logarithmic loss; there is one set of weights for each subset of the proposers, used
for the tokens that exactly these have named.
"""

from __future__ import annotations

import numpy as np

from pipespec.head.proposers.log_odds import from_odds, log_odds

# The probability of a token that a proposer does not name.
UNNAMED = 0.003
RATE = 0.01


class LogOddsMixture:
    """The weights of so many proposers; at first those that name a token have equal shares."""

    def __init__(self, num_proposers: int):
        named = np.arange(1 << num_proposers)[:, None] >> np.arange(num_proposers) & 1
        # By the subset that names a token, as bits: a weight for each proposer, and a bias.
        self._weights = np.zeros((1 << num_proposers, num_proposers + 1))
        self._weights[:, :-1] = named / np.maximum(named.sum(1, keepdims=True), 1)
        self._bits = 1 << np.arange(num_proposers)

    def mix(self, stated: np.ndarray) -> np.ndarray:
        """The probabilities `[k]` of tokens, given those that each proposer states,
        `[k, proposers]`; 0: not named."""
        odds, subset = self._inputs(stated)
        return from_odds((odds * self._weights[subset]).sum(1))

    def learn(self, stated: np.ndarray, hits: np.ndarray) -> None:
        """Learn which of the tokens below one node the target decided, bool `[k]`."""
        odds, subset = self._inputs(stated)
        error = hits - from_odds((odds * self._weights[subset]).sum(1))
        np.add.at(self._weights, subset, RATE * error[:, None] * odds)

    def _inputs(self, stated: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        odds = np.ones((len(stated), stated.shape[1] + 1))
        odds[:, :-1] = log_odds(np.maximum(stated, UNNAMED))
        return odds, (stated > 0) @ self._bits
