"""The backends against attention written out key by key."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pipespec.engine.attention import sdpa, select
from pipespec.engine.attention.attention_plan import (
    AttentionBackend,
    AttentionPlan,
    LayerOptions,
    LayerPool,
    Segment,
    causal_plan,
)
from pipespec.engine.attention.sdpa import SdpaBackend
from pipespec.engine.attention.torch_backend import TorchBackend
from tests.helpers.plans import joined, plans

NUM_SLOTS = 40
MANY_SLOTS = 300
BACKENDS: dict[str, Callable[[], AttentionBackend]] = {
    "sdpa": SdpaBackend,
    "static": lambda: TorchBackend("cpu", NUM_SLOTS),
}
every_backend = pytest.mark.parametrize(
    "backend", [made() for made in BACKENDS.values()], ids=[*BACKENDS]
)


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _pool(kv_heads: int, head_dim: int, value_dim: int) -> LayerPool:
    return LayerPool(
        _random(NUM_SLOTS + 1, kv_heads, head_dim, seed=1),
        _random(NUM_SLOTS + 1, kv_heads, value_dim, seed=2),
    )


def _segment(
    start: int, rows: int, prefix: int, tree: int, slots: np.ndarray, seed: int
) -> Segment:
    """A segment whose last `rows` tree keys are its own rows, with a random mask otherwise."""
    rng = np.random.default_rng(seed)
    tree_positions = prefix + rng.integers(0, 6, tree)
    mask = rng.random((rows, tree)) < 0.5
    mask[:, tree - rows :] |= np.eye(rows, dtype=bool)
    return Segment(
        rows=slice(start, start + rows),
        positions=tree_positions[tree - rows :],
        prefix=slots[:prefix],
        tree=slots[prefix : prefix + tree],
        tree_positions=tree_positions,
        mask=mask,
    )


def _by_hand(query: Tensor, pool: LayerPool, plan: AttentionPlan, options: LayerOptions) -> Tensor:
    """The definition: one row, one head, one key at a time."""
    rows, heads, _ = query.shape
    group = heads // pool.keys.shape[1]
    out = torch.zeros(rows, heads, pool.values.shape[2])
    for segment in plan.segments():
        for i, row in enumerate(range(segment.rows.start, segment.rows.stop)):
            slots = [(int(s), p) for p, s in enumerate(segment.prefix)]
            slots += [
                (int(segment.tree[j]), int(segment.tree_positions[j]))
                for j in range(len(segment.tree))
                if segment.mask[i, j]
            ]
            if options.window is not None:
                q = int(segment.positions[i])
                slots = [(s, p) for s, p in slots if q - p < options.window]
            if options.chunk is not None:
                q = int(segment.positions[i]) // options.chunk
                slots = [(s, p) for s, p in slots if p // options.chunk >= q]
            for head in range(heads):
                scores = [
                    float(query[row, head] @ pool.keys[s, head // group]) * options.scaling
                    for s, _ in slots
                ]
                if options.softcap is not None:
                    scores = [options.softcap * math.tanh(x / options.softcap) for x in scores]
                total = sum(math.exp(x) for x in scores)
                if options.sinks is not None:
                    total += math.exp(float(options.sinks[head]))
                for (slot, _), score in zip(slots, scores, strict=True):
                    weight = math.exp(score) / total
                    out[row, head] += weight * pool.values[slot, head // group]
    return out


@pytest.mark.parametrize("slots", ["ascending", "shuffled", "scattered"])
@pytest.mark.parametrize(
    "options",
    [
        LayerOptions(0.3),
        LayerOptions(0.3, window=4),
        LayerOptions(0.3, window=100),
        LayerOptions(0.3, chunk=4),
        LayerOptions(0.3, chunk=7),
        LayerOptions(0.3, softcap=1.5),
        LayerOptions(0.3, window=4, softcap=1.5, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    ],
    ids=[
        "plain",
        "window",
        "wide window",
        "chunk",
        "wide chunk",
        "softcap",
        "window, softcap and sinks",
    ],
)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@every_backend
def test_rows_attend_to_the_keys_of_the_plan(backend, slots, options, kv_heads):
    rng = np.random.default_rng(0)
    order = np.arange(NUM_SLOTS)
    if slots == "shuffled":  # within each segment's own range
        order = np.concatenate([rng.permutation(part) for part in np.split(order, [8, 22, 25])])
    if slots == "scattered":
        order = rng.permutation(NUM_SLOTS)
    segments = (
        _segment(0, rows=1, prefix=7, tree=1, slots=order[:8], seed=1),
        _segment(1, rows=4, prefix=5, tree=9, slots=order[8:22], seed=2),
        _segment(5, rows=3, prefix=0, tree=3, slots=order[22:25], seed=3),
    )
    write = np.concatenate([s.tree[-(s.rows.stop - s.rows.start) :] for s in segments])
    plan = joined(segments, write)
    pool = _pool(kv_heads, head_dim=8, value_dim=6)
    query, key = _random(8, 4, 8, seed=4), _random(8, kv_heads, 8, seed=5)
    value = _random(8, kv_heads, 6, seed=6)
    backend.prepare(plan)
    out = backend.attend(query, key, value, pool, options)
    assert out.shape == (8, 4, 6)
    torch.testing.assert_close(pool.keys[write], key)
    torch.testing.assert_close(pool.values[write], value)
    torch.testing.assert_close(out, _by_hand(query, pool, plan, options), rtol=1e-4, atol=1e-5)


@every_backend
def test_one_plan_serves_layers_of_different_windows_and_chunks(backend):
    slots = np.arange(12)
    plan = causal_plan(slots[:9], slots[9:])
    pool = _pool(2, 8, 8)
    inputs = [_random(3, heads, 8, seed=heads) for heads in (4, 2, 2)]
    backend.prepare(plan)
    for window, chunk in ((None, None), (3, None), (None, 5), (5, None), (None, 3), (3, None)):
        options = LayerOptions(0.3, window=window, chunk=chunk)
        out = backend.attend(*inputs, pool, options)
        expected = _by_hand(inputs[0], pool, plan, options)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@every_backend
def test_free_slots_and_those_of_other_requests_do_not_matter(backend):
    plan = causal_plan(np.array([3, 11, 30]), np.array([8, 5]))
    inputs = [_random(2, heads, 8, seed=heads) for heads in (4, 2, 2)]
    pool = _pool(2, 8, 8)
    backend.prepare(plan)
    before = backend.attend(*inputs, pool, LayerOptions(0.3))
    others = [s for s in range(NUM_SLOTS) if s not in (3, 11, 30, 8, 5)]
    pool.keys[others], pool.values[others] = 50.0, -50.0
    backend.prepare(plan)
    torch.testing.assert_close(backend.attend(*inputs, pool, LayerOptions(0.3)), before)


def test_a_causal_plan_shows_each_row_the_rows_up_to_itself():
    plan = causal_plan(np.array([4, 2]), np.array([7, 0, 1]))
    (segment,) = plan.segments()
    assert plan.write.tolist() == [7, 0, 1]
    assert segment.positions.tolist() == segment.tree_positions.tolist() == [2, 3, 4]
    assert segment.mask.tolist() == [[True, False, False], [True, True, False], [True] * 3]


def test_a_pool_has_a_row_per_slot_and_knows_its_size():
    pool = LayerPool.allocate(10, torch.zeros(1, 2, 8), torch.zeros(1, 2, 6))
    # And one for the rows of padding.
    assert pool.keys.shape == (11, 2, 8)
    assert pool.values.shape == (11, 2, 6)
    assert pool.num_bytes == 10 * 2 * (8 + 6) * 4


@given(plans(MANY_SLOTS), st.sampled_from([torch.bfloat16, torch.float32]))
def test_masks_begin_where_cuda_reads_them(plan: AttentionPlan, dtype: torch.dtype) -> None:
    """CUDA's kernels read a mask 16 bytes at a time: a misaligned one ended the process."""
    starts: list[int] = []

    def attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, **given_: Any):
        if attn_mask is not None:
            starts.append(attn_mask.storage_offset() * attn_mask.itemsize)
        return scaled_dot_product_attention(query, key, value, attn_mask, **given_)

    rows = len(plan.write)
    pool = LayerPool(*(torch.zeros(MANY_SLOTS + 1, 2, 8, dtype=dtype) for _ in "kv"))
    query, key, value = (torch.zeros(rows, heads, 8, dtype=dtype) for heads in (4, 2, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sdpa, "scaled_dot_product_attention", attend)
        backend = SdpaBackend()
        backend.prepare(plan)
        backend.attend(query, key, value, pool, LayerOptions(0.3))
    assert all(start % 16 == 0 for start in starts)


def test_a_backend_is_not_tried_in_a_type_that_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "find_spec", lambda _name: object())
    wrong = select.missing_requirement("flashinfer", "cuda", "float32")
    assert wrong == "it computes in bfloat16 and float16, and the model is in float32"
    assert select.missing_requirement("flashinfer", "cuda", "bfloat16") is None
    assert select.missing_requirement("flashinfer", "cuda") is None
    assert select.missing_requirement("triton", "cuda", "float32") is None
