"""Weights in the types of ggml."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class GgmlWeights:
    """A matrix of one of `library.TYPES`.

    Attributes:
        parts: its blocks, uint8 `[out, bytes]`, or numbers `[out, in]`; or those of two matrices,
            whose rows it has in turns.
        kind: the type.
        shape: rows and columns.
        order: row i is row `order[i]` of the only part, int64 `[out]`; None: they are in order.
    """

    parts: tuple[np.ndarray, ...]
    kind: str
    shape: tuple[int, int]
    order: Tensor | None = None
