"""Plans in a buffer that stays where it is, and what attends by them."""

import numpy as np
import torch
from hypothesis import given

from pipespec.engine.attention.attention_plan import AttentionPlan, LayerOptions, Segment
from pipespec.engine.attention.device_plan import (
    MOST_SPLITS,
    DevicePlan,
    PlanCapacity,
    TorchBackend,
)
from tests.helpers.plans import OPTIONS, explicit, given_rows, plans

NUM_SLOTS = 700


@given(plans(NUM_SLOTS))
def test_tiles_are_all_rows_each_once_and_none_of_two_segments(plan: AttentionPlan) -> None:
    capacity = PlanCapacity(1, 1, 1, 1).grown(PlanCapacity.of(plan))
    flat = DevicePlan(capacity, NUM_SLOTS, "cpu", (2, 3))
    flat.fill(plan)
    for size, (tiles, splits) in flat.tilings.items():
        covered = []
        for first_row, count, parts in tiles.tolist():
            rows_of_tile = slice(first_row, first_row + count)
            covered += range(first_row, first_row + count)
            assert count <= size
            assert flat.first[rows_of_tile].unique().numel() == (count > 0)
            assert splits[rows_of_tile].tolist() == [parts] * count
            assert (0 < parts <= MOST_SPLITS) if count else not parts
        assert covered == list(range(flat.capacity.rows))


def test_a_tile_has_programs_by_its_share_of_the_keys() -> None:
    """A long text is split among many programs, also beside short ones; no part is tiny."""

    def splits(rows: list[int], prefixes: list[int]) -> list[int]:
        slots = np.arange(sum(prefixes) + 1)
        ends = np.cumsum(prefixes)
        nothing = np.zeros(0, np.int64)
        parts = [
            Segment(
                slice(sum(rows[:i]), sum(rows[: i + 1])),
                np.full(rows[i], prefixes[i] - 1),
                slots[ends[i] - prefixes[i] : ends[i]],
                nothing,
                nothing,
                np.zeros((rows[i], 0), bool),
            )
            for i in range(len(rows))
        ]
        plan = AttentionPlan(np.zeros(sum(rows), np.int64), parts)
        flat = DevicePlan(PlanCapacity.of(plan), len(slots), "cpu", (8,))
        flat.fill(plan)
        return flat.tilings[8].splits[np.cumsum(rows) - 1].tolist()

    assert splits([1], [4000]) == [16]
    assert splits([1], [100]) == [2]
    assert splits([64], [4000]) == [4]
    assert splits([1] * 64, [4000] * 64) == [1] * 64
    assert splits([1] * 64, [40_000] + [400] * 63) == [16] + [1] * 63


@given(plans(NUM_SLOTS), OPTIONS)
def test_rows_of_padding_change_nothing(plan: AttentionPlan, options: LayerOptions) -> None:
    rows = len(plan.write)
    query, key, value, pool = given_rows(rows + 3, NUM_SLOTS)
    backend = TorchBackend("cpu", NUM_SLOTS)
    flat = backend.reserve(rows + 3)
    where = flat.slots.data_ptr()
    backend.prepare(plan, flat)
    out = backend.attend(query, key, value, pool, options)
    assert out.isfinite().all()
    expected = explicit(query[:rows], pool, plan, options)
    torch.testing.assert_close(out[:rows], expected, rtol=0, atol=2e-6)
    untouched = np.setdiff1d(np.arange(NUM_SLOTS), plan.write)
    before = given_rows(rows + 3, NUM_SLOTS)[3]
    assert pool.keys[untouched].equal(before.keys[untouched])
    assert backend.flat is flat
    assert flat.slots.data_ptr() == where


def test_a_last_request_without_tree_keys_reads_none() -> None:
    """The buffer is full of those of the request before, and the layer has a window."""
    slots = np.arange(20)
    tree = Segment(slice(0, 8), np.arange(8), slots[:0], slots[:8], np.arange(8), np.eye(8) > 0)
    alone = Segment(
        slice(8, 9), np.array([3]), slots[8:12], slots[:0], slots[:0], np.zeros((1, 0), bool)
    )
    plan = AttentionPlan(slots[[*range(8), 11]], [tree, alone])
    options = LayerOptions(0.3, window=2)
    query, key, value, pool = given_rows(9, NUM_SLOTS)
    backend = TorchBackend("cpu", NUM_SLOTS)
    backend.prepare(plan)
    assert backend.flat.capacity.trees == len(tree.tree)
    out = backend.attend(query, key, value, pool, options)
    torch.testing.assert_close(out, explicit(query, pool, plan, options), rtol=0, atol=2e-6)
