"""Measures how long a stage's batches take by their rows, before the first request: the head needs
to know what its first draft tokens and prompts cost. Later times are measured on the batches
themselves (`pipespec.stage.stage_loop`). Rows are random, so those of a mixture choose different
experts."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from pipespec import core
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
    batch = core.Batch(0, np.zeros((rows, core.NUM_COLUMNS), np.int64))
    places = np.arange(rows)
    batch.rows[:, core.SEQUENCE] = NO_SEQUENCE
    batch.rows[:, core.NODE] = batch.rows[:, core.POSITION] = places
    batch.rows[:, core.PARENT] = np.where(places, places - 1, core.NO_PARENT_NODE)
    batch.rows[:, core.KIND] = core.COMMITTED
    if model.recurrent:  # a tree below one row, as prompts take another way through such layers
        parents = (places - 1) // 2
        batch.rows[1:, core.PARENT], batch.rows[1:, core.KIND] = parents[1:], core.DRAFT
        batch.rows[:, core.POSITION] = np.log2(places + 1).astype(np.int64)
    random = torch.Generator().manual_seed(rows)
    if model.is_first:
        tokens = torch.randint(model.vocab_size, (rows,), generator=random)
        batch.rows[:, core.TOKEN] = tokens.numpy()
    else:
        batch.hidden = torch.randn(rows, model.hidden_size, generator=random).to(model.dtype)
    synchronize(model.device)
    start = time.perf_counter_ns()
    computed = runner.compute(batch)
    if last:
        assert computed.hidden is not None
        model.logits(computed.hidden[:, : model.hidden_size]).argmax(-1)
    synchronize(model.device)
    took = time.perf_counter_ns() - start
    runner.release(NO_SEQUENCE)
    return took / 1e6
