"""How long a stage's batches take by their rows, measured before it has any to compute.

Without it the first guesses would be fed for nothing known, which costs most where every row takes
its time, and the first prompt beside a running answer would slow that down until the stages have
told what its batches take. What comes later is measured on the batches themselves
(`pipespec.stage.loop`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from pipespec.core import (
    DECIDED,
    KIND,
    NO_NODE,
    NODE,
    NUM_COLUMNS,
    PARENT,
    POSITION,
    SEQUENCE,
    Batch,
)
from pipespec.engine.runner import SliceRunner
from pipespec.row_times import RowTimes

# From one size to the next, so many times as many rows; of a few measurements the least counts.
STEP, REPEATS = 4, 2
# No request has this number.
NOBODY = -1


def profile(
    runner: SliceRunner, most: int, held_to_ms: Callable[[int], float], *, last: bool
) -> RowTimes:
    """The times of batches of 1 row to `most`.

    `held_to_ms` is what a batch of so many rows lasts at least, where a machine is emulated; the
    `last` stage computes logits too.
    """
    times = RowTimes()
    for rows in _sizes(most):
        least = min(_compute_ms(runner, rows, last) for _ in range(REPEATS))
        times.add(rows, max(least, held_to_ms(rows)))
    return times


def _sizes(most: int) -> Iterator[int]:
    rows = 1
    while rows < most:
        yield rows
        rows *= STEP
    yield most


def _compute_ms(runner: SliceRunner, rows: int, last: bool) -> float:
    model = runner.model
    batch = Batch(0, np.zeros((rows, NUM_COLUMNS), np.int64))
    places = np.arange(rows)
    batch.rows[:, SEQUENCE] = NOBODY
    batch.rows[:, NODE] = batch.rows[:, POSITION] = places
    batch.rows[:, PARENT] = np.where(places, places - 1, NO_NODE)
    batch.rows[:, KIND] = DECIDED
    if not model.is_first:
        batch.hidden = torch.zeros(rows, model.hidden_size, dtype=model.dtype)
    _wait(model.device)
    start = time.perf_counter_ns()
    computed = runner.compute(batch)
    if last:
        assert computed.hidden is not None
        model.logits(computed.hidden).argmax(-1)
    _wait(model.device)
    took = time.perf_counter_ns() - start
    runner.release(NOBODY)
    return took / 1e6


def _wait(device: torch.device) -> None:
    """Until the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
