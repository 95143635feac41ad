"""Layers whose weights stay in blocks, beside the dequantised weights."""

from __future__ import annotations

import pytest
import torch

from pipespec.engine.formats.gguf import KEPT_KINDS
from pipespec.engine.formats.gguf_blocks import KINDS, BlockWeights, block_sizes
from pipespec.engine.low_bit import kept_linear
from pipespec.engine.low_bit.kept_linear import DequantisedLinear
from tests.unit.engine.formats.test_gguf_blocks import drawn

CPU = torch.device("cpu")
OUT = 7


def layer_of(
    kind: str, factor: float = 1.0, out: int = OUT
) -> tuple[DequantisedLinear, torch.Tensor]:
    """A layer with random weights, and these in float32."""
    rows = torch.from_numpy(drawn(kind, out, 512 // block_sizes(kind)[0]))
    weights = BlockWeights(rows, kind, factor)
    layer = DequantisedLinear("it", out, 512)
    layer.fill(weights, CPU)
    return layer, weights.dense()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_dequantised_exactly(kind, dtype):
    """A row that chooses each column has the weights."""
    layer, expected = layer_of(kind)
    found = layer(torch.eye(512, dtype=dtype)).T
    assert torch.equal(found, expected.to(dtype))
    size, num_bytes = block_sizes(kind)
    assert layer.num_bytes == OUT * 512 // size * num_bytes


def test_all_weights_are_multiplied_by_the_factor_of_the_matrix():
    layer, expected = layer_of("NVFP4", factor=0.25)
    assert torch.equal(layer(torch.eye(512)).T, expected)
    assert torch.equal(expected, layer_of("NVFP4")[1] / 4)


@pytest.mark.parametrize("some", [1, 1 << 21])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_its_batch(kind, dtype, some, monkeypatch):
    """Whether the weights are dequantised at once or some rows at a time."""
    monkeypatch.setitem(kept_linear.CHUNK, "cpu", some)
    layer, expected = layer_of(kind, out=40)
    rows = torch.randn(100, 512, generator=torch.Generator().manual_seed(1)).to(dtype)
    whole = layer(rows)
    off = (whole - rows.float() @ expected.T).abs().max() / whole.abs().max()
    assert off < {torch.float32: 1e-4, torch.bfloat16: 0.02}[dtype]
    for start, stop in ((0, 1), (1, 3), (0, 16), (8, 25), (3, 35), (0, 33), (50, 98)):
        assert torch.equal(layer(rows[start:stop]), whole[start:stop])


def test_every_kind_of_a_gguf_file_can_be_dequantised():
    assert {*KEPT_KINDS} == KINDS.keys() - {"NVFP4"}
