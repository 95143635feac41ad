"""The test of late features: what its head may see, what is counted, and how it is decided."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tools.late_features import Head, counts, decision

NAN = np.nan


@pytest.mark.parametrize("features", [True, False])
def test_a_base_sees_features_up_to_itself_and_tokens_up_to_its_step(features: bool) -> None:
    torch.manual_seed(0)
    head = Head(16, 2, 24, features=features)
    known, embedded = torch.randn(6, 48), torch.randn(9, 16)
    before = torch.stack([*head(known, embedded, 3)])
    later, base = known.clone(), 2
    later[base + 1 :] += 1.0
    for step in (1, 2, 3):
        tokens = embedded.clone()
        tokens[base + step + 1 :] += 1.0
        after = torch.stack([*head(later, tokens, 3)])
        torch.testing.assert_close(after[:step, base], before[:step, base])
    sooner = known.clone()
    sooner[base] += 1.0
    changed = torch.stack([*head(sooner, embedded, 3)])
    assert torch.equal(changed[:, base], before[:, base]) is not features


def test_counts_are_of_all_of_survivors_and_after_a_miss() -> None:
    found = counts(np.array([[1.0, 0.0, 1.0], [0.0, 1.0, NAN], [1.0, NAN, NAN]]))
    assert found["all"].tolist() == [[2, 1, 1], [3, 2, 1]]
    assert found["survivors"].tolist() == [[2, 0, 0], [3, 1, 0]]
    assert found["after a surprise"].tolist() == [[1, 0, 0], [1, 0, 0]]


@pytest.mark.parametrize(
    ("first", "later", "surprised", "added", "said"),
    [
        (0.6, 0.6, 0.5, 0.02, "the test does not count"),
        (0.6, 0.54, 0.5, 0.1, "no"),
        (0.6, 0.6, 0.35, 0.1, "no"),
        (0.6, 0.56, 0.44, 0.1, "between"),
        (0.6, 0.56, 0.46, 0.1, "yes"),
    ],
)
def test_thresholds_decide(
    first: float, later: float, surprised: float, added: float, said: str
) -> None:
    names = ("A(1)", "survivors(8)", "after a surprise", "added by features")
    figures = (first, later, surprised, added)
    found = {name: {"value": value} for name, value in zip(names, figures, strict=True)}
    assert decision(found).startswith(said)
