"""What member 0 of a tensor-parallel slice sends the others, so that they compute the same.

Member 0 broadcasts the arguments of each `ModelSlice.forward`. Only member 0 knows sequences,
verdicts and slots; the attention plan contains slot ids. Of the page table, which outlives a batch,
only changes are sent.

A message has the lengths of int64 columns (`_COLUMNS`), these, the inputs and the mask. Before
logits, a message of two int64 has LOGITS or BEST_TOKENS and the number of rows; their hidden states
are gathered, as they may be on devices. An empty message ends the epoch.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipespec.engine.attention.attention_plan import AttentionPlan
from pipespec.engine.slice.model_slice import ModelSlice

# The columns of a plan that a message has; then come the first new position of each segment and the
# new page entries.
_COLUMNS = (
    *("write", "positions", "row_start", "page_row", "prefix_length", "tree", "tree_positions"),
    *("tree_start", "num_prompt", "num_committed", "keeps_state", "state_number"),
)
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
        for page, length in zip(plan.page_row.tolist(), plan.prefix_length.tolist(), strict=True):
            self.reserve(page + 1, length)
            now, known = plan.pages[page, :length], self.slots[page, :length]
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
    columns = [*(getattr(plan, name) for name in _COLUMNS), *pages.updates(plan)]
    ints = np.concatenate((np.array([len(each) for each in columns]), *columns))
    parts = torch.from_numpy(ints), inputs.cpu(), torch.from_numpy(plan.mask)
    return torch.cat([_bytes(each) for each in parts])


def unpack(
    message: Tensor, model: ModelSlice, pages: Pages
) -> tuple[Tensor, Tensor, AttentionPlan]:
    """The arguments of `model.forward` in such a message."""
    ints = message[: len(message) // 8 * 8].view(torch.int64).numpy()
    count = len(_COLUMNS) + 2
    bounds = list(accumulate(ints[:count].tolist(), initial=count))
    *columns, starts, news = (ints[start:end] for start, end in pairwise(bounds))
    of_plan: dict[str, Any] = dict(zip(_COLUMNS, columns, strict=True))
    read = 0
    ends = of_plan["page_row"].tolist(), starts.tolist(), of_plan["prefix_length"].tolist()
    for page, start, end in zip(*ends, strict=True):
        pages.reserve(page + 1, end)
        pages.slots[page, start:end] = news[read : (read := read + end - start)]
    positions = torch.from_numpy(of_plan["positions"])
    data = message[8 * bounds[-1] :]
    shape, dtype = positions.shape, torch.int64
    if not model.is_first:
        shape, dtype = torch.Size((len(positions), model.hidden_size)), model.dtype
    size = shape.numel() * dtype.itemsize
    mask = data[size:].view(torch.bool).numpy()
    plan = AttentionPlan(**of_plan, pages=pages.slots, mask=mask)
    return data[:size].view(dtype).view(shape), positions, plan


def _bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(-1).view(torch.uint8)
