"""Which layers each stage holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipespec.errors import ConfigError
from pipespec.placement.slices import split_evenly


@given(st.integers(1, 200), st.data())
def test_slices_are_contiguous_even_and_complete(num_layers, data):
    num_stages = data.draw(st.integers(1, num_layers))
    slices = split_evenly(num_layers, num_stages)
    assert [layer for piece in slices for layer in piece] == list(range(num_layers))
    lengths = [len(piece) for piece in slices]
    assert len(lengths) == num_stages
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ConfigError, match="has only 4 layers"):
        split_evenly(4, 5)
