"""When a batch is due, in seconds for readability."""

from __future__ import annotations

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


def test_batch_waits_for_a_verdict_that_arrives_while_the_first_stage_works():
    timing, now = steady(0.5, 0.3)
    assert timing.deadline(20, now, now, 0.0) == now + round(0.5 * S)


def test_batch_does_not_wait_for_a_verdict_that_is_too_late():
    timing, now = steady(0.5, 0.9)
    due = timing.deadline(20, now, now, 0.1)
    assert abs(due - (now + (1 - EARLY) * 0.5 * S)) < 2


def test_batch_waits_longer_with_more_misses():
    timing, now = steady(0.5, 0.9)
    assert timing.deadline(20, now, now, 1.0) == now + S


def test_moment_by_the_clock_of_another_machine_is_ignored():
    timing, now = steady(0.5, 0.3)
    other = now - 3600 * S
    assert timing.deadline(20, other, now, 0.0) == now + round(0.5 * S)
