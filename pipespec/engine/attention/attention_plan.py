"""What the rows of a batch may attend to, and the interface of attention backends.

An `AttentionPlan` describes one batch on one stage. Its slots index the KV pool of every layer of
the slice (`[slots, kv_heads, head_dim]`), so one plan serves all layers:

    write                     the batch's rows store their K and V here first
    segment                   one request's rows: what they share, and what each of them sees
      prefix  p0 p1 p2 ...    committed text that all of them see; its positions are 0, 1, 2, ...
      tree    t0 t1 t2 ...    live tree nodes, or the prompt chunk; `mask` says which row sees which

A row attends to all of its segment's prefix and to the tree keys that its mask row allows, within
the layer's sliding window or chunk if it has one. Prefix and tree keys include the rows themselves.
A backend gets the plan only; it knows neither trees nor requests.

Prefixes are views of the page table (`pipespec.engine.slice.kv_allocator`), which outlives the
batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from pipespec.engine.precision import KV_FP8, KV_INT8, KV_PLAIN, KV_SCALE_BYTES

# The type of a pool in each format, and the largest number of its codes.
POOL_TYPES = {KV_INT8: torch.int8, KV_FP8: torch.uint8}
LARGEST = {torch.int8: 127.0, torch.uint8: 448.0}


@dataclass(slots=True, eq=False)
class Segment:
    """The rows of one request, a contiguous part of a batch, and the keys they see. Arrays but for
    `mask` are int64.

    Attributes:
        positions: of the rows, `[rows]`.
        prefix: the slots of positions 0..p-1, `[p]`, which do not change while the plan is used.
        tree, tree_positions: slot and position of each tree key, `[t]`.
        mask: whether a row sees a tree key, bool `[rows, t]`.
        page: the request's row of the page table.
        num_prompt: how many of the first rows are of a prompt.
        num_committed: how many of the first rows are committed already.
        keeps_state: behind how many committed tokens of the sequence layers with a running state
            keep that, for sequences that share the text; 0: none.
        state_number: which of the kept states that becomes.
    """

    rows: slice
    positions: np.ndarray
    prefix: np.ndarray
    tree: np.ndarray
    tree_positions: np.ndarray
    mask: np.ndarray
    page: int = 0
    num_prompt: int = 0
    num_committed: int = 0
    keeps_state: int = 0
    state_number: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPlan:
    """Where one batch's rows store their K and V, int64 `[rows]`, and what they attend to.
    `imagined`: the texts before the rows were never computed, as when something is measured."""

    write: np.ndarray
    segments: Sequence[Segment]
    imagined: bool = False

    @property
    def positions(self) -> np.ndarray:
        """Those of all rows, `[rows]`."""
        return np.concatenate([segment.positions for segment in self.segments])


class Reach(NamedTuple):
    """How far back the rows of a layer see; see `LayerOptions`."""

    window: int | None = None
    chunk: int | None = None

    def earliest(self, positions: Any) -> Any:
        """The first position that rows at `positions` (an array or tensor) see, which may be
        negative; None: they see all."""
        if self.chunk is not None:
            return positions - positions % self.chunk
        return None if self.window is None else positions - self.window + 1


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """The attention parameters of a layer.

    `window`: a row at position q sees keys at positions greater than q - window. `chunk`: it sees
    keys from the last multiple of `chunk` on (chunked attention of Llama 4). `softcap` bounds the
    scores by `softcap * tanh(score / softcap)`. `sinks` `[heads]` are learned scores that take part
    in the softmax without a value.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    chunk: int | None = None

    @property
    def reach(self) -> Reach:
        return Reach(self.window, self.chunk)


@dataclass(slots=True, eq=False)
class LayerPool:
    """K `[slots, kv_heads, head_dim]` and V `[slots, kv_heads, value_dim]` of one layer, in the
    model's type or in 8 bits (`packed`). The last slot belongs to no sequence: rows of padding
    store there."""

    keys: Tensor
    values: Tensor

    @classmethod
    def allocate(
        cls, num_slots: int, key: Tensor, value: Tensor, kv_dtype: str = KV_PLAIN
    ) -> LayerPool:
        """A pool for rows like those of `key` and `value` (`[rows, kv_heads, dim]`); `kv_dtype` is
        one of KV_DTYPES."""
        if kv_dtype != KV_PLAIN:
            key, value = (packed(each[:1], POOL_TYPES[kv_dtype]) for each in (key, value))
        return cls(_zeros(num_slots + 1, key), _zeros(num_slots + 1, value))

    def store(self, slots: Tensor, key: Tensor, value: Tensor) -> None:
        for pool, rows in ((self.keys, key), (self.values, value)):
            pool.index_copy_(0, slots, packed(rows, pool.dtype) if is_packed(pool) else rows)

    @property
    def num_bytes(self) -> int:
        """Bytes of the slots without that of padding."""
        return self.keys[:-1].nbytes + self.values[:-1].nbytes


def is_packed(pool: Tensor) -> bool:
    return pool.dtype in LARGEST


def packed(numbers: Tensor, pool_type: torch.dtype) -> Tensor:
    """`[rows, heads, dim]` -> `[rows, heads, dim + KV_SCALE_BYTES]`, as a pool of this type has it:
    the codes of a head, then its scale in bfloat16. A row depends on itself alone, so the text is
    the same for every policy and stage count."""
    wide = numbers.float()
    scales = (wide.abs().amax(-1, keepdim=True) / LARGEST[pool_type]).to(torch.bfloat16)
    # A head of zeros has no scale; the least one keeps its codes finite.
    codes = wide / scales.float().clamp(min=torch.finfo(torch.float32).tiny)
    codes = codes.clamp(-LARGEST[pool_type], LARGEST[pool_type])
    if pool_type == torch.int8:
        stored = codes.round().to(torch.int8)
    else:
        stored = codes.to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.cat((stored, scales.contiguous().view(pool_type)), -1)


def unpacked(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `packed`, but for rounding, in this type; plain numbers in another type."""
    if not is_packed(stored):
        return stored.to(dtype)
    codes, scales = stored[..., :-KV_SCALE_BYTES], stored[..., -KV_SCALE_BYTES:]
    if stored.dtype == torch.uint8:
        codes = codes.contiguous().view(torch.float8_e4m3fn)
    return codes.to(dtype) * scales.contiguous().view(torch.bfloat16).to(dtype)


def _zeros(num_slots: int, like: Tensor) -> Tensor:
    """In main memory, pages are allocated lazily: many pools are larger than requests ever need."""
    shape = (num_slots, *like.shape[1:])
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    pages = np.zeros(math.prod(shape) * like.itemsize, np.uint8)
    return torch.from_numpy(pages).view(like.dtype).view(shape)


class AttentionBackend(Protocol):
    """The attention of the layers of one slice. It is used by one thread."""

    def prepare(self, plan: AttentionPlan) -> None:
        """Use this plan, whose arrays must not change, until the next call."""
        ...

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, pool: LayerPool, options: LayerOptions
    ) -> Tensor:
        """Store the rows' K and V in the pool, then attend.

        `query` `[rows, heads, head_dim]`, `key`/`value` `[rows, kv_heads, dim]` -> `[rows, heads,
        value_dim]`. Heads are grouped: query head h reads KV head h * kv_heads // heads.
        """
        ...


def causal_plan(prefix: np.ndarray, write: np.ndarray, *, imagined: bool = False) -> AttentionPlan:
    """The plan of a chunk of a prompt: each row sees `prefix` `[p]` and the rows up to itself, in
    the slots `write` `[rows]`. `imagined`: the prefix was never computed, and the rows are draft
    tokens."""
    rows = len(write)
    positions = np.arange(len(prefix), len(prefix) + rows)
    sees = np.tri(rows, dtype=bool)
    segment = Segment(slice(0, rows), positions, prefix, write, positions, sees)
    if not imagined:
        segment.num_prompt = segment.num_committed = rows
    return AttentionPlan(write, [segment], imagined)
