"""A stage measures its batches before it has any."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipespec.engine.model_slice import ModelSlice
from pipespec.engine.runner import SliceRunner
from pipespec.stage.profile_run import profile_run
from tests.helpers import models


@pytest.mark.parametrize(("layers", "last"), [(range(1), False), (range(1, 2), True)])
def test_profile_measures_every_size_and_leaves_no_slot_allocated(
    tmp_path: Path, layers: range, last: bool
):
    folder = models.build("llama", tmp_path, num_hidden_layers=2)
    runner = SliceRunner(ModelSlice.load(folder, layers, num_slots=30), 30)
    points = profile_run(runner, 30, lambda rows: 0.0, last=last).points()
    assert [rows for rows, _ in points] == [1, 4, 16, 30]
    assert all(ms > 0 for _, ms in points)
    assert not runner.lineages and runner.slots.num_free == 30
    held = profile_run(runner, 30, lambda rows: 1000.0 * rows, last=last).points()
    assert held == ((1, 1000.0), (4, 4000.0), (16, 16000.0), (30, 30000.0))
