"""The self-test of attention backends, on this machine and with the shapes of a slice.

A backend computes attention for random plans: several requests, windows, empty prefixes, slots in
any order. The result is compared with PyTorch's attention in float64. Its error may be twice that
of PyTorch's attention in the model's type.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pipespec.engine.attention.attention_plan import (
    AttentionBackend,
    AttentionPlan,
    LayerOptions,
    LayerPool,
    Segment,
)
from pipespec.engine.attention.sdpa import SdpaBackend

# Slots of the pools of the self-test.
NUM_SLOTS = 1024
# The error that is allowed where PyTorch's attention happens to be exact: half of the type's
# epsilon, and at least this: sums of 256 products in float32, in another order.
LEAST = 5e-6
# For each plan: rows, prefix keys and other tree keys of each request. -1: a single row that is
# part of the prefix, without tree keys.
PLANS = (
    ((1, 200, 0),),
    ((1, 90, -1), (5, 20, 3), (1, 1, -1)),
    ((40, 130, 50),),
    ((1, 0, 0), (3, 65, 30), (17, 7, 70), (1, 300, 3)),
)


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """The query heads, options and KV pool of a layer."""

    heads: int
    options: LayerOptions
    pool: LayerPool

    @property
    def shape(self) -> tuple[object, ...]:
        """Layers of the same shape need one self-test."""
        options = self.options
        capped = (options.softcap, options.sinks is not None, options.scaling, options.reach)
        return (self.heads, self.pool.keys.shape[1:], self.pool.values.shape[1:], *capped)


def self_test_error(
    backend: AttentionBackend, num_slots: int, layers: Iterable[AttentionLayer]
) -> str | None:
    """Why a backend for pools of so many slots fails, as a clause; None: it passes."""
    plans = [_plan(parts, num_slots, seed) for seed, parts in enumerate(PLANS)]
    for layer in {layer.shape: layer for layer in layers}.values():
        for plan in plans:
            wrong = _compared(backend, plan, num_slots, layer)
            if wrong is not None:
                return wrong
    return None


def _compared(
    backend: AttentionBackend, plan: AttentionPlan, num_slots: int, layer: AttentionLayer
) -> str | None:
    like = layer.pool.keys
    rng = torch.Generator(like.device).manual_seed(len(plan.write))

    def random(*shape: int) -> Tensor:
        wide = torch.randn(*shape, generator=rng, device=like.device, dtype=torch.float32)
        return wide.to(like.dtype)

    rows, (_, kv_heads, dim), value_dim = len(plan.write), like.shape, layer.pool.values.shape[2]
    query, key = random(rows, layer.heads, dim), random(rows, kv_heads, dim)
    value = random(rows, kv_heads, value_dim)
    keys = random(num_slots + 1, kv_heads, dim)
    values = random(num_slots + 1, kv_heads, value_dim)
    given = []
    others = (SdpaBackend(), like.dtype), (SdpaBackend(), torch.float64)
    for each, dtype in ((backend, like.dtype), *others):
        pool = LayerPool(keys.to(dtype, copy=True), values.to(dtype, copy=True))
        each.prepare(plan)
        of_rows = query.to(dtype), key.to(dtype), value.to(dtype)
        given.append(each.attend(*of_rows, pool, layer.options))
        if each is backend:
            write = torch.from_numpy(plan.write).to(like.device)
            beside = torch.ones(num_slots, dtype=torch.bool, device=like.device)
            beside[write] = False
            kept = pool.keys[:-1][beside].equal(keys[:-1][beside])
            if not (kept and pool.keys[write].equal(key) and pool.values[write].equal(value)):
                return "it stores K and V in other slots than those of the batch"
    *found, expected = given
    off, usual = (float((each.to(expected) - expected).abs().max()) for each in found)
    allowed = 2 * usual + max(torch.finfo(like.dtype).eps / 2, LEAST)
    if off <= allowed:
        return None
    return f"its error is {off:.2g} where {allowed:.2g} is allowed"


def _plan(parts: tuple[tuple[int, int, int], ...], num_slots: int, seed: int) -> AttentionPlan:
    """A random plan of requests with so many rows, prefix keys and other tree keys."""
    rng = np.random.default_rng(seed)
    slots, row = rng.permutation(num_slots), 0
    segments, write = [], []
    for rows, length, others in parts:
        size = rows + others
        mine, slots = np.split(slots, [length + size])
        at = length + rng.integers(0, 12, size)
        mask = rng.random((rows, size)) < 0.4
        if size:
            mask[:, size - rows :] |= np.eye(rows, dtype=bool)
        own = at[size - rows :] if size else np.array([length - 1])
        some, row = slice(row, row + rows), row + rows
        segments.append(Segment(some, own, mine[:length], mine[length:], at, mask))
        write.append(mine[len(mine) - rows :])
    return AttentionPlan(np.concatenate(write), segments, imagined=True)
