"""When a batch is due, in seconds for readability."""

from __future__ import annotations

import pytest

from pipespec.head.send_timing import EARLY, SendTiming

S = 10**9


def steady(stage_s: float, verdict_s: float, rows: int = 8) -> tuple[SendTiming, int]:
    """A pipeline whose first stage takes so long, and the verdict of a step so long."""
    timing = SendTiming()
    now = S
    for step in range(20):
        timing.add_batch(rows)
        timing.deadline(step, now, now, 0.0)
        timing.add_verdict(step, now + round(verdict_s * S))
        now += round(stage_s * S)
    timing.add_batch(rows)
    return timing, now


def test_batch_waits_for_the_verdict_before_anything_is_measured():
    timing = SendTiming()
    timing.add_batch(8)
    assert timing.deadline(0, S, S, 0.0) is None


def test_batch_is_due_at_once_after_an_empty_batch():
    timing, now = steady(0.5, 0.3)
    timing.add_batch(0)
    assert timing.deadline(20, now, now, 0.0) == now


@pytest.mark.parametrize(
    ("verdict_s", "misses", "due_s"),
    [
        (0.3, 0.0, 0.5),  # it arrives while the first stage works
        (0.9, 0.1, (1 - EARLY) * 0.5),  # it is too late to wait for
        (0.9, 1.0, 1.0),  # it is worth a longer wait with more misses
    ],
)
def test_batch_waits_for_the_verdict_as_long_as_that_is_worth_it(verdict_s, misses, due_s):
    timing, now = steady(0.5, verdict_s)
    assert abs(timing.deadline(20, now, now, misses) - (now + due_s * S)) < 2


def test_moment_by_the_clock_of_another_machine_is_ignored():
    timing, now = steady(0.5, 0.3)
    other = now - 3600 * S
    assert timing.deadline(20, other, now, 0.0) == now + round(0.5 * S)
