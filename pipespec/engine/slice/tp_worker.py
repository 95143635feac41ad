"""The workers of a tensor-parallel slice: member 0 drives, the others compute the same batches.

Member 0 broadcasts the arguments of each `ModelSlice.forward`. Only member 0 knows sequences,
verdicts and slots; the attention plan contains slot ids. Of the page table, which outlives a batch,
only changes are sent.

A message has 4 int64 (numbers of rows, segments, tree keys, and new page entries), then int64
columns in the order of `_columns`, then the inputs, then the mask. Before logits, a message of
two int64 has LOGITS or BEST_TOKENS and the number of rows; their hidden states are gathered, as
they may be on devices. An empty message ends the workers.
"""

from __future__ import annotations

import json
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pipespec.engine.attention.attention_plan import AttentionPlan
from pipespec.engine.graphs.graphs import CaptureFunction, capture_cuda_graph
from pipespec.engine.slice.model_slice import ModelSlice
from pipespec.engine.tensor_parallel.tensor_parallel import TPGroup
from pipespec.system.liveness import LATE_S, progress

_INTS = 4
LOGITS, BEST_TOKENS = -1, -2


class TPBroadcastGroup(TPGroup, Protocol):
    """A group whose member 0 can broadcast messages to the others."""

    def broadcast(self, message: Tensor) -> None:
        """Send bytes, uint8 `[length]`, from member 0. Raises `RankFailed`."""
        ...

    def receive(self) -> Tensor:
        """The next broadcast of member 0. Raises `RankFailed`."""
        ...


def negotiate(
    model: ModelSlice, group: TPBroadcastGroup, capture: CaptureFunction = capture_cuda_graph
) -> int:
    """Make all members use the attention backend and graphs of member 0; returns the number of KV
    slots that every member has.

    Graphs are captured again with this group. No KV slot may be in use meanwhile. Raises ModelError
    if this member cannot use the backend, RankFailed if another member is lost.
    """
    rows = list(model.graphs.captured)
    if group.rank == 0:
        choice = json.dumps([model.attention, rows]).encode()
        group.broadcast(_bytes(np.frombuffer(choice, np.uint8).copy()))
    else:
        attention, rows = json.loads(bytes(group.receive().numpy()))
        model.adopt_backend(attention)
    if rows:
        model.capture_graphs(rows, capture)
    else:
        model.graphs.drop()  # those captured while it was loaded gather nothing
    return model.least_of_group(model.num_slots)


def run_tp_worker(model: ModelSlice, group: TPBroadcastGroup) -> None:
    """Compute the batches of member 0 until it ends. Raises `RankFailed`."""
    pages = _Pages()
    with progress.part(LATE_S):
        while len(message := group.receive()):
            kind, rows = message[:16].view(torch.int64).tolist()
            if kind in (LOGITS, BEST_TOKENS):
                none = torch.zeros(rows, model.hidden_size, dtype=model.dtype, device=model.device)
                compute = model.logits if kind == LOGITS else model.best_tokens
                compute(group.gather(none)[0])
            else:
                model.forward(*_unpack(message, model, pages))


class TPDriver:
    """Member 0: it broadcasts every batch to the workers (`ModelSlice.set_driver`)."""

    def __init__(self, group: TPBroadcastGroup):
        self._group = group
        self._pages = _Pages()

    def __call__(self, inputs: Tensor, plan: AttentionPlan) -> None:
        """Broadcast a batch to the workers. Raises `RankFailed`."""
        self._group.broadcast(_pack(inputs, plan, self._pages))

    def logits(self, hidden: Tensor) -> None:
        """Let the workers compute the logits of hidden states. Raises `RankFailed`."""
        self._send_hidden(LOGITS, hidden)

    def best_tokens(self, hidden: Tensor) -> None:
        """The same of the tokens with the largest logits. Raises `RankFailed`."""
        self._send_hidden(BEST_TOKENS, hidden)

    def _send_hidden(self, kind: int, hidden: Tensor) -> None:
        self._group.broadcast(_bytes(np.array([kind, len(hidden)])))
        self._group.gather(hidden)

    def end(self) -> None:
        """End the workers. Raises `RankFailed`."""
        self._group.broadcast(torch.empty(0, dtype=torch.uint8))


class _Pages:
    """The page table as far as the workers have received it."""

    def __init__(self) -> None:
        self.slots = np.zeros((1, 256), np.int64)

    def reserve(self, sequences: int, positions: int) -> None:
        """Grow to so many rows and columns at least."""
        rows, columns = self.slots.shape
        if sequences > rows or positions > columns:
            grown = np.zeros((max(sequences, rows), max(2 * columns, positions)), np.int64)
            grown[:rows, :columns] = self.slots
            self.slots = grown

    def updates(self, plan: AttentionPlan) -> tuple[list[int], np.ndarray]:
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
        return starts, np.concatenate(slots)


def _columns(rows: int, segments: int, keys: int, news: int) -> list[int]:
    """The lengths of the columns of a message, in order: write, positions, row_start, page_row,
    prefix_length, the first new position of each segment, new page entries, tree, tree_positions,
    tree_start, num_committed, keeps_state, state_number."""
    of_segments = (segments + 1, segments, segments, segments)
    return [rows, rows, *of_segments, news, keys, keys, segments + 1, *[segments] * 3]


def _pack(inputs: Tensor, plan: AttentionPlan, pages: _Pages) -> Tensor:
    assert not plan.imagined, "measurements are made before the workers compute"
    starts, news = pages.updates(plan)
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
        plan.num_committed,
        plan.keeps_state,
        plan.state_number,
    )
    assert [len(each) for each in columns] == _columns(*sizes)
    ints = np.concatenate((np.array(sizes, np.int64), *columns))
    parts = (_bytes(ints), _as_bytes(inputs.cpu()), _bytes(plan.mask))
    return torch.cat(parts)


def _unpack(
    message: Tensor, model: ModelSlice, pages: _Pages
) -> tuple[Tensor, Tensor, AttentionPlan]:
    """The arguments of `model.forward`."""
    ints = message[: len(message) // 8 * 8].view(torch.int64).numpy()
    lengths = _columns(*ints[:_INTS].tolist())
    bounds = list(accumulate(lengths, initial=_INTS))
    write, positions, row_start, page_row, length, starts, news, tree, tree_at, *rest = (
        ints[start : start + size] for start, size in zip(bounds, lengths, strict=False)
    )
    tree_start, num_committed, keeps_state, state_number = rest
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
        num_committed=num_committed,
        keeps_state=keeps_state,
        state_number=state_number,
    )
    return inputs, torch.from_numpy(positions), plan


def _bytes(column: np.ndarray) -> Tensor:
    return _as_bytes(torch.from_numpy(column))


def _as_bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(-1).view(torch.uint8)
