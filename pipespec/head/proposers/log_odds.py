"""Conversions between probabilities and log-odds."""

from __future__ import annotations

import numpy as np

# Probabilities are limited to [LEAST, 1 - LEAST].
LEAST = 1e-9


def between(numbers: np.ndarray, least: float, most: float) -> np.ndarray:
    """`np.clip`, which is slower for short arrays."""
    return np.minimum(np.maximum(numbers, least), most)


def log_odds(probability: np.ndarray) -> np.ndarray:
    probability = between(probability, LEAST, 1 - LEAST)
    return np.log(probability / (1 - probability))


def from_odds(logarithm: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logarithm))
