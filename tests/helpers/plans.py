"""Random attention plans, and attention as it is defined."""

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from pipespec.engine.attention.attention_plan import (
    AttentionPlan,
    LayerOptions,
    LayerPool,
    Reach,
    Segment,
)

HEADS, DIM, VALUE_DIM = 4, 8, 6
OPTIONS = st.builds(
    LayerOptions,
    scaling=st.just(0.3),
    window=st.sampled_from([None, 1, 6, 200]),
    chunk=st.sampled_from([None, None, 5, 64]),
    softcap=st.sampled_from([None, 1.5]),
    sinks=st.sampled_from([None, torch.tensor([0.5, -1.0, 2.0, 0.0])]),
)


@st.composite
def plans(draw: st.DrawFn, num_slots: int) -> AttentionPlan:
    """Plans of some requests, whose keys are any slots in any order: one behind another, shuffled
    within a range of their own, or scattered."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scattered, shuffled = draw(st.booleans()), draw(st.booleans())
    free = rng.permutation(num_slots) if scattered else np.arange(num_slots)
    parts, writes = [], []
    row = 0
    for _ in range(draw(st.integers(1, 4))):
        prefix = draw(st.sampled_from([0, 1, 5, 31, 64, 150]))
        alone = prefix > 0 and draw(st.booleans())  # one row, which is part of the text
        rows = 1 if alone else draw(st.integers(1, 7))
        tree = 0 if alone else rows + draw(st.integers(0, 40))
        if prefix + tree > len(free):
            break
        mine, free = np.split(free, [prefix + tree])
        mine = rng.permutation(mine) if shuffled else mine
        positions = prefix + rng.integers(0, 9, tree) if tree else np.zeros(0, np.int64)
        mask = rng.random((rows, tree)) < draw(st.sampled_from([0.0, 0.3, 1.0]))
        if tree:
            mask[:, tree - rows :] |= np.eye(rows, dtype=bool)
        writes.append(mine[-rows:])
        parts.append(
            Segment(
                slice(row, row + rows),
                positions[tree - rows :] if tree else np.array([prefix - 1]),
                mine[:prefix],
                mine[prefix:],
                positions,
                mask,
            )
        )
        row += rows
    return AttentionPlan(np.concatenate(writes), parts)


def seen_by(plan: AttentionPlan, reach: Reach) -> list[dict[int, int]]:
    """For each row the slots that it sees, with their positions."""
    found = []
    for part in plan.segments:
        for at, mask in zip(part.positions.tolist(), part.mask, strict=True):
            keys = dict(zip(part.prefix.tolist(), range(len(part.prefix)), strict=True))
            tree = zip(part.tree[mask].tolist(), part.tree_positions[mask].tolist(), strict=True)
            keys |= dict(tree)
            if reach.chunk is not None:
                own = at // reach.chunk
                keys = {slot: place for slot, place in keys.items() if place // reach.chunk >= own}
            elif reach.window is not None:
                keys = {slot: place for slot, place in keys.items() if at - place < reach.window}
            found.append(keys)
    return found


def given_rows(
    rows: int,
    num_slots: int,
    seed: int = 1,
    kv_heads: int = 2,
    heads: int = HEADS,
    dims: tuple[int, int] = (DIM, VALUE_DIM),
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor, LayerPool]:
    """Query, key, value and a pool, random."""
    rng = torch.Generator().manual_seed(seed)
    shapes = [(rows, heads, dims[0]), *((rows, kv_heads, dim) for dim in dims)]
    pools = [(num_slots + 1, kv_heads, dim) for dim in dims]
    query, key, value, keys, values = (
        torch.randn(*shape, generator=rng).to(dtype) for shape in (*shapes, *pools)
    )
    return query, key, value, LayerPool(keys, values)


def explicit(query: Tensor, pool: LayerPool, plan: AttentionPlan, options: LayerOptions) -> Tensor:
    """Attention as it is defined, in float64, row by row."""
    group = query.shape[1] // pool.keys.shape[1]
    out = []
    for row, seen in zip(query.double(), seen_by(plan, options.reach), strict=True):
        k, v = (
            each[list(seen)].double().repeat_interleave(group, 1)
            for each in (pool.keys, pool.values)
        )
        scores = torch.einsum("hd,nhd->hn", row, k) * options.scaling
        if options.softcap is not None:
            scores = torch.tanh(scores / options.softcap) * options.softcap
        if options.sinks is not None:
            scores = torch.cat((scores, options.sinks.double()[:, None]), 1)
        out.append(torch.einsum("hn,nhd->hd", scores.softmax(-1)[:, : len(seen)], v))
    return torch.stack(out).float()
