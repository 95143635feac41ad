"""Blocks of GGUF files beside the reader of the package gguf."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from pipespec.engine.formats.gguf_blocks import KINDS, BlockWeights, block_sizes

# The places of the 16-bit floats in a block.
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "MXFP4": (),
}


def drawn(kind: str, out: int, blocks: int) -> np.ndarray:
    """Rows of so many random blocks, `[out, bytes]`."""
    _, num_bytes = block_sizes(kind)
    generator = np.random.default_rng(0)
    rows = generator.integers(0, 256, (out * blocks, num_bytes), np.uint8)
    for at in HALVES.get(kind, ()):
        halves = generator.normal(0, 0.01, (len(rows), 1)).astype(np.float16)
        rows[:, at : at + 2] = halves.view(np.uint8)
    if kind == "MXFP4":
        rows[:, 0] = generator.integers(110, 130, len(rows))
    if kind == "NVFP4":
        rows[:, 0] = generator.integers(0, 127, len(rows))
    return rows.reshape(out, -1)


@pytest.mark.parametrize("kind", HALVES)
def test_weights_equal_those_of_gguf_bit_for_bit(kind):
    stored = GGMLQuantizationType[kind]
    rows = drawn(kind, 6, 4)
    weights = BlockWeights(torch.from_numpy(rows.copy()), kind)
    assert weights.shape == (6, 4 * block_sizes(kind)[0])
    np.testing.assert_array_equal(weights.dense().numpy(), dequantize(rows, stored))


def test_every_kind_is_compared():
    assert HALVES.keys() == KINDS.keys() - {"NVFP4"}
