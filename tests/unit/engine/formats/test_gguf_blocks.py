"""Blocks of GGUF files beside the reader of the package gguf."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from pipespec.engine.formats.gguf import INT4_BLOCKS, KEPT_BLOCKS
from pipespec.engine.formats.gguf_blocks import INT4_KINDS, KINDS, BlockWeights

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


@pytest.mark.parametrize("kind", HALVES)
def test_weights_equal_those_of_gguf_bit_for_bit(kind):
    found = KINDS[kind]
    stored = GGMLQuantizationType[kind]
    assert GGML_QUANT_SIZES[stored] == (found.size, found.num_bytes)
    generator = np.random.default_rng(0)
    blocks = generator.integers(0, 256, (24, found.num_bytes), np.uint8)
    for at in HALVES[kind]:
        halves = generator.normal(0, 0.01, (24, 1)).astype(np.float16)
        blocks[:, at : at + 2] = halves.view(np.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = generator.integers(110, 130, 24)
    rows = blocks.reshape(6, -1)
    weights = BlockWeights(torch.from_numpy(rows.copy()), kind)
    np.testing.assert_array_equal(weights.dense().numpy(), dequantize(rows, stored))
    codes, scales, _ = weights.grouped()
    assert tuple(codes.shape) == weights.shape == (6, 4 * found.size)
    assert scales.shape[1] * found.group == weights.shape[1]


def test_memory_is_counted_as_it_is_held():
    """Of each kind: its own bytes, or packed integers with two bfloat16 for a group."""
    assert tuple(INT4_BLOCKS) == INT4_KINDS
    assert KEPT_BLOCKS.keys() == KINDS.keys() - {"NVFP4"}
    for kind, held in KEPT_BLOCKS.items():
        found = KINDS[kind]
        assert held == (found.num_bytes, found.size)
        if kind in INT4_KINDS:
            packed = found.size // 2 + found.size // found.group * 4
            assert INT4_BLOCKS[kind] == (packed, found.size)
