"""What member 0 of a tensor-parallel slice sends the others, so that they compute the same.

Member 0 broadcasts the arguments of each `ModelSlice.forward`. Only member 0 knows sequences,
verdicts and slots; the attention plan contains slot ids. Of the page table, which outlives a batch,
only changes are sent.

A message has the lengths of int64 columns, these, the inputs and the masks. Before logits, a
message of two int64 has LOGITS or BEST_TOKENS and the number of rows; their hidden states are
gathered, as they may be on devices. An empty message ends the epoch.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from pipespec.engine.attention.attention_plan import AttentionPlan, Segment
from pipespec.engine.slice.model_slice import ModelSlice

# The columns of a message: of each segment three lengths and _NUMBERS; those of all rows and of all
# tree keys; the first new position of each segment, and the new page entries.
_NUM_COLUMNS = 7
_NUMBERS = ("page", "num_prompt", "num_committed", "keeps_state", "state_number")
LOGITS, BEST_TOKENS = -1, -2


class Pages:
    """The page table as far as the workers have received it."""

    def __init__(self) -> None:
        self.slots = np.zeros((1, 256), np.int64)

    def reserve(self, sequences: int, positions: int) -> None:
        rows, columns = self.slots.shape
        if sequences > rows or positions > columns:
            more = max(sequences - rows, 0), max(columns, positions - columns)
            self.slots = np.pad(self.slots, [(0, each) for each in more])

    def updates(self, plan: AttentionPlan) -> tuple[np.ndarray, np.ndarray]:
        """For each segment the first position that differs from what the workers have; and the
        slots from there on, concatenated, which count as sent from now on."""
        starts, slots = [], [np.zeros(0, np.int64)]
        for segment in plan.segments:
            now, length = segment.prefix, len(segment.prefix)
            self.reserve(segment.page + 1, length)
            known = self.slots[segment.page, :length]
            differs = np.flatnonzero(now != known)
            start = int(differs[0]) if len(differs) else length
            known[start:] = now[start:]
            starts.append(start)
            slots.append(now[start:])
        return np.array(starts, np.int64), np.concatenate(slots)


def head_message(kind: int, rows: int) -> Tensor:
    """The message before the logits of so many rows; `kind` is LOGITS or BEST_TOKENS."""
    return _bytes(torch.tensor([kind, rows]))


def head_of(message: Tensor) -> tuple[int, int] | None:
    """Kind and rows of a `head_message`; None: it is one of `pack`."""
    kind, rows = message[:16].view(torch.int64).tolist()
    return (kind, rows) if kind in (LOGITS, BEST_TOKENS) else None


def pack(inputs: Tensor, plan: AttentionPlan, pages: Pages) -> Tensor:
    """The message of a batch, to members who have received `pages`."""
    assert not plan.imagined, "measurements are made before the workers compute"
    segments = plan.segments
    table = [
        (
            len(each.positions),
            len(each.prefix),
            len(each.tree),
            *(getattr(each, name) for name in _NUMBERS),
        )
        for each in segments
    ]
    columns = [
        np.array(table, np.int64).ravel(),
        *(plan.write, plan.positions),
        np.concatenate([each.tree for each in segments]),
        np.concatenate([each.tree_positions for each in segments]),
        *pages.updates(plan),
    ]
    ints = np.concatenate((np.array([len(each) for each in columns]), *columns))
    masks = np.concatenate([each.mask.ravel() for each in segments])
    parts = torch.from_numpy(ints), inputs.cpu(), torch.from_numpy(masks)
    return torch.cat([_bytes(each) for each in parts])


def unpack(
    message: Tensor, model: ModelSlice, pages: Pages
) -> tuple[Tensor, Tensor, AttentionPlan]:
    """The arguments of `model.forward` in such a message."""
    ints = message[: len(message) // 8 * 8].view(torch.int64).numpy()
    bounds = list(accumulate(ints[:_NUM_COLUMNS].tolist(), initial=_NUM_COLUMNS))
    table, write, positions, trees, trees_at, starts, news = (
        ints[start:end] for start, end in pairwise(bounds)
    )
    data, count = message[8 * bounds[-1] :], len(write)
    shape, dtype = torch.Size((count,)), torch.int64
    if not model.is_first:
        shape, dtype = torch.Size((count, model.hidden_size)), model.dtype
    size = shape.numel() * dtype.itemsize
    masks = data[size:].view(torch.bool).numpy()
    segments, row, key, seen, read = [], 0, 0, 0, 0
    of_segments = table.reshape(-1, 3 + len(_NUMBERS)).tolist(), starts.tolist()
    for (num_rows, length, num_tree, page, *numbers), start in zip(*of_segments, strict=True):
        pages.reserve(page + 1, length)
        pages.slots[page, start:length] = news[read : (read := read + length - start)]
        rows, tree = slice(row, row + num_rows), slice(key, key + num_tree)
        mask = masks[seen : (seen := seen + num_rows * num_tree)].reshape(num_rows, num_tree)
        prefix = pages.slots[page, :length]
        parts = positions[rows], prefix, trees[tree], trees_at[tree], mask
        segments.append(Segment(rows, *parts, page, *numbers))
        row, key = rows.stop, tree.stop
    plan = AttentionPlan(write, segments)
    return data[:size].view(dtype).view(shape), torch.from_numpy(positions), plan


def _bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(-1).view(torch.uint8)
