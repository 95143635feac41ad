"""Linear layers that compute few rows with their operands swapped."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pipespec.engine.few_rows import SIZES, FewRowsLinear, swap_where_faster, swapped_product

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


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDE, WIDE, bias=False), nn.ReLU(), nn.Linear(WIDE, 8))


# Pairs of the usual and the swapped time, by SIZES.
TIMES = (1.0, 0.5, 1.0, 0.99, 1.0, 2.0, 1.0, 0.9, 1.0, 1.0)


def test_the_sizes_that_are_clearly_faster_are_swapped():
    assert SIZES == (2, 4, 8, 16, 32)
    swapped = model()
    assert swap_where_faster(swapped, timer(*TIMES)) == (2, 16)
    assert [type(each) for each in swapped] == [FewRowsLinear, nn.ReLU, FewRowsLinear]


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
    swap_where_faster(layer, timer(*TIMES))
    inputs = torch.randn(rows, WIDE)
    expected = nn.functional.linear(inputs, layer.weight)
    calls = []

    def counted(*arguments):
        calls.append(arguments)
        return swapped_product(*arguments)

    monkeypatch.setattr("pipespec.engine.few_rows.swapped_product", counted)
    torch.testing.assert_close(layer(inputs), expected, rtol=1e-4, atol=1e-4)
    assert len(calls) == is_swapped


def test_weights_stay_the_same_tensors():
    swapped = model()
    before = dict(swapped.named_parameters())
    swap_where_faster(swapped, timer(*TIMES))
    assert all(after is before[name] for name, after in swapped.named_parameters())


def test_models_that_fit_into_caches_are_left_alone():
    small = nn.Sequential(nn.Linear(64, 64))
    assert swap_where_faster(small, timer()) == ()
    assert type(small[0]) is nn.Linear


def test_nothing_changes_where_the_usual_product_is_as_fast():
    usual = model()
    assert swap_where_faster(usual, timer(*[1.0] * 10)) == ()
    assert type(usual[0]) is nn.Linear
