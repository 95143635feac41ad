"""Probabilities as log-odds and back."""

from __future__ import annotations

import numpy as np

# Nothing is certain.
LEAST = 1e-9


def between(numbers: np.ndarray, least: float, most: float) -> np.ndarray:
    """As `np.clip`, which takes longer for few numbers."""
    return np.minimum(np.maximum(numbers, least), most)


def log_odds(probability: np.ndarray) -> np.ndarray:
    probability = between(probability, LEAST, 1 - LEAST)
    return np.log(probability / (1 - probability))


def from_odds(logarithm: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logarithm))
