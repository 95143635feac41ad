"""What a step's rows may attend to, and the one function type behind which backends stand.

A *plan* describes one batch on one stage. Its slots index the KV pool of every layer of the
slice alike (`[slots, kv_heads, head_dim]`), so one plan serves all of them:

    write                     the batch's rows store their K and V here first
    segment                   one request's rows: what they share, what each of them sees
      prefix  p0 p1 p2 ...    the committed sequence; its positions are 0, 1, 2, ...
      tree    t0 t1 t2 ...    live tree nodes, or the prompt chunk; who sees whom is `mask`

A row attends to all of its segment's prefix and to the tree keys that its mask row allows,
both only within the layer's sliding window, where it has one. The tree keys include the rows
themselves. A backend sees no tree and no request, only this.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """The rows of one request in one batch, and the keys they see. All tensors are on the CPU.

    `rows` is the segment's contiguous part of the batch; `positions` int64 `[rows]`. `prefix`
    int64 `[p]` holds the slots of positions 0..p-1; `tree` int64 `[t]` those of the tree keys at
    `tree_positions` int64 `[t]`; `mask` bool `[rows, t]` is True where a row sees a tree key.
    """

    rows: slice
    positions: Tensor
    prefix: Tensor
    tree: Tensor
    tree_positions: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPlan:
    """Where one batch's rows store their K and V, and what they attend to.

    `write` int64 `[rows]`, on the CPU: the slot of each row. The segments cover the rows in order.
    `cache` is scratch space of the backend: what it derives from the plan once (masks, gather
    indices) and reuses in every layer. Neither it nor the plan outlives the batch.
    """

    write: Tensor
    segments: Sequence[Segment]
    cache: dict[Hashable, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """What a layer asks of attention beyond the plan.

    `window`: a row at position q sees keys at positions greater than q - window. `softcap`
    bounds the scores by `softcap * tanh(score / softcap)`. `sinks` `[heads]` are learned scores
    that take part in the softmax and have no value.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


@dataclass(slots=True, eq=False)
class LayerPool:
    """K `[slots, kv_heads, head_dim]` and V `[slots, kv_heads, value_dim]` of one layer."""

    keys: Tensor
    values: Tensor

    @classmethod
    def allocate(cls, num_slots: int, key: Tensor, value: Tensor) -> LayerPool:
        """A pool of `num_slots` rows like those of `key` and `value` (`[rows, kv_heads, dim]`)."""
        return cls(_zeros(num_slots, key), _zeros(num_slots, value))

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


def _zeros(num_slots: int, like: Tensor) -> Tensor:
    """In main memory of pages that take none until a slot of theirs is used: many pools are made
    for more requests than ever come."""
    shape = (num_slots, *like.shape[1:])
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    pages = np.zeros(math.prod(shape) * like.itemsize, np.uint8)
    return torch.from_numpy(pages).view(like.dtype).view(shape)


class AttentionFn(Protocol):
    """An attention backend: stores the rows' K and V at `plan.write`, then attends."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pool: LayerPool,
        plan: AttentionPlan,
        options: LayerOptions,
    ) -> Tensor:
        """`query` `[rows, heads, head_dim]`, `key`/`value` `[rows, kv_heads, dim]` -> `[rows,
        heads, value_dim]`. Heads are grouped: query head h reads KV head h * kv_heads // heads.
        """
        ...


def causal_plan(prefix: Tensor, write: Tensor) -> AttentionPlan:
    """The plan of one plain chunk of text: each row sees `prefix` and the rows up to itself.

    `prefix` int64 `[p]` and `write` int64 `[rows]` are slots; the rows' positions are p, p+1, ...
    """
    rows = len(write)
    positions = torch.arange(len(prefix), len(prefix) + rows)
    mask = torch.ones(rows, rows, dtype=torch.bool).tril()
    return AttentionPlan(
        write, (Segment(slice(0, rows), positions, prefix, write, positions, mask),)
    )
