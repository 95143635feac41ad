"""Linear layers that compute few rows in the fastest of several ways."""

from functools import partial

import pytest
import torch
from torch import nn

from pipespec.engine.low_bit import cpu_products
from pipespec.engine.low_bit.cpu_products import (
    GGML,
    PACKED,
    USUAL,
    WAYS,
    OtherLinear,
    measured,
    use_fastest,
)

WIDE = 4096  # with as many outputs, the weights are of the size that is measured


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", cpu_products.GGML_KINDS)
@pytest.mark.parametrize("way", WAYS)
@torch.inference_mode()
def test_every_way_gives_the_products_of_the_layer(way, dtype):
    torch.manual_seed(0)
    layer = nn.Linear(96, 40).to(dtype)
    rows = torch.randn(2, 5, 96).to(dtype)
    expected = layer(rows)
    try:
        OtherLinear.become(layer, WAYS[way](layer.weight), keeps=way != PACKED)
    except RuntimeError:
        assert way == PACKED and dtype != torch.float32  # oneDNN has it on some processors alone
        return
    most = cpu_products.TOLERANCE[dtype] * expected.abs().max()
    assert (layer(rows) - expected).abs().max() <= most
    assert layer(rows[:0]).shape == (0, 5, 40)
    assert hasattr(layer, "weight") == (way != PACKED)


@torch.inference_mode()
def test_large_matrices_of_a_draft_are_rounded_to_8_bits(monkeypatch):
    monkeypatch.setattr(cpu_products, "LEAST_ROUNDED", 96 * 40 * 4)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 40), nn.Linear(40, 8))
    rows = torch.randn(2, 5, 96)
    expected = model(rows)
    cpu_products.use_eight_bits(model)
    large, small = model
    assert not hasattr(large, "weight") and hasattr(small, "weight")
    found = model(rows)
    assert 0 < (found - expected).abs().max() <= 0.02 * expected.abs().max()


def seconds(monkeypatch: pytest.MonkeyPatch, **took: float) -> None:
    """Let the ways take these times, below 0 for a product that is wrong; others fail."""
    asked: list[tuple[object, float]] = []

    def make(name: str, weight: torch.Tensor) -> cpu_products.Product:
        if name not in took:
            raise RuntimeError("not here")
        product = WAYS[name](weight) if took[name] > 0 else torch.zeros_like
        asked.append((product, took[name]))
        return product

    def least(products: list[cpu_products.Product], _: torch.Tensor) -> float:
        return next(each for product, each in asked if product is products[0])

    monkeypatch.setattr(cpu_products, "WAYS", {name: partial(make, name) for name in WAYS})
    monkeypatch.setattr(cpu_products, "least_seconds", least)


@pytest.mark.parametrize(
    ("took", "best"),
    [
        ({"usual": 1, "ggml": 1.04}, GGML),  # as fast: its rows do not depend on their batch
        ({"usual": 1, "ggml": 1.1}, USUAL),
        ({"usual": 1, "swapped": 0.97}, USUAL),
        ({"usual": 1, "swapped": 0.9, "packed": 0.8}, PACKED),
        ({"usual": 1, "packed": -0.1}, USUAL),  # which gives other results
        ({"usual": 1}, USUAL),
    ],
)
def test_the_fastest_way_is_chosen(monkeypatch, took, best):
    seconds(monkeypatch, **took)
    assert measured([torch.randn(64, 32)], WAYS).way == best


def test_weights_that_are_no_numbers_are_measured_too():
    assert measured([torch.full((64, 32), torch.nan)], [USUAL]).way == USUAL


@pytest.mark.slow
def test_a_model_is_measured_once_on_a_machine(monkeypatch):
    seconds(monkeypatch, usual=1, packed=0.5)
    model = nn.Sequential(nn.Linear(WIDE, WIDE, bias=False), nn.Linear(WIDE, 8))
    tied = nn.Linear(WIDE, 8)
    tied.weight = model[1].weight
    whole = nn.ModuleList((model, tied))
    assert use_fastest(whole, room=10) == USUAL  # there is no memory for packed weights
    assert use_fastest(whole) == PACKED
    assert [type(each) for each in (*model, tied)] == [OtherLinear, nn.Linear, nn.Linear]
    monkeypatch.setattr(cpu_products, "measured", None)
    assert use_fastest(nn.Sequential(nn.Linear(WIDE, WIDE, bias=False))) == PACKED
    assert use_fastest(nn.Linear(WIDE, 8)) == USUAL  # too small
