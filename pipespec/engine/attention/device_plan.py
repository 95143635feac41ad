"""An attention plan in a fixed buffer on the device, and a backend that reads it.

Backends that compute on the device alone, and CUDA graphs, read this instead of an
`AttentionPlan`: the addresses never change, and one copy transfers the plan of a step. All columns
are by row, so that a row's keys are found without its segment:

    key i of a row      slot `slots[first + i]`, for i < prefix + tree
    i < prefix          the committed token at position i; the row sees it
    i = prefix + j      tree key j, at position `tree_positions[tree_first + j]`; the row sees it if
                        bit j of its words in `mask` is set

Both are limited to the layer's window. Rows of padding store into the last slot of the pools, which
belongs to no sequence, and see only that slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipespec.engine.attention.attention_plan import AttentionPlan, LayerOptions, LayerPool, Reach
from pipespec.system.device_copy import StagedArrays

# Bits of a word of `mask`.
WORD = 32
# Parts into which the keys of a tile are split: at most, for all tiles of a batch together, and
# keys of a part at least.
MOST_SPLITS, ALL_SPLITS, LEAST_KEYS = 16, 32, 64
# Tree keys of one row that a reserved buffer has room for.
MOST_TREE = 2048
# Keys of a row that `TorchBackend` processes together.
BLOCK = 128


class PlanCapacity(NamedTuple):
    """The size of a buffer: rows, tree keys of one row, and tree keys and keys of all segments."""

    rows: int
    tree: int
    trees: int
    keys: int

    @classmethod
    def of(cls, plan: AttentionPlan) -> PlanCapacity:
        trees = [len(segment.tree) for segment in plan.segments]
        keys = sum(trees) + sum(len(segment.prefix) for segment in plan.segments)
        return cls(len(plan.write), max(trees), sum(trees), keys)

    def holds(self, other: PlanCapacity) -> bool:
        return all(mine >= theirs for mine, theirs in zip(self, other, strict=True))

    def grown(self, other: PlanCapacity) -> PlanCapacity:
        """A capacity for both, rounded up to powers of two so that it rarely grows."""
        both = zip(self, other, strict=True)
        return PlanCapacity(*(max(mine, 1 << (each - 1).bit_length()) for mine, each in both))


class Tiling(NamedTuple):
    """Tiles of consecutive rows of one segment; each has a share of a kernel's programs, by its
    share of the keys that the batch reads. So the rounding of a row may differ with the batch.

    `tiles` `[rows, 3]`: the first row, the number of rows, and the parts into which the keys are
    split; unused entries have none. `splits` `[rows]`: those parts, by row.
    """

    tiles: Tensor
    splits: Tensor


class DevicePlan:
    """The buffer and its columns, int32 tensors on the device.

    Attributes:
        write, positions: slot and position of each row, `[rows]`.
        first, prefix, tree, tree_first: where a row's keys start, how many of them are committed
            tokens and how many are tree keys, and where the positions of the tree keys start,
            `[rows]`.
        mask: `[rows, words]`.
        tree_positions: `[trees]`.
        slots: `[keys]`.
        tilings: for several sizes, groups of up to so many consecutive rows of one segment.
        longest: the largest number of keys of a row, on the host.
    """

    def __init__(
        self,
        capacity: PlanCapacity,
        trash: int,
        device: torch.device | str,
        tiles: Sequence[int] = (),
    ) -> None:
        """`trash` is the slot for rows of padding, `tiles` the sizes of the tilings."""
        self.capacity, self.longest, self._trash = capacity, 0, trash
        rows, words = capacity.rows, -(-capacity.tree // WORD)
        shapes = {
            "rows": (6, rows),
            **{f"tiles_{size}": (rows, 3) for size in tiles},
            **{f"splits_{size}": (rows,) for size in tiles},
            "mask": (rows, words),
            "tree_positions": (capacity.trees,),
            # The last one, as only the used part of it is copied; the key of padding comes first.
            "slots": (1 + capacity.keys,),
        }
        self._arrays = StagedArrays(shapes, torch.int32, device)
        found = self._arrays.device
        self.tilings = {n: Tiling(found[f"tiles_{n}"], found[f"splits_{n}"]) for n in tiles}
        of_rows = found["rows"].unbind()
        self.write, self.positions, self.first, self.prefix, self.tree, self.tree_first = of_rows
        self.mask, self.tree_positions = found["mask"], found["tree_positions"]
        self.slots = found["slots"]

    def fill(self, plan: AttentionPlan) -> None:
        """Copy a plan to the device. It must fit (`PlanCapacity.holds`)."""
        self._arrays.wait()
        host, rows, segments = self._arrays.host, len(plan.write), plan.segments
        sizes = [(len(each.positions), len(each.prefix), len(each.tree)) for each in segments]
        count, prefixes, trees = np.array(sizes).T
        keys = prefixes + trees
        of_segments = np.stack(
            (1 + np.cumsum(keys) - keys, prefixes, trees, np.cumsum(trees) - trees)
        )
        host["rows"][:, :rows] = plan.write, plan.positions, *np.repeat(of_segments, count, 1)
        host["rows"][:, rows:] = np.array([[self._trash], [0], [0], [1], [0], [0]])
        starts = np.array([0, *(segment.rows.stop for segment in segments), self.capacity.rows])
        lengths = np.append(keys, 1)
        for size in self.tilings:
            tiles = _tiles(starts, lengths, size)
            host[f"tiles_{size}"][...] = 0
            host[f"tiles_{size}"][: len(tiles)] = tiles
            host[f"splits_{size}"][...] = np.repeat(tiles[:, 2], tiles[:, 1])
        host["mask"][:rows] = _words(plan, host["mask"].shape[1])
        positions = np.concatenate([segment.tree_positions for segment in segments])
        host["tree_positions"][: len(positions)] = positions
        read = [part for segment in segments for part in (segment.prefix, segment.tree)]
        slots, end = host["slots"], 1 + int(keys.sum())
        slots[0], slots[1:end] = self._trash, np.concatenate(read)
        self.longest = int(keys.max())
        self._arrays.copy(unused=len(slots) - end)


class DevicePlanBackend:
    """The base class of backends that read a `DevicePlan`; `flat` is the current one."""

    def __init__(self, device: torch.device | str, num_slots: int, tiles: Sequence[int] = ()):
        self._device, self._num_slots, self._tiles = device, num_slots, tiles
        self._growing = self._buffer(PlanCapacity(1, 1, 1, 1))
        self.flat = self._growing

    def prepare(self, plan: AttentionPlan, flat: DevicePlan | None = None) -> None:
        """See `AttentionBackend`. `flat`: a buffer that is large enough; None: one that grows."""
        if flat is None:
            needed = PlanCapacity.of(plan)
            if not self._growing.capacity.holds(needed):
                self._growing = self._buffer(self._growing.capacity.grown(needed))
            flat = self._growing
        self.flat = flat
        flat.fill(plan)

    def reserve(self, rows: int) -> DevicePlan:
        """A buffer of fixed size for plans of so many rows and all slots."""
        tree = min(MOST_TREE, self._num_slots)
        return self._buffer(PlanCapacity(rows, tree, self._num_slots, self._num_slots))

    def _buffer(self, capacity: PlanCapacity) -> DevicePlan:
        return DevicePlan(capacity, self._num_slots, self._device, self._tiles)


class TorchBackend(DevicePlanBackend):
    """`static` in settings, in plain torch: the reference for kernels, and their fallback.

    It works on every device and reads nothing on the host. Every row reads its own keys block by
    block with online softmax (Milakov and Gimelshein 2018), in float32. It is slower than other
    backends, as rows of one segment do not share their keys.
    """

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, pool: LayerPool, options: LayerOptions
    ) -> Tensor:
        rows, heads, _ = query.shape
        kv_heads = key.shape[1]
        pool.store(self.flat.write[:rows].long(), key, value)
        grouped = query.float().view(rows, kv_heads, heads // kv_heads, -1) * options.scaling
        best = grouped.new_full(grouped.shape[:3], -torch.inf)
        total = torch.zeros_like(best)
        if options.sinks is not None:
            best = options.sinks.float().view(kv_heads, -1).expand_as(best)
            total = torch.ones_like(best)
        out = grouped.new_zeros(*grouped.shape[:3], value.shape[2])
        for start in range(0, self.flat.longest, BLOCK):
            slots, seen = self._keys(rows, start, options.reach)
            scores = torch.einsum("rkgd,rnkd->rkgn", grouped, pool.keys[slots].float())
            if options.softcap is not None:
                scores = torch.tanh(scores / options.softcap) * options.softcap
            scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
            higher = torch.maximum(best, scores.amax(-1))
            # A row that has seen no key yet has the maximum -inf.
            base = torch.where(higher == -torch.inf, 0.0, higher)
            kept, weights = torch.exp(best - base), torch.exp(scores - base[..., None])
            total = total * kept + weights.sum(-1)
            added = torch.einsum("rkgn,rnkd->rkgd", weights, pool.values[slots].float())
            out = out * kept[..., None] + added
            best = higher
        return (out / total[..., None]).to(query.dtype).view(rows, heads, -1)

    def _keys(self, rows: int, start: int, reach: Reach) -> tuple[Tensor, Tensor]:
        """The slots of the next block of keys of every row, `[rows, BLOCK]`, and whether it sees
        them."""
        flat = self.flat
        columns = (flat.positions, flat.first, flat.prefix, flat.tree, flat.tree_first)
        position, first, prefix, tree, tree_first = (column[:rows, None] for column in columns)
        i = torch.arange(start, start + BLOCK, dtype=torch.int32, device=first.device)
        there = i < prefix + tree
        slots = flat.slots[torch.where(there, first + i, 0)]
        beyond = there & (i >= prefix)
        j = torch.where(beyond, i - prefix, 0)
        words = flat.mask[:rows].gather(1, (j // WORD).long())
        seen = there & ((i < prefix) | (words >> (j % WORD) & 1).bool())
        earliest = reach.earliest(position)
        if earliest is not None:
            # `tree_first` of a row without tree keys may be out of range.
            at = torch.where(beyond, flat.tree_positions[torch.where(beyond, tree_first + j, 0)], i)
            seen &= at >= earliest
        return slots, seen


def _tiles(starts: np.ndarray, lengths: np.ndarray, size: int) -> np.ndarray:
    """The tiles `[tiles, 3]` of segments that start at these rows, the last one being the rows of
    padding, and have so many keys."""
    of = -(-np.diff(starts) // size)
    nth = np.arange(of.sum()) - np.repeat(np.cumsum(of) - of, of)
    first = np.repeat(starts[:-1], of) + nth * size
    until = np.minimum(first + size, np.repeat(starts[1:], of))
    keys = np.repeat(lengths, of)
    most = np.minimum(-(-keys // LEAST_KEYS), MOST_SPLITS)
    splits = np.minimum(-(-ALL_SPLITS * keys // keys.sum()), most)
    return np.stack((first, until - first, splits), 1)


def _words(plan: AttentionPlan, words: int) -> np.ndarray:
    """The mask of each row as bits, `[rows, words]`."""
    seen = np.zeros((len(plan.write), words * WORD), bool)
    for segment in plan.segments:
        if len(segment.tree):
            seen[segment.rows, : len(segment.tree)] = segment.mask
    return np.packbits(seen, axis=1, bitorder="little").view("<i4")
