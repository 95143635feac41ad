"""Attention with FlashInfer's fa2 kernels, which read the KV pools as pages of one token.

For layers of one kind there are two wrappers: one without a mask for the keys that all rows of a
request see, and one with a mask for the rest. The results are merged by their log-sum-exp
(FlashInfer, Ye et al. 2025, section 2.2). Sinks are merged the same way, as fa2 ignores them.
Windows and chunks are part of the mask: fa2 computes windows from the index of a row in the batch,
which is not its position in a tree.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from torch import Tensor

from pipespec.engine.attention.attention_plan import (
    AttentionPlan,
    LayerOptions,
    LayerPool,
    Reach,
    Segment,
)
from pipespec.system.device_copy import to_device

WORKSPACE_BYTES = 128 << 20  # as FlashInfer recommends


class FlashInferBackend:
    """See `AttentionBackend`. For bfloat16 and float16; other limits are found by its self-test."""

    def __init__(self, device: torch.device | str):
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._plan: AttentionPlan | None = None
        self._write: Tensor | None = None
        self._kinds: dict[tuple[object, ...], _LayerKind] = {}

    def prepare(self, plan: AttentionPlan) -> None:
        self._plan, self._write = plan, None
        for kind in self._kinds.values():
            kind.planned = False

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, pool: LayerPool, options: LayerOptions
    ) -> Tensor:
        assert self._plan is not None
        if self._write is None:
            self._write = to_device(self._plan.write, query.device)
        pool.store(self._write, key, value)
        sizes = (query.shape[1], key.shape[1], key.shape[2], value.shape[2])
        name = (sizes, options.scaling, options.softcap, options.reach)
        if name not in self._kinds:
            self._kinds[name] = _LayerKind(self._workspace)
        kind = self._kinds[name]
        if not kind.planned:
            kind.plan(self._plan, sizes, options, query.dtype)
        return kind.run(query, pool, options.sinks)


class _LayerKind:
    """Layers with the same sizes, scaling, softcap and reach."""

    def __init__(self, workspace: Tensor):
        self.planned = False
        self._open, self._masked = (_KernelPart(workspace) for _ in range(2))

    def plan(
        self,
        plan: AttentionPlan,
        sizes: tuple[int, int, int, int],
        options: LayerOptions,
        dtype: torch.dtype,
    ) -> None:
        parts = [_parted(segment, options.reach) for segment in plan.segments]
        row_start = np.array([0, *(segment.rows.stop for segment in plan.segments)])
        like = (row_start, sizes, options, dtype)
        self._open.plan([keys for keys, _, _ in parts], None, *like)
        self._masked.plan([keys for _, keys, _ in parts], [mask for *_, mask in parts], *like)
        self.planned = True

    def run(self, query: Tensor, pool: LayerPool, sinks: Tensor | None) -> Tensor:
        found = [part.run(query, pool) for part in (self._open, self._masked) if part.any]
        weights = [weight for _, weight in found]
        if sinks is not None:
            weights.append((sinks.float() * math.log2(math.e)).expand_as(weights[0]))
        shares = torch.stack(weights).mul(math.log(2)).softmax(0)[: len(found)]
        merged = sum(
            out.float() * share[..., None] for (out, _), share in zip(found, shares, strict=True)
        )
        assert isinstance(merged, Tensor)
        return merged.to(query.dtype)


class _KernelPart:
    def __init__(self, workspace: Tensor):
        self.any = False  # whether any row reads any key here
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
        self._cuda = workspace.device.type == "cuda"
        self._planned: torch.cuda.Event | None = None

    def plan(
        self,
        keys: list[np.ndarray],
        masks: list[np.ndarray] | None,
        row_start: np.ndarray,
        sizes: tuple[int, int, int, int],
        options: LayerOptions,
        dtype: torch.dtype,
    ) -> None:
        """Plan to read the slots `keys` of each segment, with its mask `[rows, keys]`; None: each
        row sees all of them."""
        counts = np.array([len(each) for each in keys])
        self.any = bool(counts.any())
        if not self.any:
            return
        if self._planned is not None:
            self._planned.synchronize()  # its pinned buffer is still read until then
        heads, kv_heads, dim, value_dim = sizes
        bits = None if masks is None else [np.packbits(m, bitorder="little") for m in masks]
        self._wrapper.plan(
            _int32(row_start),
            _int32(np.concatenate(([0], np.cumsum(counts)))),
            _int32(np.concatenate(keys)),
            torch.ones(len(keys), dtype=torch.int32),
            *(heads, kv_heads, dim, 1),
            head_dim_vo=value_dim,
            packed_custom_mask=None if bits is None else torch.from_numpy(np.concatenate(bits)),
            sm_scale=options.scaling,
            logits_soft_cap=options.softcap,
            q_data_type=dtype,
        )
        if bits is not None:
            # It passes offsets in bits where its kernel expects bytes
            # (flashinfer-ai/flashinfer#2201).
            ends = np.cumsum([len(each) for each in bits])
            starts = _int32(np.concatenate(([0], ends)))
            self._wrapper._mask_indptr_buf = to_device(starts, self._wrapper.device)
        if self._cuda:
            self._planned = torch.cuda.Event()
            self._planned.record()

    def run(self, query: Tensor, pool: LayerPool) -> tuple[Tensor, Tensor]:
        """The attention output over these keys, `[rows, heads, value_dim]`, and the binary
        logarithm of its weight, `[rows, heads]`."""
        pages = (pool.keys[:, None], pool.values[:, None])
        return self._wrapper.run(query.contiguous(), pages, return_lse=True)


def _parted(segment: Segment, reach: Reach) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The slots that all rows of a segment see; the slots that only some rows see; and the mask of
    these, `[rows, slots]`."""
    prefix, tree, mask = segment.prefix, segment.tree, segment.mask
    earliest = reach.earliest(segment.positions)
    if earliest is None:
        return prefix, tree, mask
    length = len(prefix)
    # The first row limits what any row sees, the last row what all rows see.
    some = min(max(0, int(earliest.min())), length)
    every = min(max(0, int(earliest.max())), length)
    near = np.arange(some, every) >= earliest[:, None]
    mask = mask & (segment.tree_positions >= earliest[:, None])
    slots = np.concatenate((prefix[some:every], tree))
    return prefix[every:], slots, np.hstack((near, mask))


def _int32(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, np.int32))
