"""The self-test of attention backends, on this machine and with the shapes of a slice.

A backend computes attention for random plans: several requests, windows, empty prefixes, slots in
any order. The result is compared with explicit attention in float32 (float64 for a model in
float32). Its error may be twice that of PyTorch's own attention in the model's type.
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
    Reach,
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
    given = {}
    for name, each in (("backend", backend), ("sdpa", SdpaBackend())):
        pool = LayerPool(keys.clone(), values.clone())
        each.prepare(plan)
        given[name] = each.attend(query, key, value, pool, layer.options)
        if name == "backend":
            write = torch.from_numpy(plan.write).to(like.device)
            others = torch.ones(num_slots, dtype=torch.bool, device=like.device)
            others[write] = False
            kept = pool.keys[:-1][others].equal(keys[:-1][others])
            if not (kept and pool.keys[write].equal(key) and pool.values[write].equal(value)):
                return "it stores K and V in other slots than those of the batch"
            expected = reference_attention(query, pool, plan, layer.options)
    off, usual = (float((given[n].to(expected) - expected).abs().max()) for n in given)
    allowed = 2 * usual + max(torch.finfo(like.dtype).eps / 2, LEAST)
    if off <= allowed:
        return None
    return f"its error is {off:.2g} where {allowed:.2g} is allowed"


def reference_attention(
    query: Tensor, pool: LayerPool, plan: AttentionPlan, options: LayerOptions
) -> Tensor:
    """Attention by its definition, `[rows, heads, value_dim]`, in a wider type than the model's."""
    wide = torch.float64 if query.dtype == torch.float32 else torch.float32
    heads, kv_heads = query.shape[1], pool.keys.shape[1]
    seen = torch.from_numpy(_seen(plan, len(pool.keys), options.reach)).to(query.device)
    keys, values = (
        each.to(wide).repeat_interleave(heads // kv_heads, 1) for each in (pool.keys, pool.values)
    )
    scores = torch.einsum("rhd,nhd->rhn", query.to(wide), keys) * options.scaling
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    if options.sinks is not None:
        sinks = options.sinks.to(wide)[None, :, None].expand(len(query), -1, 1)
        scores = torch.cat((scores, sinks), -1)
    return torch.einsum("rhn,nhd->rhd", scores.softmax(-1)[..., : len(keys)], values)


def _seen(plan: AttentionPlan, num_slots: int, reach: Reach) -> np.ndarray:
    """Which row sees which slot, `[rows, slots]`."""
    seen = np.zeros((len(plan.write), num_slots), bool)
    for part in plan.segments():
        earliest = reach.earliest(part.positions)
        since = np.zeros((len(part.positions), 1)) if earliest is None else earliest[:, None]
        seen[part.rows, part.prefix] = np.arange(len(part.prefix)) >= since
        seen[part.rows, part.tree] = part.mask & (part.tree_positions >= since)
    return seen


def _plan(parts: tuple[tuple[int, int, int], ...], num_slots: int, seed: int) -> AttentionPlan:
    """A random plan of requests with so many rows, prefix keys and other tree keys."""
    rng = np.random.default_rng(seed)
    rows, prefix, others = np.array(parts).T
    tree = rows + others
    slots = rng.permutation(num_slots)[: int((prefix + tree).sum())]
    starts = np.concatenate(([0], np.cumsum(prefix + tree)))
    pages = np.zeros((len(parts), max(1, int(prefix.max()))), np.int64)
    write, positions, keys, keys_at, masks = [], [], [], [], []
    for i, (count, length, size) in enumerate(zip(rows, prefix, tree, strict=True)):
        mine = slots[starts[i] : starts[i + 1]]
        pages[i, :length] = mine[:length]
        at = length + rng.integers(0, 12, size) if size else np.zeros(0, np.int64)
        mask = rng.random((count, size)) < 0.4
        if size:
            mask[:, size - count :] |= np.eye(count, dtype=bool)
        write.append(mine[len(mine) - count :])
        positions.append(at[size - count :] if size else np.array([length - 1]))
        keys.append(mine[length:])
        keys_at.append(at)
        masks.append(mask.ravel())
    return AttentionPlan(
        write=np.concatenate(write),
        positions=np.concatenate(positions),
        row_start=np.concatenate(([0], np.cumsum(rows))),
        pages=pages,
        page_row=np.arange(len(parts)),
        prefix_length=prefix,
        tree=np.concatenate(keys),
        tree_positions=np.concatenate(keys_at),
        tree_start=np.concatenate(([0], np.cumsum(tree))),
        mask=np.concatenate(masks),
        num_committed=np.zeros(len(parts), np.int64),
        keeps_state=np.zeros(len(parts), np.int64),
        state_number=np.zeros(len(parts), np.int64),
        imagined=True,
    )
