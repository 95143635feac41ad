from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pipespec.engine.attention.attention_plan import causal_plan
from pipespec.engine.attention.device_plan import TorchBackend
from pipespec.engine.ggml import compute, library
from pipespec.engine.slice.model_slice import ModelSlice
from pipespec.engine.slice.speedups import autotune, compile_slice, use_fastest_products
from tests.helpers import models
from tests.helpers.recording import stand_in

pytestmark = pytest.mark.slow

NUM_SLOTS = 100


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.build("llama", tmp_path_factory.mktemp("models") / "llama")


def loaded(folder: Path, device: str = "cpu") -> ModelSlice:
    return ModelSlice.load(folder, range(1), num_slots=NUM_SLOTS, device=device)


def says(model: ModelSlice) -> torch.Tensor:
    inputs, positions, plan = model.example_batch(7)
    torch.manual_seed(1)
    return model.forward(torch.randint_like(inputs, model.vocab_size), positions, plan)


@pytest.mark.parametrize(("static_ms", "best"), [(1.0, "static"), (3.0, "sdpa")])
def test_the_fastest_way_is_taken(folder, static_ms, best):
    model = loaded(folder)
    before = says(model)
    seen = []

    def time_ms(model: ModelSlice) -> float:
        seen.append((model.attention, model.graphs.rows))
        return static_ms if model.attention == "static" else 2.0

    autotune(model, [8], stand_in, time_ms)
    assert sorted(seen) == [("sdpa", ()), ("static", (8,))]
    assert (model.attention, model.refused) == (best, [])
    assert model.graphs.rows == ((8,) if best == "static" else ())
    torch.testing.assert_close(says(model), before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("static_ms", "told"), [(1.0, 1), (3.0, 0)])
def test_refusals_of_slower_backends_are_not_reported(folder, static_ms, told):
    def fails(_: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
        raise RuntimeError("no graphs here")

    model = loaded(folder)
    model.refused.append("Said before.")
    autotune(model, [8], fails, lambda model: static_ms if model.attention == "static" else 2.0)
    assert ["no graphs here" in each for each in model.refused] == [False, *[True] * told]


def test_what_fails_its_proof_is_not_timed(folder, monkeypatch):
    monkeypatch.setattr(TorchBackend, "attend", lambda self, query, *_: torch.zeros_like(query))
    model = loaded(folder)
    autotune(model, [8], stand_in, lambda model: 1.0 if model.attention == "sdpa" else 0.1)
    assert model.attention == "sdpa"
    (said,) = model.refused
    assert said.startswith("attention=static is not used: it stores K and V in other slots")


def compile_by(make: Callable[..., object], folder: Path) -> ModelSlice:
    torch.compiler.reset()
    model = loaded(folder)
    compile_slice(model, lambda graph, _: make(graph))
    return model


@pytest.mark.long
def test_a_compiled_slice_says_the_same(folder):
    used = []

    def make(graph: torch.fx.GraphModule) -> Callable[..., object]:
        return lambda *inputs: used.append(1) or graph.forward(*inputs)

    expected = says(loaded(folder))
    model = compile_by(make, folder)
    assert model.refused == [] and model.describe()["compiled"]
    before = len(used)
    torch.testing.assert_close(says(model), expected, rtol=1e-5, atol=1e-5)
    assert len(used) == before + 1


def test_what_a_compiler_gets_wrong_or_refuses_is_computed_without_it(folder):
    def wrong(graph: torch.fx.GraphModule) -> Callable[..., object]:
        return lambda *inputs: [1.01 * out for out in graph.forward(*inputs)]

    def fails(_: torch.fx.GraphModule) -> Callable[..., object]:
        raise OSError("no compiler here")

    for make, why in ((wrong, "its error is"), (fails, "no compiler here")):
        model = compile_by(make, folder)
        (said,) = model.refused
        assert said.startswith("The slice is not compiled: ")
        assert why in said
        assert not model.describe()["compiled"]


@pytest.mark.long
def test_inductor_compiles_a_slice(folder):
    torch.compiler.reset()
    model = loaded(folder)
    expected = says(model)
    compile_slice(model)
    assert model.refused == []
    torch.testing.assert_close(says(model), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_a_gpu_computes_in_the_fastest_way_that_proves_itself(folder):
    model = loaded(folder, "cuda")
    before = says(model)
    autotune(model, [64])
    assert model.refused == []
    torch.testing.assert_close(says(model), before, rtol=1e-3, atol=1e-3)


@torch.inference_mode()
def test_few_weights_are_one_graph_whose_rows_are_the_same_in_every_batch(folder, monkeypatch):
    model = ModelSlice.load(folder, range(2), num_slots=NUM_SLOTS, dtype=torch.float32)
    before = says(model)
    used = []
    graph_compute = compute.Computer.compute

    def counted(self: compute.Computer, *args: object, **how: bool) -> None:
        used.append(self.sizes)
        graph_compute(self, *args, **how)

    monkeypatch.setattr(compute, "num_threads", lambda: 2)
    monkeypatch.setattr(compute.Computer, "compute", counted)
    use_fastest_products(model)
    assert (model.attention, model.refused) == ("ggml", [])
    torch.testing.assert_close(says(model), before, rtol=1e-4, atol=1e-4)
    assert {*used} == {(1, 1)}
    text, positions, slots = torch.tensor([3, 5, 8, 9]), torch.arange(4), np.arange(4)

    def rows(start: int, stop: int) -> torch.Tensor:
        """Of an answer, after those before them."""
        plan = causal_plan(slots[:start], slots[start:stop])
        plan = replace(plan, segments=[replace(each, num_prompt=0) for each in plan.segments])
        return model.forward(text[start:stop], positions[start:stop], plan)

    assert torch.equal(torch.cat([rows(i, i + 1) for i in range(4)]), rows(0, 4))


def test_without_ggml_few_weights_are_computed_as_they_are(folder, monkeypatch):
    monkeypatch.setattr(library, "load", lambda: None)
    model = ModelSlice.load(folder, range(2), num_slots=NUM_SLOTS, dtype=torch.float32)
    use_fastest_products(model)
    assert (model.attention, model.refused) == ("sdpa", [])
