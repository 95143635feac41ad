"""The test of late features: what is counted, and how it is decided."""

import numpy as np
import pytest

from tools.late_features import decision
from tools.train_head import counts


def test_counts_are_of_all_of_survivors_and_after_a_miss():
    found = counts(np.array([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0], [1.0, 0.0, 0.0]]))
    assert found["all"].tolist() == [[2, 1, 2], [3, 3, 3]]
    assert found["survivors"].tolist() == [[2, 0, 0], [3, 2, 0]]
    assert found["after a surprise"].tolist() == [[1, 0, 0], [1, 1, 1]]


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
def test_thresholds_decide(first, later, surprised, added, said):
    names = ("A(1)", "survivors(8)", "after a surprise", "added by features")
    figures = (first, later, surprised, added)
    found = {name: {"value": value} for name, value in zip(names, figures, strict=True)}
    assert decision(found).startswith(said)
