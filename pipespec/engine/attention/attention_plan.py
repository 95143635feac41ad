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

The plan consists of columns: the rows, tree keys and masks of all segments are concatenated, with
offsets; prefixes stay in the page table, which outlives the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from pipespec.engine.precision import KV_FP8, KV_INT8, KV_PLAIN, KV_SCALE_BYTES

# The type of a pool in each format, and the largest number of its codes.
POOL_TYPES = {KV_INT8: torch.int8, KV_FP8: torch.uint8}
LARGEST = {torch.int8: 127.0, torch.uint8: 448.0}


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """The rows of one request, a contiguous part of a batch, and the keys they see: `prefix` `[p]`
    are the slots of positions 0..p-1, `tree` `[t]` those of the tree keys at `tree_positions`;
    `mask` bool `[rows, t]` is True where a row sees a tree key."""

    rows: slice
    positions: np.ndarray
    prefix: np.ndarray
    tree: np.ndarray
    tree_positions: np.ndarray
    mask: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPlan:
    """Where one batch's rows store their K and V, and what they attend to.

    Arrays are int64 but for `mask`. Segment i has the rows `row_start[i]` to `row_start[i + 1]`
    and the tree keys `tree_start[i]` to `tree_start[i + 1]`.

    Attributes:
        write, positions: slot and position of each row, `[rows]`.
        row_start, tree_start: `[segments + 1]`.
        pages: the page table (`pipespec.engine.slice.kv_allocator`), `[sequences, positions]`. The
            part that a segment reads does not change while the plan is used.
        page_row, prefix_length: the segment's row of the page table, and how many positions of it
            the segment reads, `[segments]`.
        tree, tree_positions: slot and position of each tree key, `[keys]`.
        mask: for each segment, bool `[rows, tree keys]`; flattened and concatenated.
        num_prompt: how many of the segment's first rows are of a prompt, `[segments]`.
        num_committed: how many of the segment's first rows are committed already, `[segments]`.
        keeps_state: behind how many committed tokens of the segment's sequence layers with a
            running state keep that, for sequences that share the text; 0: none; `[segments]`.
        state_number: which of the kept states that becomes, `[segments]`.
        imagined: the texts before the rows were never computed, as when something is measured.
    """

    write: np.ndarray
    positions: np.ndarray
    row_start: np.ndarray
    pages: np.ndarray
    page_row: np.ndarray
    prefix_length: np.ndarray
    tree: np.ndarray
    tree_positions: np.ndarray
    tree_start: np.ndarray
    mask: np.ndarray
    num_prompt: np.ndarray
    num_committed: np.ndarray
    keeps_state: np.ndarray
    state_number: np.ndarray
    imagined: bool = False

    def segments(self) -> Iterator[Segment]:
        seen = 0
        bounds = zip(
            pairwise(self.row_start.tolist()),
            pairwise(self.tree_start.tolist()),
            self.page_row.tolist(),
            self.prefix_length.tolist(),
            strict=True,
        )
        for (row, end), (key, last), page, length in bounds:
            first, seen = seen, seen + (end - row) * (last - key)
            yield Segment(
                rows=slice(row, end),
                positions=self.positions[row:end],
                prefix=self.pages[page, :length],
                tree=self.tree[key:last],
                tree_positions=self.tree_positions[key:last],
                mask=self.mask[first:seen].reshape(end - row, last - key),
            )


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


def plan_of(segments: Sequence[Segment], write: np.ndarray) -> AttentionPlan:
    """The plan of these segments, in order, whose rows are draft tokens and use the slots `write`
    `[rows]`."""
    prefixes = [segment.prefix for segment in segments]
    pages = np.zeros((len(segments), max(map(len, prefixes))), np.int64)
    for page, prefix in zip(pages, prefixes, strict=True):
        page[: len(prefix)] = prefix
    names = ("num_prompt", "num_committed", "keeps_state", "state_number")
    none: dict[str, Any] = {name: np.zeros(len(segments), np.int64) for name in names}
    return AttentionPlan(
        write=write,
        positions=np.concatenate([segment.positions for segment in segments]),
        row_start=np.array([0, *(segment.rows.stop for segment in segments)]),
        pages=pages,
        page_row=np.arange(len(segments)),
        prefix_length=np.array([*map(len, prefixes)]),
        tree=np.concatenate([segment.tree for segment in segments]),
        tree_positions=np.concatenate([segment.tree_positions for segment in segments]),
        tree_start=np.cumsum([0, *(len(segment.tree) for segment in segments)]),
        mask=np.concatenate([segment.mask.ravel() for segment in segments]),
        **none,
    )


def causal_plan(prefix: np.ndarray, write: np.ndarray, *, imagined: bool = False) -> AttentionPlan:
    """The plan of a chunk of a prompt: each row sees `prefix` `[p]` and the rows up to itself, in
    the slots `write` `[rows]`. `imagined`: the prefix was never computed, and the rows are draft
    tokens."""
    rows = len(write)
    positions = np.arange(len(prefix), len(prefix) + rows)
    sees = np.tri(rows, dtype=bool)
    plan = plan_of([Segment(slice(0, rows), positions, prefix, write, positions, sees)], write)
    if imagined:
        return replace(plan, imagined=True)
    return replace(plan, num_prompt=np.array([rows]), num_committed=np.array([rows]))
