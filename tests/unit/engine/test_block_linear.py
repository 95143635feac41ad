"""Layers whose weights stay in blocks, beside the dequantised weights."""

from __future__ import annotations

import pytest
import torch

from pipespec.engine import dequantised, fill_in_parts
from pipespec.engine.block_linear import BlockLinear
from pipespec.engine.checkpoint.formats.gguf import INT4_BLOCKS, KEPT_BLOCKS
from pipespec.engine.checkpoint.formats.gguf_blocks import INT4_KINDS, KINDS, BlockWeights
from tests.unit.engine.checkpoint.formats.test_gguf_blocks import drawn

CPU = torch.device("cpu")
OUT = 7


def layer_of(kind: str, factor: float = 1.0, out: int = OUT) -> tuple[BlockLinear, torch.Tensor]:
    """A layer with random weights, and these in float32."""
    rows = torch.from_numpy(drawn(kind, out, 512 // KINDS[kind].size))
    weights = BlockWeights(rows, kind, factor)
    layer = BlockLinear("it", out, 512, kind=kind)
    layer.fill(weights, CPU)
    return layer, weights.dense()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_dequantised_exactly(kind, dtype):
    layer, expected = layer_of(kind)
    found = torch.empty(4, 512, dtype=dtype)
    layer.dequantise(2, found)
    assert torch.equal(found, expected[2:6].to(dtype))


def test_all_weights_are_multiplied_by_the_factor_of_the_matrix():
    layer, expected = layer_of("NVFP4", factor=0.25)
    found = torch.empty(OUT, 512)
    layer.dequantise(0, found)
    assert torch.equal(found, expected)
    assert torch.equal(expected, layer_of("NVFP4")[1] / 4)


@pytest.mark.parametrize("some", [1, 1 << 21])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_its_batch(kind, dtype, some, monkeypatch):
    """Whether the weights are dequantised at once or some rows at a time."""
    monkeypatch.setitem(dequantised.CHUNK, "cpu", some)
    layer, expected = layer_of(kind, out=40)
    rows = torch.randn(100, 512, generator=torch.Generator().manual_seed(1)).to(dtype)
    whole = layer(rows)
    off = (whole - rows.float() @ expected.T).abs().max() / whole.abs().max()
    assert off < {torch.float32: 1e-4, torch.bfloat16: 0.02}[dtype]
    for start, stop in ((0, 1), (1, 3), (0, 16), (8, 25), (3, 35), (0, 33), (50, 98)):
        assert torch.equal(layer(rows[start:stop]), whole[start:stop])


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_unpacked_some_rows_at_a_time_with_the_same_result(kind, monkeypatch):
    """The last part has fewer rows."""
    weights = BlockWeights(torch.from_numpy(drawn(kind, 208, 512 // KINDS[kind].size)), kind)
    held = []
    for unpacked in (1, 128 * 512, 1 << 20):
        monkeypatch.setattr(fill_in_parts, "UNPACKED", unpacked)
        layer = BlockLinear("it", 208, 512, kind=kind)
        layer.fill(weights, CPU)
        held.append(dict(layer.named_buffers()))
    for found in held[:-1]:
        assert found.keys() == held[-1].keys()
        assert all(torch.equal(each, held[-1][name]) for name, each in found.items())


def test_memory_is_counted_as_it_is_held():
    """Of each kind: planes and factors, or packed integers with two bfloat16 for a group."""
    assert tuple(INT4_BLOCKS) == INT4_KINDS
    assert KEPT_BLOCKS.keys() == KINDS.keys() - {"NVFP4"}
    for kind, (num_bytes, size) in KEPT_BLOCKS.items():
        layer, _ = layer_of(kind)
        held = sum(each.nbytes for each in layer.buffers())
        assert held * size == OUT * 512 * num_bytes
        if kind in INT4_KINDS:
            packed = KINDS[kind].size // 2 + KINDS[kind].size // KINDS[kind].group * 4
            assert INT4_BLOCKS[kind] == (packed, KINDS[kind].size)
