"""A plan as numbers in a buffer on the device that stays where it is.

Backends that compute on the device alone, recorded graphs among them, read this instead of an
`AttentionPlan`: the addresses never change, and one copy brings a step's plan there. Everything
stands row by row, so a row's keys are found from the row alone, whatever segment it is in:

    key i of a row      is slot `slots[first + i]`, for i < prefix + tree
    i < prefix          committed text at position i; the row sees it
    i = prefix + j      tree key j, at position `tree_positions[tree_first + j]`; the row sees it if
                        bit j of its words in `mask` is set

and both only within the layer's window. Rows of padding store into the pools' last slot, which is
nobody's, and see nothing but it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pipespec.engine.attention.plan import AttentionPlan

# Bits of a word of `mask`.
WORD = 32
# Tree keys of one row that a reserved buffer has room for.
MOST_TREE = 2048


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a buffer has room for: rows, tree keys of one row, tree keys and keys of all rows."""

    rows: int
    tree: int
    trees: int
    keys: int

    @classmethod
    def of(cls, plan: AttentionPlan) -> Capacity:
        """What a plan needs."""
        tree = np.diff(plan.tree_start)
        keys = len(plan.tree) + int(plan.prefix_length.sum())
        return cls(len(plan.write), int(tree.max()), len(plan.tree), keys)

    def holds(self, other: Capacity) -> bool:
        """Whether there is room for that."""
        return (
            self.rows >= other.rows
            and self.tree >= other.tree
            and self.trees >= other.trees
            and self.keys >= other.keys
        )

    def grown(self, other: Capacity) -> Capacity:
        """Room for both, in powers of two, so that growing ends soon."""

        def room(mine: int, theirs: int) -> int:
            return max(mine, 1 << (theirs - 1).bit_length())

        return Capacity(
            room(self.rows, other.rows),
            room(self.tree, other.tree),
            room(self.trees, other.trees),
            room(self.keys, other.keys),
        )


class FlatPlan:
    """The buffer and its columns, int32 tensors on the device.

    Attributes:
        write, positions: slot and position of each row, `[rows]`.
        first, prefix, tree, tree_first: where a row's keys begin, how many are committed text and
            how many tree keys, and where the positions of these begin, `[rows]`.
        mask: `[rows, words]`.
        tree_positions: `[trees]`.
        slots: `[keys]`.
        tiles: for `tile` rows that stand together in one segment their first one and how many
            they are, `[rows, 2]`; 0 rows: there is no such tile.
        longest: most keys that a row has, as a number of the host.
    """

    write: Tensor
    positions: Tensor
    first: Tensor
    prefix: Tensor
    tree: Tensor
    tree_first: Tensor
    tiles: Tensor
    mask: Tensor
    tree_positions: Tensor
    slots: Tensor

    _ROWS = ("write", "positions", "first", "prefix", "tree", "tree_first")

    def __init__(
        self, capacity: Capacity, trash: int, device: torch.device | str, tile: int = 1
    ) -> None:
        """`trash` is the slot of nobody."""
        self.capacity = capacity
        self.tile = tile
        self.longest = 0
        self._trash = trash
        rows = capacity.rows
        words = -(-capacity.tree // WORD)
        shapes = dict.fromkeys(self._ROWS, (rows,)) | {
            "tiles": (rows, 2),
            "mask": (rows, words),
            "tree_positions": (capacity.trees,),
            # At last, as the copy ends with what is used of it; the padding's key comes first.
            "slots": (1 + capacity.keys,),
        }
        sizes = [int(np.prod(shape)) for shape in shapes.values()]
        on_device = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        pinned = on_device.device.type == "cuda"
        self._staging = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=pinned)
        self._device = on_device
        self._host: dict[str, np.ndarray] = {}
        parts = zip(shapes.items(), on_device.split(sizes), self._staging.split(sizes), strict=True)
        for (name, shape), there, here in parts:
            setattr(self, name, there.view(shape))
            self._host[name] = here.view(shape).numpy()
        self._copied = torch.cuda.Event() if pinned else None

    def fill(self, plan: AttentionPlan) -> None:
        """Bring a plan to the device. It must fit (`Capacity.holds`)."""
        if self._copied is not None:
            self._copied.synchronize()  # the staging buffer is still read until then
        host, rows = self._host, len(plan.write)
        count = np.diff(plan.row_start)
        trees = np.diff(plan.tree_start)
        keys = np.concatenate(([0], np.cumsum(plan.prefix_length + trees)))
        columns = {
            "write": plan.write,
            "positions": plan.positions,
            "first": np.repeat(1 + keys[:-1], count),
            "prefix": np.repeat(plan.prefix_length, count),
            "tree": np.repeat(trees, count),
            "tree_first": np.repeat(plan.tree_start[:-1], count),
        }
        padding = {"write": self._trash, "prefix": 1}
        for name in self._ROWS:
            host[name][:rows] = columns[name]
            host[name][rows:] = padding.get(name, 0)
        host["tiles"][...] = 0
        tiles = self._tiles(plan)
        host["tiles"][: len(tiles)] = tiles
        host["mask"][:rows] = _words(plan, np.repeat(trees, count), host["mask"].shape[1])
        host["tree_positions"][: len(plan.tree)] = plan.tree_positions
        slots = host["slots"]
        slots[0] = self._trash
        bounds = zip(
            plan.page_row.tolist(),
            plan.prefix_length.tolist(),
            plan.tree_start.tolist(),
            trees.tolist(),
            (1 + keys[:-1]).tolist(),
            strict=False,
        )
        for page, length, start, tree, at in bounds:
            slots[at : at + length] = plan.pages[page, :length]
            slots[at + length : at + length + tree] = plan.tree[start : start + tree]
        self.longest = int((plan.prefix_length + trees).max())
        used = len(self._staging) - len(slots) + 1 + int(keys[-1])
        self._device[:used].copy_(self._staging[:used], non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def _tiles(self, plan: AttentionPlan) -> np.ndarray:
        """`[tiles, 2]`, those of padding, row by row, included."""
        rows, end = self.capacity.rows, int(plan.row_start[-1])
        count = np.diff(plan.row_start)
        of = -(-count // self.tile)
        nth = np.arange(of.sum()) - np.repeat(np.cumsum(of) - of, of)
        first = np.repeat(plan.row_start[:-1], of) + nth * self.tile
        until = np.minimum(first + self.tile, np.repeat(plan.row_start[1:], of))
        padding = np.arange(end, rows)
        return np.stack(
            (np.append(first, padding), np.append(until - first, np.ones_like(padding))), 1
        )


class FlatAttention:
    """What backends have in common that attend by a flat plan alone.

    `flat` is where the newest plan stands.
    """

    TILE = 1  # rows of one segment that are computed together

    def __init__(self, device: torch.device | str, num_slots: int):
        self._device, self._num_slots = device, num_slots
        self._growing = self._buffer(Capacity(1, 1, 1, 1))
        self.flat = self._growing

    def prepare(self, plan: AttentionPlan, flat: FlatPlan | None = None) -> None:
        """Attend by this plan, in a buffer that has room for it; None: in one that grows."""
        if flat is None:
            needed = Capacity.of(plan)
            if not self._growing.capacity.holds(needed):
                self._growing = self._buffer(self._growing.capacity.grown(needed))
            flat = self._growing
        self.flat = flat
        flat.fill(plan)

    def reserved(self, rows: int) -> FlatPlan:
        """A buffer that stays where it is, for plans of so many rows and all slots."""
        tree = min(MOST_TREE, self._num_slots)
        return self._buffer(Capacity(rows, tree, self._num_slots, self._num_slots))

    def _buffer(self, capacity: Capacity) -> FlatPlan:
        return FlatPlan(capacity, self._num_slots, self._device, self.TILE)


def _words(plan: AttentionPlan, trees: np.ndarray, words: int) -> np.ndarray:
    """The mask of each row as bits, `[rows, words]`; `trees` are the tree keys of each row."""
    rows = len(plan.write)
    seen = np.zeros((rows, words * WORD), bool)
    row = np.repeat(np.arange(rows), trees)
    column = np.arange(len(row)) - np.repeat(np.cumsum(trees) - trees, trees)
    seen[row, column] = plan.mask
    return np.packbits(seen, axis=1, bitorder="little").view("<i4")
