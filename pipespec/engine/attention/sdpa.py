"""Attention with PyTorch's scaled_dot_product_attention: on every device, without other libraries.

Each segment is one masked call over its gathered prefix and tree keys. Query heads that share a KV
head are passed as rows: PyTorch's own grouping would copy K and V for each query head. What depends
only on the plan and the window or chunk (slots and mask) is computed in the first layer and reused
in the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pipespec.engine.attention.attention_plan import (
    AttentionPlan,
    LayerOptions,
    LayerPool,
    Reach,
    Segment,
    unpacked,
)
from pipespec.system.device_copy import to_device, to_device_together

# Slots whose spread (highest - lowest over count) is below this are read as one slice of the pool,
# with a mask for the unused ones, instead of being gathered in every layer. On a CPU a gather costs
# as much as attending to a seventh of the keys with 32 rows, or to half of them with one row.
_MAX_SPREAD = 1.1
# CUDA's kernels read a mask 16 bytes at a time, from its beginning on: each segment's begins at a
# multiple of so many numbers.
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True, eq=False)
class _SegmentKeys:
    """The keys of one segment within reach of its rows: `index` selects the slots; `bias` `[rows,
    keys]` is 0 where a row sees a key, else -inf, or None where every row sees every key. For
    `_fused` it has a row for each query head of a group."""

    rows: slice
    index: slice | Tensor
    bias: Tensor | None

    def read(self, pool: Tensor) -> Tensor:
        if isinstance(self.index, slice):
            return pool[self.index]
        return pool.index_select(0, self.index)  # four times as fast as pool[index]


class SdpaBackend:
    """See `AttentionBackend`. With `batch_invariant` it computes in float64, so that a row rounded
    to the model's type does not depend on the other rows of its batch."""

    def __init__(self, *, batch_invariant: bool = False) -> None:
        self.batch_invariant = batch_invariant
        self._plan: AttentionPlan | None = None
        # By reach and number of query heads per KV head: the rows' slots and the keys.
        self._prepared: dict[tuple[Reach, int], tuple[Tensor, list[_SegmentKeys]]] = {}

    def prepare(self, plan: AttentionPlan) -> None:
        self._plan = plan
        self._prepared.clear()

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, pool: LayerPool, options: LayerOptions
    ) -> Tensor:
        plain = options.softcap is None and options.sinks is None
        attend_segment = _fused if plain else _explicit
        dtype = query.dtype
        if self.batch_invariant:
            query = query.double()
        group = query.shape[1] // key.shape[1] if plain else 1
        wanted = options.reach, group
        if wanted not in self._prepared:
            assert self._plan is not None
            self._prepared[wanted] = _prepared(self._plan, *wanted, query)
        write, segments = self._prepared[wanted]
        pool.store(write, key, value)
        if len(segments) == 1:
            return attend_segment(query, pool, segments[0], options).to(dtype)
        found = [attend_segment(query[s.rows], pool, s, options) for s in segments]
        return torch.cat(found).to(dtype)


def _fused(query: Tensor, pool: LayerPool, keys: _SegmentKeys, options: LayerOptions) -> Tensor:
    rows, heads, _ = query.shape
    k, v = (unpacked(keys.read(each), query.dtype) for each in (pool.keys, pool.values))
    kv_heads = k.shape[1]
    group = heads // kv_heads
    grouped = query.view(rows, kv_heads, group, -1).transpose(0, 1)
    out = scaled_dot_product_attention(
        grouped.reshape(1, kv_heads, rows * group, -1),
        k.transpose(0, 1).unsqueeze(0),
        v.transpose(0, 1).unsqueeze(0),
        attn_mask=keys.bias,
        scale=options.scaling,
    )
    return out.view(kv_heads, rows, group, -1).transpose(0, 1).reshape(rows, heads, -1)


def _explicit(query: Tensor, pool: LayerPool, keys: _SegmentKeys, options: LayerOptions) -> Tensor:
    """For layers with softcap or sinks, which SDPA does not support."""
    rows, heads, _ = query.shape
    k, v = (unpacked(keys.read(each), query.dtype) for each in (pool.keys, pool.values))
    grouped = query.view(rows, k.shape[1], -1, query.shape[2])
    scores = torch.einsum("rkgd,nkd->kgrn", grouped, k) * options.scaling
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if keys.bias is not None:
        scores = scores + keys.bias
    if options.sinks is not None:
        sinks = options.sinks.to(scores.dtype).view(*scores.shape[:2], 1, 1)
        scores = torch.cat([scores, sinks.expand(-1, -1, rows, 1)], dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(
        v.dtype
    )[..., : len(k)]
    return torch.einsum("kgrn,nkd->rkgd", weights, v).reshape(rows, heads, v.shape[2])


def _prepared(
    plan: AttentionPlan, reach: Reach, group: int, like: Tensor
) -> tuple[Tensor, list[_SegmentKeys]]:
    """The rows' slots and the keys of each segment, on the device."""
    assert len(plan.write) == len(like)
    read = [_read(segment, reach) for segment in plan.segments]
    scattered = [index for index, _ in read if not isinstance(index, slice)]
    indices = iter(to_device_together(scattered, like.device))
    hidden = [np.repeat(~seen, group, 0) for _, seen in read if seen is not None]
    biases = iter(_biases(hidden, like))
    keys = [
        _SegmentKeys(
            segment.rows,
            index if isinstance(index, slice) else next(indices),
            None if seen is None else next(biases),
        )
        for segment, (index, seen) in zip(plan.segments, read, strict=True)
    ]
    return to_device(plan.write, like.device), keys


def _biases(hidden: list[np.ndarray], like: Tensor) -> list[Tensor]:
    """For matrices of what is hidden, on the device: -inf where it is, else 0; transferred in one
    copy."""
    if not hidden:
        return []
    starts = np.cumsum([0, *(-(-each.size // _ALIGNMENT) * _ALIGNMENT for each in hidden)]).tolist()
    joined = np.zeros(starts[-1], bool)
    for each, start in zip(hidden, starts, strict=False):
        joined[start : start + each.size] = each.ravel()
    bias = torch.zeros(len(joined), dtype=like.dtype)
    bias = to_device(bias.masked_fill_(torch.from_numpy(joined), -torch.inf), like.device)
    return [
        bias.as_strided(each.shape, (each.shape[1], 1), start)
        for each, start in zip(hidden, starts, strict=False)
    ]


def _read(segment: Segment, reach: Reach) -> tuple[slice | np.ndarray, np.ndarray | None]:
    """The slots that a segment reads, and which of its rows sees which of them, `[rows, keys]`
    (None: each sees all)."""
    prefix, mask = segment.prefix, segment.mask
    in_prefix = None  # which rows see which of the prefix; None: all
    earliest = reach.earliest(segment.positions)
    if earliest is not None:
        # The first row limits what any row sees of the prefix.
        first = min(max(0, int(earliest.min())), len(prefix))
        prefix = prefix[first:]
        in_prefix = np.arange(first, first + len(prefix)) >= earliest[:, None]
        mask = mask & (segment.tree_positions >= earliest[:, None])
    slots = np.concatenate((prefix, segment.tree))
    lowest, highest = int(slots.min()), int(slots.max())
    dense = highest - lowest < _MAX_SPREAD * len(slots)
    index = slice(lowest, highest + 1) if dense else slots
    holes = dense and highest - lowest >= len(slots)
    if not holes and mask.all() and (in_prefix is None or in_prefix.all()):
        return index, None
    seen = np.ones((len(mask), len(slots)), bool)
    seen[:, len(prefix) :] = mask
    if in_prefix is not None:
        seen[:, : len(prefix)] = in_prefix
    if dense:
        spread = np.zeros((len(seen), highest - lowest + 1), bool)
        spread[:, slots - lowest] = seen
        seen = spread
    return index, seen
