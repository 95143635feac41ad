"""A stage measures its batches before it has any."""

from typing import Any

import pytest
import torch

from pipespec.engine.slice.model_slice import ModelSlice
from pipespec.engine.slice.runner import SliceRunner
from pipespec.stage.profile_run import profile_run
from tests.helpers import models


@pytest.mark.parametrize(("layers", "last"), [(range(1), False), (range(1, 2), True)])
def test_profile_measures_every_size_and_keeps_no_slot(tmp_path, layers, last, monkeypatch):
    monkeypatch.setattr("pipespec.stage.profile_run.LONG_MS", 1e9)  # however busy the machine is
    folder = models.build("llama", tmp_path, num_hidden_layers=2)
    runner = SliceRunner(ModelSlice.load(folder, layers, num_slots=30), 30)
    points = profile_run(runner, 30, lambda rows: 0.0, last=last).points()
    assert [rows for rows, _ in points] == [1, 4, 16, 30]
    assert all(ms > 0 for _, ms in points)
    assert not runner.lineages and runner.slots.num_free == 30
    held = profile_run(runner, 30, lambda rows: 1000.0 * rows, last=last).points()
    assert held == ((1, 1000.0), (4, 4000.0), (16, 16000.0), (30, 30000.0))


def test_sizes_beyond_one_that_takes_long_are_left_out(tmp_path, monkeypatch):
    folder = models.build("llama", tmp_path, num_hidden_layers=1)
    runner = SliceRunner(ModelSlice.load(folder, range(1), num_slots=30), 30)
    monkeypatch.setattr("pipespec.stage.profile_run.LONG_MS", 0)
    assert [rows for rows, _ in profile_run(runner, 30, lambda rows: 0.0, last=True).points()] == [
        1
    ]


@pytest.mark.parametrize("layers", [range(1), range(1, 2)])
def test_profiled_rows_differ_so_that_a_mixture_reads_other_experts(tmp_path, layers, monkeypatch):
    folder = models.build("qwen3_moe", tmp_path, num_hidden_layers=2)
    model = ModelSlice.load(folder, layers, num_slots=16)
    given: list[torch.Tensor] = []
    forward = model.forward

    def spy(inputs: torch.Tensor, *rest: Any) -> torch.Tensor:
        given.append(inputs)
        return forward(inputs, *rest)

    monkeypatch.setattr(model, "forward", spy)
    profile_run(SliceRunner(model, 16), 16, lambda rows: 0.0, last=False)
    assert all(len(inputs.unique(dim=0)) > len(inputs) // 2 for inputs in given)
