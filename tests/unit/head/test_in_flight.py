"""How many batches are in flight, and how many keep a pipeline busy; moments in milliseconds."""

import pytest

from pipespec.head.in_flight import MOST_IN_FLIGHT, InFlight

MS = 10**6


def after(num_stages: int, pass_ms: float) -> InFlight:
    """A pipeline through which some batches have passed, one at a time."""
    batches = InFlight(num_stages)
    for step in range(4):
        batches.add_batch(step, 0)
        batches.add_verdict(step, round((pass_ms + step) * MS))
    return batches


@pytest.mark.parametrize(
    ("num_stages", "pass_ms", "step_ms", "depth"),
    [
        (4, 20, 5, 4),  # the stages alone
        (4, 45, 5, 4),  # not surely more than twice as long
        (4, 55, 5, 8),  # links of 7 ms
        (4, 110, 5, 16),  # links of 20 ms
        (1, 110, 5, 16),
        (4, 24, 0.1, 4),  # messages wait for processes
        (4, 10**4, 5, MOST_IN_FLIGHT),
        (40, 10**4, 5, 40),  # never fewer than there are stages
        (4, 110, 0, 4),  # unknown
    ],
)
def test_depth_is_that_of_a_pass_by_its_slowest_part(
    num_stages: int, pass_ms: float, step_ms: float, depth: int
):
    assert after(num_stages, pass_ms).depth(step_ms) == depth


def test_a_queue_and_batches_that_are_not_measured_do_not_count_as_length():
    batches = after(4, 20)
    for step in range(4, 40):
        batches.add_batch(step, 0, measured=step % 2 == 1)
        batches.add_verdict(step, (200 if step % 2 else 1) * MS)
    assert batches.depth(5) == 4


def test_waiting_for_requests_is_no_part_of_a_pass():
    batches = after(4, 20)
    known = batches.interval_ms(4)
    batches.add_batch(4, 0)
    batches.pause()
    batches.add_verdict(4, 60_000 * MS)
    assert (len(batches), batches.interval_ms(4)) == (0, known)


def test_batches_are_spread_over_a_pass():
    assert after(4, 98.5).interval_ms(10) == pytest.approx(10)
    assert InFlight(4).interval_ms(10) == 0
