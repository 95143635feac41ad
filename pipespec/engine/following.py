"""How the members of a group compute the same batches: the first is told them, the others follow.

A member needs of a batch what `ModelSlice.forward` is called with. Sequences, verdicts and slots
are the first member's alone; its plan names the slots. Of the page table, which outlives a batch,
only what the others have not been told yet goes along.

A call is bytes: ints (how many rows, segments, tree keys, and new pages), then int64 columns in
the order of `_columns`, then what goes into the slice, then the mask. No bytes at all end it.
"""

from __future__ import annotations

import json
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pipespec.engine.attention.plan import AttentionPlan
from pipespec.engine.graphs import Recorder, record_cuda
from pipespec.engine.model import ModelSlice
from pipespec.engine.tensor_parallel import Group

_INTS = 4


class CallGroup(Group, Protocol):
    """A group whose first member can tell the others something."""

    def tell(self, message: Tensor) -> None:
        """Send bytes, uint8 `[length]`, from member 0. Raises `RankFailed`."""
        ...

    def hear(self) -> Tensor:
        """What member 0 tells next. Raises `RankFailed`."""
        ...


def agree(model: ModelSlice, group: CallGroup, record: Recorder = record_cuda) -> int:
    """How many KV slots every member has; all of them attend as the first one from now on, and
    replay what it does, recorded anew with these members. The slots are nobody's until then.

    Raises `ModelError` if this member cannot, `RankFailed` if another is lost.
    """
    slots = [int(each) for each in group.gather(torch.tensor([model.num_slots]))]
    rows = list(model.graph_rows)
    if group.rank == 0:
        told = json.dumps([model.attention, rows]).encode()
        group.tell(_bytes(np.frombuffer(told, np.uint8).copy()))
    else:
        attention, rows = json.loads(bytes(group.hear().numpy()))
        model.attend_as(attention)
    if rows:
        model.record(rows, record)
        recorded = torch.tensor([each in model.graph_rows for each in rows])
        by_all = torch.stack([*group.gather(recorded)]).all(0).tolist()
        model.replay_only([each for each, all_of in zip(rows, by_all, strict=True) if all_of])
    return min(slots)


def follow(model: ModelSlice, group: CallGroup) -> None:
    """Compute what the first member computes, until it ends. Raises `RankFailed`."""
    pages = _Pages()
    while len(message := group.hear()):
        model.forward(*_unpack(message, model, pages))


class Leader:
    """The first member: what it is called with, the others compute too (`ModelSlice.lead`)."""

    def __init__(self, group: CallGroup):
        self._group = group
        self._pages = _Pages()

    def __call__(self, inputs: Tensor, plan: AttentionPlan) -> None:
        """Have the others compute a batch. Raises `RankFailed`."""
        self._group.tell(_pack(inputs, plan, self._pages))

    def end(self) -> None:
        """Let the others go. Raises `RankFailed`."""
        self._group.tell(torch.empty(0, dtype=torch.uint8))


class _Pages:
    """The page table as far as the followers have been told of it."""

    def __init__(self) -> None:
        self.slots = np.zeros((1, 256), np.int64)

    def reserve(self, sequences: int, positions: int) -> None:
        """Have so many rows and columns at least."""
        rows, columns = self.slots.shape
        if sequences > rows or positions > columns:
            grown = np.zeros((max(sequences, rows), max(2 * columns, positions)), np.int64)
            grown[:rows, :columns] = self.slots
            self.slots = grown

    def news(self, plan: AttentionPlan) -> tuple[list[int], np.ndarray]:
        """Where what each segment reads begins to be unknown, and the slots from there on, which
        are known from now on."""
        starts, slots = [], [np.zeros(0, np.int64)]
        for page, length in zip(plan.page_row.tolist(), plan.prefix_length.tolist(), strict=True):
            self.reserve(page + 1, length)
            now, known = plan.pages[page, :length], self.slots[page, :length]
            differs = np.flatnonzero(now != known)
            start = int(differs[0]) if len(differs) else length
            known[start:] = now[start:]
            starts.append(start)
            slots.append(now[start:])
        return starts, np.concatenate(slots)


def _columns(rows: int, segments: int, keys: int, news: int) -> list[int]:
    """The lengths of the columns of a call, in order: write, positions, row_start, page_row,
    prefix_length, the first new position of each page, the new pages, tree, tree_positions,
    tree_start."""
    return [rows, rows, segments + 1, segments, segments, segments, news, keys, keys, segments + 1]


def _pack(inputs: Tensor, plan: AttentionPlan, pages: _Pages) -> Tensor:
    starts, news = pages.news(plan)
    sizes = (len(plan.write), len(plan.page_row), len(plan.tree), len(news))
    columns = (
        plan.write,
        plan.positions,
        plan.row_start,
        plan.page_row,
        plan.prefix_length,
        np.array(starts, np.int64),
        news,
        plan.tree,
        plan.tree_positions,
        plan.tree_start,
    )
    assert [len(each) for each in columns] == _columns(*sizes)
    ints = np.concatenate((np.array(sizes, np.int64), *columns))
    parts = (_bytes(ints), _as_bytes(inputs.cpu()), _bytes(plan.mask))
    return torch.cat(parts)


def _unpack(
    message: Tensor, model: ModelSlice, pages: _Pages
) -> tuple[Tensor, Tensor, AttentionPlan]:
    """What `model.forward` is called with."""
    ints = message[: len(message) // 8 * 8].view(torch.int64).numpy()
    lengths = _columns(*ints[:_INTS].tolist())
    bounds = list(accumulate(lengths, initial=_INTS))
    write, positions, row_start, page_row, length, starts, news, tree, tree_at, tree_start = (
        ints[start : start + size] for start, size in zip(bounds, lengths, strict=False)
    )
    read = 0
    rows_of_pages = (page_row.tolist(), starts.tolist(), length.tolist())
    for page, start, end in zip(*rows_of_pages, strict=True):
        pages.reserve(page + 1, end)
        pages.slots[page, start:end] = news[read : (read := read + end - start)]
    data = message[8 * bounds[-1] :]
    if model.is_first:
        inputs = data[: 8 * len(write)].view(torch.int64)
        num_bytes = inputs.nbytes
    else:
        num_bytes = len(write) * model.hidden_size * model.dtype.itemsize
        inputs = data[:num_bytes].view(model.dtype).view(len(write), model.hidden_size)
    plan = AttentionPlan(
        write=write,
        positions=positions,
        row_start=row_start,
        pages=pages.slots,
        page_row=page_row,
        prefix_length=length,
        tree=tree,
        tree_positions=tree_at,
        tree_start=tree_start,
        mask=data[num_bytes:].view(torch.bool).numpy(),
    )
    return inputs, torch.from_numpy(positions), plan


def _bytes(column: np.ndarray) -> Tensor:
    return _as_bytes(torch.from_numpy(column))


def _as_bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(-1).view(torch.uint8)
