"""When requests are handed in, at a rate and never too many at once."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from pipespec.errors import ConfigError
from pipespec.extras.bench.arrivals import Load


def test_without_a_rate_all_are_due_at_once() -> None:
    assert Load(None).due_s(3) == [0, 0, 0]


def test_a_rate_is_exact_over_all_requests() -> None:
    due = Load(None, 4.0).due_s(50)
    assert due == sorted(due)
    assert due[0] > 0
    assert due[-1] == pytest.approx(50 / 4)


def test_gaps_are_those_of_a_poisson_process() -> None:
    due = Load(None, 5.0).due_s(20_000)
    gaps = [b - a for a, b in pairwise(due)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 5, rel=0.01)
    assert sum(gap > mean for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.01)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({}, (1, math.inf)),
        ({"concurrency": 8}, (8, math.inf)),
        ({"request_rate": 2.5}, (None, 2.5)),
        ({"request_rate": math.inf}, (None, math.inf)),
        ({"request_rate": 2.5, "concurrency": 8}, (8, 2.5)),
    ],
)
def test_one_at_a_time_unless_more_is_said(given, meant) -> None:
    load = Load.of(**given)
    assert (load.concurrency, load.request_rate) == meant


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"concurrency": 0}, "concurrency is 0"),
        ({"request_rate": 0.0}, "request_rate is 0.0, but must be a number from 1e-06 to"),
        ({"request_rate": -1}, "request_rate is -1"),
        ({"request_rate": math.nan}, "request_rate is nan"),
        ({"request_rate": -math.inf}, "1000000000, or inf"),
    ],
)
def test_a_load_that_cannot_be_is_refused(given, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        Load.of(**given)
