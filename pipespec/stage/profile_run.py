"""Measures how long a stage's batches take by their rows, before the first request: the head needs
to know what its first draft tokens and prompts cost. Later times are measured on the batches
themselves (`pipespec.stage.stage_loop`). Rows are random, so those of a mixture choose different
experts."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from pipespec.core import (
    COMMITTED,
    DRAFT,
    KIND,
    NO_PARENT_NODE,
    NODE,
    NUM_COLUMNS,
    PARENT,
    POSITION,
    SEQUENCE,
    TOKEN,
    Batch,
)
from pipespec.engine.slice.runner import SliceRunner
from pipespec.engine.slice.speedups import synchronize
from pipespec.timing.batch_times import RowTimes, profiled_sizes

# A size is measured twice, and the least time counts, unless a batch takes longer than this; larger
# sizes are then left to the measured steps, as they would delay the start by seconds.
LONG_MS = 200
# No request has this number.
NO_SEQUENCE = -1


def profile_run(
    runner: SliceRunner, most: int, min_ms: Callable[[int], float], *, last: bool
) -> RowTimes:
    """The times of batches of 1 row to `most`, or to the first size that takes long.

    `min_ms` gives the least time of a batch by its rows; the `last` stage computes logits too.
    """
    times = RowTimes()
    for rows in profiled_sizes(most):
        took = _compute_ms(runner, rows, last)
        is_long = took > LONG_MS
        if not is_long:
            took = min(took, _compute_ms(runner, rows, last))
        times.add(rows, max(took, min_ms(rows)))
        if is_long:
            break
    return times


def _compute_ms(runner: SliceRunner, rows: int, last: bool) -> float:
    model = runner.model
    batch = Batch(0, np.zeros((rows, NUM_COLUMNS), np.int64))
    places = np.arange(rows)
    batch.rows[:, SEQUENCE] = NO_SEQUENCE
    batch.rows[:, NODE] = batch.rows[:, POSITION] = places
    batch.rows[:, PARENT] = np.where(places, places - 1, NO_PARENT_NODE)
    batch.rows[:, KIND] = COMMITTED
    if model.recurrent:  # a tree below one row, as prompts take another way through such layers
        parents = (places - 1) // 2
        batch.rows[1:, PARENT], batch.rows[1:, KIND] = parents[1:], DRAFT
        batch.rows[:, POSITION] = np.log2(places + 1).astype(np.int64)
    random = torch.Generator().manual_seed(rows)
    if model.is_first:
        batch.rows[:, TOKEN] = torch.randint(model.vocab_size, (rows,), generator=random).numpy()
    else:
        batch.hidden = torch.randn(rows, model.hidden_size, generator=random).to(model.dtype)
    synchronize(model.device)
    start = time.perf_counter_ns()
    computed = runner.compute(batch)
    if last:
        assert computed.hidden is not None
        model.logits(computed.hidden).argmax(-1)
    synchronize(model.device)
    took = time.perf_counter_ns() - start
    runner.release(NO_SEQUENCE)
    return took / 1e6
