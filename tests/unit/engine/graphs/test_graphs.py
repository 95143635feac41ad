"""A slice that is recorded and replayed, with a stand-in for CUDA's graphs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pipespec.engine.slice.model_slice import ModelSlice
from pipespec.engine.slice.speedups import capture_graphs, capture_head
from tests.helpers import models
from tests.helpers.plans import plans
from tests.helpers.recording import stand_in

NUM_SLOTS = 300
BUCKET = 32
# Rope of two kinds with windows and caps; sinks and experts.
ARCHITECTURES = ("llama", "gemma2", "gpt_oss")


def loaded(folder: Path, attention: str = "static", **how: Any) -> ModelSlice:
    return ModelSlice.load(folder, range(2), num_slots=NUM_SLOTS, attention=attention, **how)


@pytest.fixture(scope="module")
def slices(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[ModelSlice, ModelSlice]]:
    """Of each architecture a recorded slice, and one with PyTorch's attention."""
    found = {}
    for name in ARCHITECTURES:
        folder = models.build(name, tmp_path_factory.mktemp("models") / name)
        recorded, plain = loaded(folder), loaded(folder, "sdpa")
        capture_graphs(recorded, [BUCKET], stand_in)
        assert recorded.refused == []
        found[name] = recorded, plain
    return found


@pytest.mark.slow
@settings(max_examples=15)
@given(
    name=st.sampled_from(ARCHITECTURES), these=st.lists(plans(NUM_SLOTS), min_size=1, max_size=3)
)
def test_a_recording_computes_other_rows_and_other_trees(slices, name, these):
    recorded, plain = slices[name]
    for part in (recorded, plain):
        for layer in part.attention_layers:
            with torch.inference_mode():
                layer.pool.keys.zero_()
                layer.pool.values.zero_()
    replayed = []
    (recording,) = recorded.graphs._layers
    whole = recording.run
    recording.run = lambda *given: replayed.append(1) or whole(*given)
    try:
        for plan in these:
            rng = np.random.default_rng(len(plan.write))
            ids = torch.from_numpy(rng.integers(models.VOCAB_SIZE, size=len(plan.write)))
            given_ = ids, torch.from_numpy(plan.positions), plan
            expected = plain.forward(*given_)
            off = (recorded.forward(*given_) - expected).abs().max()
            assert off <= 5e-6 * max(1, expected.abs().max())
    finally:
        recording.run = whole
    assert len(replayed) == sum(len(plan.write) <= BUCKET for plan in these)


def test_what_reads_on_the_host_is_computed_without_a_graph(tmp_path: Path):
    folder = models.build("llama", tmp_path / "model")
    part = loaded(folder)

    class Reading(nn.Module):
        def __init__(self, norm: nn.Module):
            super().__init__()
            self.norm = norm

        def forward(self, hidden: Tensor) -> Tensor:
            return self.norm(hidden) if hidden.sum().item() < 1e9 else hidden

    base = part.base
    base.layers[1].input_layernorm = Reading(base.layers[1].input_layernorm)
    capture_graphs(part, [8], stand_in)
    (said,) = part.refused
    assert said.startswith("Batches of up to 8 rows are computed without a graph: ")
    assert part.graphs.rows == ()


def test_a_graph_that_gives_something_else_does_not_serve(tmp_path: Path):
    folder = models.build("llama", tmp_path / "model")

    def frozen(run: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        """What was computed while it was recorded, again and again."""
        result = run()
        return lambda: None, result

    def broken(run: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        def replay() -> None:
            raise RuntimeError("no launch")

        return replay, run()

    part = loaded(folder)
    for capture, why in ((frozen, "gives other values than computing"), (broken, "no launch")):
        part.refused.clear()
        capture_graphs(part, [8], capture)
        assert why in part.refused[0]
        assert part.graphs.rows == ()
    other = loaded(folder, "sdpa")
    capture_graphs(other, [8], stand_in)
    assert "attention=sdpa cannot be captured" in other.refused[0]


def test_the_output_head_is_recorded_too(tmp_path: Path):
    """Those of a whole draft model, which computes both in each of its rounds."""
    folder = models.build("gemma2", tmp_path / "model")  # soft-capped logits
    layers = range(models.NUM_LAYERS)
    recorded, plain, wrong = (
        ModelSlice.load(folder, layers, num_slots=NUM_SLOTS, attention="sdpa") for _ in range(3)
    )
    replayed = []

    def capture(run: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        replay, result = stand_in(run)
        return lambda: (replayed.append(1), replay()), result

    capture_head(recorded, [4, 16], capture)
    assert recorded.refused == []
    replayed.clear()
    hidden = torch.randn(20, recorded.hidden_size)
    for rows in (1, 4, 16, 20):
        logits, expected = recorded.logits(hidden[:rows]), plain.logits(hidden[:rows])
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert len(replayed) == 3
    capture_head(wrong, [4], lambda run: (lambda: None, run()))
    assert "The output head computes up to 4 rows without a graph: " in wrong.refused[0]


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["static", "triton"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_cuda_graph_proves_itself(tmp_path: Path, name: str, attention: str):
    folder = models.build(name, tmp_path / "model")
    # The one type in which torch's grouped product waits for nothing.
    part = loaded(folder, attention, device="cuda", dtype=torch.bfloat16)
    capture_graphs(part, [BUCKET])
    assert part.attention == attention
    assert part.refused == []
