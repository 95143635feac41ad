"""Linear layers that compute few rows with packed weights or swapped operands."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pipespec.engine import cpu_products
from pipespec.engine.cpu_products import (
    SIZES,
    Choice,
    PackedLinear,
    SwappedLinear,
    pack,
    swapped_product,
    use_fastest,
)

WIDE = 4096  # with as many outputs, the weights are of the size that is measured


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    inside=st.integers(1, 9),
    outside=st.integers(1, 9),
    has_bias=st.booleans(),
)
def test_a_swapped_product_is_that_of_the_layer(shape, inside, outside, has_bias):
    layer = nn.Linear(inside, outside, bias=has_bias)
    inputs = torch.randn(*shape, inside)
    found = swapped_product(inputs, layer.weight, layer.bias)
    torch.testing.assert_close(found, layer(inputs))
    assert found.is_contiguous()


def timer(*seconds: float) -> Callable[[Callable[[], object]], float]:
    """A stopwatch that runs what it is given, and says that it took these times, in turn."""
    left = iter(seconds)

    def time_s(call: Callable[[], object]) -> float:
        call()
        return next(left)

    return time_s


def model(wider: int = 1) -> nn.Sequential:
    between = wider * WIDE
    return nn.Sequential(nn.Linear(WIDE, between, bias=False), nn.ReLU(), nn.Linear(between, 8))


# The usual time, and those of both for 2 rows and more, by SIZES; then of packed weights.
PLAIN = (1.0, *(1.0, 0.5), *(1.0, 0.99), *(1.0, 2.0), *(1.0, 0.9), *(1.0, 1.0))
SLOW, FAST = (1.0,) * len(SIZES), (1.2, *(0.7,) * (len(SIZES) - 1))


def test_the_sizes_that_are_clearly_faster_are_swapped():
    assert SIZES == (1, 2, 4, 8, 16, 32)
    swapped = model()
    assert use_fastest(swapped, time_s=timer(*PLAIN, *SLOW)) == Choice(swapped=(2, 16))
    assert [type(each) for each in swapped] == [SwappedLinear, nn.ReLU, SwappedLinear]


@pytest.mark.parametrize(
    ("rows", "is_swapped"),
    [
        (1, False),
        (2, True),
        (3, False),
        (8, False),
        (9, True),
        (16, True),
        (17, False),
        (64, False),
    ],
)
def test_sizes_in_between_are_computed_as_the_next_larger(monkeypatch, rows, is_swapped):
    layer = model()[0]
    use_fastest(layer, time_s=timer(*PLAIN, *SLOW))
    inputs = torch.randn(rows, WIDE)
    expected = nn.functional.linear(inputs, layer.weight)
    calls = []

    def counted(*arguments):
        calls.append(arguments)
        return swapped_product(*arguments)

    monkeypatch.setattr(cpu_products, "swapped_product", counted)
    torch.testing.assert_close(layer(inputs), expected, rtol=1e-4, atol=1e-4)
    assert len(calls) == is_swapped


def test_swapped_weights_stay_the_same_tensors():
    swapped = model()
    before = dict(swapped.named_parameters())
    use_fastest(swapped, time_s=timer(*PLAIN, *SLOW))
    assert all(after is before[name] for name, after in swapped.named_parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_packed_where_all_sizes_together_are_clearly_faster(dtype):
    packed = model(4 // dtype.itemsize).to(dtype)
    try:
        pack(packed[0].weight)
    except RuntimeError as error:  # bfloat16 needs AVX-512 or AVX-NE-CONVERT
        pytest.skip(f"this processor packs no {dtype}: {error}")
    rows = [torch.randn(*shape, WIDE, dtype=dtype) for shape in ((1,), (3,), (2, 2), (40,))]
    with torch.inference_mode():
        expected = [packed(each) for each in rows]
        plain = PLAIN if dtype == torch.float32 else SLOW
        assert use_fastest(packed, time_s=timer(*plain, *FAST)) == Choice(packed=True)
        assert [type(each) for each in packed] == [PackedLinear, nn.ReLU, PackedLinear]
        assert list(dict(packed.named_parameters())) == ["2.bias"], "the plain weights are freed"
        for inputs, product in zip(rows, expected, strict=True):
            close = 1e-4 if dtype == torch.float32 else 0.05
            torch.testing.assert_close(packed(inputs), product, rtol=close, atol=close)


def test_a_tied_head_keeps_its_plain_weights():
    tied = model()
    embedding = nn.Embedding(8, WIDE)
    embedding.weight = tied[2].weight
    whole = nn.ModuleList([tied, embedding])
    assert use_fastest(whole, time_s=timer(*PLAIN, *FAST)) == Choice(packed=True, swapped=(2, 16))
    assert [type(each) for each in tied] == [PackedLinear, nn.ReLU, SwappedLinear]
    assert tied[2].weight is embedding.weight


@pytest.mark.parametrize(("more", "is_packed"), [(0, True), (-1, False)])
def test_weights_are_packed_only_where_there_is_room(more: int, is_packed: bool):
    layers = model()
    needed = sum(layers[place].weight.nbytes for place in (0, 2))
    choice = use_fastest(layers, needed + more, timer(*PLAIN, *FAST))
    assert choice == (Choice(packed=True) if is_packed else Choice(False, (2, 16), needed))
    assert type(layers[0]) is (PackedLinear if is_packed else SwappedLinear)


def fail(*_: object) -> None:
    raise RuntimeError("not on this processor")


@pytest.mark.parametrize("wrong", [fail, lambda inputs, packed, bias: torch.zeros(len(inputs), 1)])
def test_weights_are_not_packed_where_that_fails_or_gives_other_results(monkeypatch, wrong):
    monkeypatch.setattr(cpu_products, "packed_product", wrong)
    usual = model()
    assert use_fastest(usual, time_s=timer(*PLAIN)) == Choice(swapped=(2, 16))


def test_models_that_fit_into_caches_are_left_alone():
    small = nn.Sequential(nn.Linear(64, 64))
    assert use_fastest(small, time_s=timer()) == Choice()
    assert type(small[0]) is nn.Linear


def test_nothing_changes_where_the_usual_product_is_as_fast():
    usual = model()
    assert use_fastest(usual, time_s=timer(*(1.0,) * len(PLAIN), *SLOW)) == Choice()
    assert type(usual[0]) is nn.Linear
