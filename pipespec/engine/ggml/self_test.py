"""Tests a ggml library in a process of its own: `python -m pipespec.engine.ggml.self_test FOLDER`.

Of each type, products with weights that ggml quantised, as one matrix and as the experts of a
mixture, where they are and laid out anew, are compared with those of the weights that NumPy
dequantises, and each row with the same row in a larger batch, to the bit. Exits with 1 after a line
that says what is wrong.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from pipespec.engine.ggml.compute import Computer, expert_product, laid_out, matrix, product
from pipespec.engine.ggml.library import TYPES, Library

# Rows and columns, the experts that the rows are of, and the numbers of rows of the batches.
SHAPE = (40, 768)
EXPERTS, CHOSEN = 5, 3
BATCHES = (1, 2, 3, 8, 33)
# Those of many rows at a time.
WIDE_BATCHES = (8, 16, 24, 72)
# The largest error of a product, relative to the largest number: rows are rounded to 8 bits.
TOLERANCE = 0.02


def fault(library: Library, kind: str) -> str | None:
    """What is wrong with the products of a type, or None."""
    from gguf import GGMLQuantizationType, dequantize

    random = np.random.default_rng(0)
    weights = random.standard_normal(SHAPE, np.float32)
    inputs = random.standard_normal((WIDE_BATCHES[-1], SHAPE[1]), np.float32)
    blocks = quantised(library, kind, weights)
    computer = Computer(library, threads=2)
    stored = matrix(library, kind, blocks, SHAPE)
    whole = product(computer, stored, inputs)
    anew = laid_out(library, kind, blocks, SHAPE)
    whole_anew, wide = (product(computer, anew, inputs, wide=wide) for wide in (False, True))
    exact = inputs @ dequantize(blocks, GGMLQuantizationType[kind]).reshape(SHAPE).T
    chosen = np.argsort(random.random((len(inputs), EXPERTS)))[:, :CHOSEN].astype(np.int32)
    stack = matrix(library, kind, blocks, (EXPERTS, SHAPE[0] // EXPERTS, SHAPE[1]))
    rows = inputs[:, None]
    of_experts = expert_product(computer, stack, rows, chosen)
    by_expert = exact.reshape(len(inputs), EXPERTS, -1)
    expected = np.take_along_axis(by_expert, chosen[:, :, None], 1)
    results = (whole, exact), (whole_anew, exact), (wide, exact), (of_experts, expected)
    for found, right in results:
        off = float(np.abs(found - right).max() / np.abs(exact).max())
        if not off <= TOLERANCE:
            return f"the products of {kind} are wrong by {off:.3f} of the largest"
    for size in BATCHES:
        alone = product(computer, stored, inputs[:size])
        experts = expert_product(computer, stack, rows[:size], chosen[:size])
        pairs = (alone, whole), (product(computer, anew, inputs[:size]), whole_anew)
        if not all(np.array_equal(a, b[:size]) for a, b in (*pairs, (experts, of_experts))):
            return f"a row of {kind} depends on its batch, in one of {size}"
    for size in WIDE_BATCHES:
        if not np.array_equal(product(computer, anew, inputs[:size], wide=True), wide[:size]):
            return f"a row of {kind} depends on its batch, in one of {size} at a time"
    return None


def quantised(library: Library, kind: str, weights: np.ndarray) -> np.ndarray:
    """A float32 matrix in blocks of a type, uint8 `[rows, bytes]`, or numbers of plain types."""
    rows, columns = weights.shape
    blocks = np.empty((rows, library.row_size(TYPES[kind], columns)), np.uint8)
    importance = np.ones(columns, np.float32)
    library.quantize_chunk(
        TYPES[kind],
        weights.ctypes.data,
        blocks.ctypes.data,
        0,
        rows,
        columns,
        importance.ctypes.data,
    )
    plain = {"F32": np.float32, "F16": np.float16}
    return blocks.view(plain[kind]) if kind in plain else blocks


if __name__ == "__main__":
    library = Library(Path(sys.argv[1]))
    for name in TYPES:
        if (wrong := fault(library, name)) is not None:
            print(wrong)
            raise SystemExit(1)
