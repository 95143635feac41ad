"""How long batches take by their rows, as averages of what was measured."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipespec.timing.batch_times import (
    BatchTimes,
    LinearTimes,
    RowTimes,
    merge_times,
    pack,
    size_bucket,
    unpack,
)


def measured(*batches: tuple[int, float]) -> RowTimes:
    times = RowTimes()
    for rows, ms in batches:
        times.add(rows, ms)
    return times


def test_batches_up_to_a_power_of_two_are_averaged_together():
    times = measured((1, 5.0), (6, 8.0), (8, 10.0), (64, 20.0), (65, 40.0))
    assert times.points() == ((1, 5.0), (7, 9.0), (64, 20.0), (65, 40.0))


@given(st.lists(st.tuples(st.integers(1, 500), st.floats(0.1, 99.0)), min_size=1))
def test_more_rows_never_count_as_cheaper(batches: list[tuple[int, float]]):
    told = measured(*batches).measured()
    points = told.points
    assert [rows for rows, _ in points] == sorted({rows for rows, _ in points})
    assert [ms for _, ms in points] == sorted(ms for _, ms in points)
    assert merge_times([told, told]).points == points
    for (rows, ms), (same, known) in zip(unpack(pack(told)).points, points, strict=True):
        assert (rows, ms) == (same, pytest.approx(known, rel=1e-5))


def test_merged_times_have_the_sizes_of_every_stage():
    first = measured((64, 30.0)).measured()
    last = measured((2, 4.0), (60, 50.0)).measured()
    assert merge_times([first, last, BatchTimes()]).points == ((2, 4.0), (62, 40.0))
    assert [size_bucket(rows) for rows in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]
    assert merge_times([]) == unpack(pack(BatchTimes())) == BatchTimes()


def test_batch_through_several_stages_takes_the_sum_of_their_times():
    of_stage = BatchTimes(((1, 5.0), (64, 20.0)), slot_ms=0.5, slots=100)
    assert of_stage.scaled(3) == BatchTimes(((1, 15.0), (64, 60.0)), slot_ms=1.5, slots=100)
    assert of_stage.scaled(1) == of_stage


@pytest.mark.parametrize(
    ("row_ms", "slot_ms", "found"),
    [(0.0, 0.002, 0.002), (0.5, 0.002, 0.002), (0.5, 0.0, 0.0)],
    ids=["slots", "rows and slots", "rows alone"],
)
def test_slot_cost_is_separated_from_row_cost(row_ms, slot_ms, found):
    rng = np.random.default_rng(0)
    times = RowTimes()
    for _ in range(200):
        rows = int(rng.integers(17, 65))
        slots = rows * 50 + int(rng.integers(0, 4000))  # more rows mostly read more
        times.add(rows, 20 + row_ms * rows + slot_ms * slots + rng.normal(0, 0.5), slots)
    assert times.measured().slot_ms == pytest.approx(found, rel=0.05)
    assert unpack(pack(times.measured())).slot_ms == pytest.approx(found, rel=0.05)


def test_rounding_noise_gives_no_slot_cost():
    rng = np.random.default_rng(0)
    times = RowTimes()
    for _ in range(500):
        rows = int(rng.integers(17, 65))
        times.add(rows, 20 + rows / 3, rows * 50 + int(rng.integers(0, 4000)))
        assert times.measured().slot_ms == 0


def test_a_size_that_was_slow_once_does_not_make_larger_ones_slow():
    """Such as one that was measured while other ranks loaded."""
    times = RowTimes()
    times.add(4, 300.0)
    for _ in range(63):
        times.add(14, 30.0)
    points = dict(times.points())
    assert points[4] == points[14] == pytest.approx(30 + 270 / 64)


@given(st.lists(st.tuples(st.integers(1, 300), st.floats(0.1, 1e3)), min_size=1, max_size=60))
def test_times_rise_with_rows_and_keep_their_mean(samples):
    times = RowTimes()
    for rows, ms in samples:
        times.add(rows, ms)
    points = times.points()
    assert [ms for _, ms in points] == sorted(ms for _, ms in points)
    assert min(ms for _, ms in samples) <= points[0][1] * (1 + 1e-9)
    assert points[-1][1] <= max(ms for _, ms in samples) * (1 + 1e-9)


@pytest.mark.parametrize(("each_ms", "found"), [(12.0, 12.0), (0.0, 0.0), (-3.0, 0.0)])
def test_what_one_more_takes_is_separated_from_the_rest(each_ms: float, found: float):
    times = LinearTimes()
    for count in (1, 4, 2, 8, 1, 3) * 20:
        times.add(count, 60 + each_ms * count)
    assert times.each_ms == pytest.approx(found, abs=0.01)
