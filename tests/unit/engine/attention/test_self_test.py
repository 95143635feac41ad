"""What fails its proof does not serve."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pipespec.engine.attention import select, self_test
from pipespec.engine.attention.attention_plan import AttentionBackend, LayerOptions, LayerPool
from pipespec.engine.attention.device_plan import TorchBackend
from pipespec.engine.attention.sdpa import SdpaBackend
from pipespec.engine.slice.model_slice import ModelSlice
from tests.helpers import models

CPU = torch.device("cpu")
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
KINDS = {
    "plain": LayerOptions(0.3),
    "window": LayerOptions(0.3, window=60),
    "chunk": LayerOptions(0.3, chunk=60),
    "cap": LayerOptions(0.3, softcap=1.5),
    "sinks": LayerOptions(0.3, sinks=SINKS),
}


class Planted(TorchBackend):
    """A backend with a fault, which shows in one kind of layer."""

    def __init__(self, change: Callable[[LayerOptions], LayerOptions]):
        super().__init__(CPU, self_test.NUM_SLOTS)
        self._change = change

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, pool: LayerPool, options: LayerOptions
    ) -> Tensor:
        return super().attend(query, key, value, pool, self._change(options))


class Forgetful(TorchBackend):
    """One that sees every tree key, whatever the mask says."""

    def prepare(self, plan) -> None:
        super().prepare(plan)
        self.flat.mask.fill_(-1)


class Astray(TorchBackend):
    """One that stores a row elsewhere."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, pool: LayerPool, options: LayerOptions
    ) -> Tensor:
        out = super().attend(query, key, value, pool, options)
        pool.keys[0] += 1
        return out


def layer(kind: str, dtype: torch.dtype = torch.float32) -> self_test.AttentionLayer:
    pool = LayerPool(*(torch.zeros(2, 2, dim, dtype=dtype) for dim in (16, 12)))
    return self_test.AttentionLayer(4, KINDS[kind], pool)


def error(backend: AttentionBackend, layers: list[self_test.AttentionLayer]) -> str | None:
    return self_test.self_test_error(backend, self_test.NUM_SLOTS, layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("made", [lambda: TorchBackend(CPU, self_test.NUM_SLOTS), SdpaBackend])
def test_what_attends_as_defined_proves_itself(made: Callable[[], AttentionBackend], dtype):
    layers = [layer(kind, dtype) for kind in KINDS]
    assert error(made(), layers) is None


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("window", lambda o: LayerOptions(o.scaling, o.window and o.window + 1)),
        ("chunk", lambda o: LayerOptions(o.scaling, chunk=o.chunk and o.chunk + 1)),
        ("cap", lambda o: LayerOptions(o.scaling)),
        ("sinks", lambda o: LayerOptions(o.scaling)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fault_in_one_kind_of_layer_is_found(kind, change, dtype):
    backend, others = Planted(change), [layer("plain", dtype)]
    assert error(backend, others) is None
    assert "its error is" in error(backend, [*others, layer(kind, dtype)])


def test_a_fault_in_what_is_read_or_stored_is_found():
    layers = [layer("plain")]
    assert "its error is" in error(Forgetful(CPU, self_test.NUM_SLOTS), layers)
    found = error(Astray(CPU, self_test.NUM_SLOTS), layers)
    assert found == "it stores K and V in other slots than those of the batch"


def test_the_next_choice_serves_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = models.build("llama", tmp_path / "model")
    layers = range(models.NUM_LAYERS)

    def loaded(name: str) -> ModelSlice:
        return ModelSlice.load(folder, layers, num_slots=8, attention=name)

    assert (loaded("auto").attention, loaded("auto").refused) == ("sdpa", [])
    assert (loaded("static").attention, loaded("static").refused) == ("static", [])
    # Triton's kernels are for GPUs.
    without = loaded("triton")
    assert without.attention == "static"
    (said,) = without.refused
    assert said.startswith("attention=triton is not used, static is used instead: it needs a GPU")

    right = select.make_backend

    def wrong(name: str, device: torch.device, num_slots: int, **_: bool) -> AttentionBackend:
        made = right(name, device, num_slots)
        return Forgetful(device, num_slots) if name == "static" else made

    monkeypatch.setattr(select, "make_backend", wrong)
    without = loaded("static")
    assert without.attention == "sdpa"
    (said,) = without.refused
    assert said.startswith("attention=static is not used, sdpa is used instead: its error is")

    def broken(name: str, device: torch.device, num_slots: int, **_: bool) -> AttentionBackend:
        if name == "static":
            raise RuntimeError("no kernel image\nis available")
        return right(name, device, num_slots)

    monkeypatch.setattr(select, "make_backend", broken)
    (said,) = loaded("static").refused
    assert said.endswith("it fails with RuntimeError: no kernel image is available.")
