"""The parts of `pipespec check --gpu` on a pretended GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from pipespec.engine.model_slice import ModelSlice
from pipespec.instruments.device_check import correctness, speed
from pipespec.instruments.device_check.models import sizes
from pipespec.instruments.device_check.verdict import fastest, faults
from pipespec.instruments.diagnostics import tensor_parallel_cost, timing
from tests.helpers.pretended_gpu.gpu import PretendedGpu

GPU = torch.device("cuda:0")


pytestmark = pytest.mark.usefixtures("gpu")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedGpu]:
    """One on which small models are timed."""
    small = replace(sizes(torch.device("cpu")), contexts=(16, 32, 64))
    monkeypatch.setattr(speed, "sizes", lambda _: small)
    monkeypatch.setattr(timing, "LEAST_S", 0.0)
    monkeypatch.setattr(tensor_parallel_cost, "COPIED_BYTES", 1 << 16)
    with PretendedGpu() as found, torch.inference_mode():
        for name in ("capture_graphs", "capture_head"):
            whole = getattr(ModelSlice, name)
            captured = lambda model, rows, whole=whole: whole(model, rows, found.capture)  # noqa: E731
            monkeypatch.setattr(ModelSlice, name, captured)
        yield found


@pytest.mark.long
def test_attention_and_graphs_pass(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(correctness, "BACKENDS", ("static", "triton"))
    monkeypatch.setattr(correctness, "DTYPES", (torch.float32,))
    monkeypatch.setattr(correctness, "SMALL", ("qwen3_next",))
    attention = correctness.check_attention(GPU)
    assert attention["backends"].keys() == {"static", "triton"}
    assert list(faults("attention", attention)) == []
    graphs = correctness.check_graphs(GPU)
    assert len(graphs["models"]) == 2
    assert list(faults("graphs", graphs)) == []
    assert all(how["graph_rows"] == [16, 64] for how in graphs["models"].values())


def test_products_of_few_bits_pass():
    assert list(faults("packed_weights", correctness.check_packed_weights(GPU))) == []


@pytest.mark.long
def test_stage_draft_and_transformers_are_timed():
    stage, draft, eager = (
        each(GPU) for each in (speed.time_stage, speed.time_draft, speed.time_eager)
    )
    assert stage["ms"].keys() >= {"sdpa", "static in graphs", "triton in graphs"}
    assert fastest({"stage": stage}).startswith("Fastest here is ")
    assert draft["refused"] == [] and draft["graph_ms"].keys() == {"1", "16", "64"}
    assert eager["context"] == 64 and eager["ms"] > 0
