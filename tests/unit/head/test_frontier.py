"""The default policy is as fast beside fixed ones as the stored frontier says."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import pytest

from benchmarks.pipeline.frontier import DECIDING, DEFAULT, FIXED, MOST_TOKENS, Cell, stored

SEEDS, LEAST_TOKENS = (11, 12), 600
# How much of a ratio is chance on two texts, which both policies decode.
NOISE = 0.06


def test_stored_ratios_are_within_their_intervals():
    rows = stored()
    assert len({Cell.of(row) for row in rows}) == len(rows) > 50
    assert all(row["over_best_low"] <= row["over_best"] + 1e-9 for row in rows)


@pytest.mark.long
@pytest.mark.parametrize("row", stored(), ids=lambda row: str(Cell.of(row)))
def test_default_keeps_its_ratio_to_the_best_fixed_policy(row: dict[str, Any]):
    cell = Cell.of(row)
    tokens = max(LEAST_TOKENS, min(DECIDING * cell.requests, MOST_TOKENS))
    default, best = (
        fmean(cell.ms_per_token(policy, seed, tokens) for seed in SEEDS)
        for policy in (DEFAULT, FIXED[row["best"]])
    )
    assert best / default > min(row["over_best"], 1.0) - NOISE
