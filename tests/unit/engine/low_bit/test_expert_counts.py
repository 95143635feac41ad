"""A slice counts how many experts of its mixtures a batch reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig

from pipespec.engine.low_bit.expert_counts import SAMPLED, ExpertCounts
from pipespec.engine.slice.model_slice import ModelSlice
from tests.helpers import models


class Experts(nn.Module):
    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return hidden


class Mixture(nn.Module):
    """Two layers; in the second, every row chooses expert 0 and its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"experts": Experts()}) for _ in range(2))

    def forward(self, rows: int) -> None:
        first = torch.zeros(rows, 2, dtype=torch.long) + torch.tensor([3, 5])
        second = torch.stack((torch.zeros(rows, dtype=torch.long), torch.arange(rows) + 1), 1)
        for layer, index in zip(self.layers, (first, second), strict=True):
            layer["experts"](torch.ones(rows, 4), index, torch.ones(rows, 2))


def test_one_of_some_batches_is_counted_by_its_rows():
    mixture = Mixture()
    counts = ExpertCounts(mixture)
    for batch in range(6 * SAMPLED):
        rows = (3, 3, 8, 8, 3, 4)[batch // SAMPLED]
        with counts.sampled(rows):
            mixture(rows)
    # The first layer reads 2 experts, the second one more than rows.
    assert counts.points() == [(3.25, (3 * 3 + 3.5) / 4), (8, (2 + 9) / 2)]
    assert counts.points() == counts.points()


def test_a_failed_batch_is_not_counted_and_ends_the_counting():
    mixture = Mixture()
    counts = ExpertCounts(mixture)

    def fail() -> None:
        mixture(3)
        raise RuntimeError

    for _ in range(SAMPLED):
        with pytest.raises(RuntimeError), counts.sampled(3):
            fail()
    assert counts.points() == []
    for _ in range(SAMPLED):
        with counts.sampled(8):
            mixture(8)
    assert counts.points() == [(8, (2 + 9) / 2)]


@pytest.mark.parametrize(("kind", "counted"), [("qwen3_moe", True), ("llama", False)])
def test_slices_of_mixtures_count_and_dense_ones_do_not(tmp_path: Path, kind: str, counted: bool):
    folder = models.build(kind, tmp_path, num_hidden_layers=2)
    model = ModelSlice.load(folder, range(1, 2), num_slots=8)
    before, inputs = model.experts.points(), model.example_batch(8)
    first = model.forward(*inputs)
    for _ in range(2 * SAMPLED):
        assert torch.equal(model.forward(*inputs), first)
    assert before == []
    points = model.experts.points()
    if not counted:
        assert points == []
        return
    ((rows, experts),) = points
    config = AutoConfig.from_pretrained(folder)
    assert rows == 8 and config.num_experts_per_tok <= experts <= config.num_experts
