"""The workers of a tensor-parallel slice: member 0 drives, the others compute the same batches.

Member 0 broadcasts the arguments of each `ModelSlice.forward`. Only member 0 knows sequences,
verdicts and slots; the attention plan contains slot ids. Of the page table, which outlives a batch,
only changes are sent.

A message has the lengths of int64 columns (`_COLUMNS`), these, the inputs and the mask. Before
logits, a message of two int64 has LOGITS or BEST_TOKENS and the number of rows; their hidden states
are gathered, as they may be on devices. An empty message ends the workers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from pipespec.engine.attention.attention_plan import AttentionPlan
from pipespec.engine.graphs.graphs import CaptureFunction, capture_cuda_graph
from pipespec.engine.slice.model_slice import ModelSlice
from pipespec.engine.slice.speedups import capture_graphs
from pipespec.engine.tensor_parallel.tensor_parallel import TPGroup, TPRank
from pipespec.engine.tensor_parallel.tp_member import TPMember
from pipespec.system.liveness import LATE_S, progress

# The columns of a plan that a message has; then come the first new position of each segment and the
# new page entries.
_COLUMNS = (
    *("write", "positions", "row_start", "page_row", "prefix_length", "tree", "tree_positions"),
    *("tree_start", "num_prompt", "num_committed", "keeps_state", "state_number"),
)
LOGITS, BEST_TOKENS = -1, -2


class TPBroadcastGroup(TPGroup, Protocol):
    """A group whose member 0 can broadcast messages to the others."""

    def broadcast(self, message: Tensor) -> None:
        """Send bytes, uint8 `[length]`, from member 0. Raises `RankFailed`."""
        ...

    def receive(self) -> Tensor:
        """The next broadcast of member 0. Raises `RankFailed`."""
        ...


@contextmanager
def _joined(model: ModelSlice, group: TPBroadcastGroup, capture: CaptureFunction) -> Iterator[int]:
    """Use this group within the block, with the attention backend and graphs of member 0; yields
    the number of KV slots that every member has.

    Graphs are captured again with this group. No KV slot may be in use meanwhile. Raises ModelError
    if this member cannot use the backend, RankFailed if another member is lost.
    """
    member = model.parallel
    assert isinstance(member, TPMember)
    assert isinstance(member.group, TPRank)
    with member.group.joined(group):
        try:
            rows = list(model.graphs.captured)
            if group.rank == 0:
                choice = json.dumps([model.attention, rows]).encode()
                group.broadcast(_bytes(np.frombuffer(choice, np.uint8).copy()))
            else:
                attention, rows = json.loads(bytes(group.receive().numpy()))
                model.adopt_backend(attention)
            if rows:
                capture_graphs(model, rows, capture)
            else:
                model.graphs.drop()  # those captured while it was loaded gather nothing
            slots = member.least(model.num_slots)
            member.driver = None if group.rank else TPDriver(group)
            yield slots
        finally:
            member.driver = None
            model.graphs.release()


@contextmanager
def leading_tp_group(
    model: ModelSlice, group: TPBroadcastGroup, capture: CaptureFunction = capture_cuda_graph
) -> Iterator[int]:
    """Lead the other members of a tensor-parallel rank within the block; yields the number of KV
    slots that all of them have. Raises ModelError, `RankFailed`."""
    with _joined(model, group, capture) as slots:
        yield slots
        group.broadcast(torch.empty(0, dtype=torch.uint8))


def follow_tp_leader(
    model: ModelSlice, group: TPBroadcastGroup, capture: CaptureFunction = capture_cuda_graph
) -> None:
    """Compute the batches of member 0 until it ends. Raises ModelError, `RankFailed`."""
    pages = _Pages()
    with _joined(model, group, capture), progress.part(LATE_S):
        while len(message := group.receive()):
            kind, rows = message[:16].view(torch.int64).tolist()
            if kind in (LOGITS, BEST_TOKENS):
                none = torch.zeros(rows, model.hidden_size, dtype=model.dtype, device=model.device)
                compute = model.logits if kind == LOGITS else model.best_tokens
                compute(group.gather(none)[0])
            else:
                model.forward(*_unpack(message, model, pages))


class TPDriver:
    """Member 0: it broadcasts every batch to the workers (`TPMember.driver`)."""

    def __init__(self, group: TPBroadcastGroup):
        self._group = group
        self._pages = _Pages()

    def batch(self, inputs: Tensor, plan: AttentionPlan) -> None:
        """Broadcast a batch to the workers. Raises `RankFailed`."""
        self._group.broadcast(_pack(inputs, plan, self._pages))

    def head(self, hidden: Tensor, *, best: bool) -> None:
        """Let the workers compute the logits of hidden states, or with `best` the tokens with the
        largest. Raises `RankFailed`."""
        kind = BEST_TOKENS if best else LOGITS
        self._group.broadcast(_bytes(np.array([kind, len(hidden)])))
        self._group.gather(hidden)


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


def _pack(inputs: Tensor, plan: AttentionPlan, pages: _Pages) -> Tensor:
    assert not plan.imagined, "measurements are made before the workers compute"
    columns = [*(getattr(plan, name) for name in _COLUMNS), *pages.updates(plan)]
    ints = np.concatenate((np.array([len(each) for each in columns]), *columns))
    return torch.cat((_bytes(ints), _as_bytes(inputs.cpu()), _bytes(plan.mask)))


def _unpack(
    message: Tensor, model: ModelSlice, pages: _Pages
) -> tuple[Tensor, Tensor, AttentionPlan]:
    """The arguments of `model.forward`."""
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


def _bytes(column: np.ndarray) -> Tensor:
    return _as_bytes(torch.from_numpy(column))


def _as_bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(-1).view(torch.uint8)
