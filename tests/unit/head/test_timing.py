"""When a batch is due, told in seconds for readability."""

from __future__ import annotations

from pipespec.head.timing import EARLY, SendTiming

S = 10**9


def steady(stage_s: float, verdict_s: float, rows: int = 8) -> tuple[SendTiming, int]:
    """A pipeline whose first stage takes so long, and the verdict of a step so long."""
    timing = SendTiming()
    now = S
    for step in range(20):
        timing.sent(rows)
        timing.due(step, now, now, 0.0)
        timing.heard(step, now + round(verdict_s * S))
        now += round(stage_s * S)
    timing.sent(rows)
    return timing, now


def test_before_anything_is_known_it_waits_for_the_verdict():
    timing = SendTiming()
    timing.sent(8)
    assert timing.due(0, S, S, 0.0) is None


def test_behind_an_empty_batch_the_first_stage_is_free_at_once():
    timing, now = steady(0.5, 0.3)
    timing.sent(0)
    assert timing.due(20, now, now, 0.0) == now


def test_a_verdict_that_comes_while_the_first_stage_works_is_waited_for():
    timing, now = steady(0.5, 0.3)
    assert timing.due(20, now, now, 0.0) == now + round(0.5 * S)


def test_a_verdict_that_comes_too_late_is_not():
    timing, now = steady(0.5, 0.9)
    due = timing.due(20, now, now, 0.1)
    assert abs(due - (now + (1 - EARLY) * 0.5 * S)) < 2


def test_misses_make_it_worth_waiting():
    timing, now = steady(0.5, 0.9)
    assert timing.due(20, now, now, 1.0) == now + S


def test_another_machines_clock_is_not_believed():
    timing, now = steady(0.5, 0.3)
    other = now - 3600 * S
    assert timing.due(20, other, now, 0.0) == now + round(0.5 * S)
