"""Filling a layer with weights of few bits some rows at a time, which bounds the memory it takes.

Unpacked, a matrix would take several times the memory that the layer holds in the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipespec.errors import ModelError

# Weights that are unpacked at a time.
UNPACKED = 1 << 16
# Rows of a tile of packed integers.
TILE = 64


def row_parts(shape: tuple[int, int], tile: int = TILE) -> Iterator[slice]:
    """The rows of a matrix `[out, in]`, some at a time: all parts but the last have a multiple of
    `tile` rows."""
    out, inputs = shape
    step = max(UNPACKED // inputs // tile, 1) * tile
    for start in range(0, out, step):
        yield slice(start, min(start + step, out))


def require_shape(layer: Any, found: tuple[int, int]) -> tuple[int, int]:
    """The shape of the weights of a layer. Raises ModelError if the weights found have another."""
    expected = layer.out_features, layer.in_features
    if found != expected:
        raise ModelError(f"it is {list(found)}, but must be {list(expected)}")
    return expected
