"""The members of a tensor-parallel slice: member 0 leads, the others compute the same batches."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipespec.engine.attention.attention_plan import AttentionPlan
from pipespec.engine.formats.stored import Units
from pipespec.engine.graphs.graphs import CaptureFunction, capture_cuda_graph
from pipespec.engine.slice.model_slice import ModelSlice
from pipespec.engine.slice.speedups import capture_graphs
from pipespec.engine.slice.whole_slice import WholeSlice
from pipespec.engine.tensor_parallel import tp_messages, tp_plan
from pipespec.engine.tensor_parallel.tensor_parallel import (
    TPBroadcastGroup,
    gather_best,
    gather_columns,
)
from pipespec.engine.tensor_parallel.tp_cuts import has_plan, require_tp_divisible
from pipespec.system.liveness import LATE_S, progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TPMember(WholeSlice):
    """Member `rank` of `size`, by a process group that differs in each epoch. Until the first one,
    `gather` repeats the member's own tensor, as loading needs its shape alone.

    Attributes:
        plan: how the members divide the model; set by `prepare`.
        sent: of a member that leads, the pages that the others have; None: all are called alike.
    """

    plan: tp_plan.TPPlan
    sent: tp_messages.Pages | None = None
    no_compiler = "as compilers cannot handle the communication between its tensor-parallel members"

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size
        self._loading = True
        self._group: TPBroadcastGroup | None = None

    @property
    def group(self) -> TPBroadcastGroup:
        assert self._group is not None, "the members do not meet"
        return self._group

    def join(self, group: TPBroadcastGroup | None) -> None:
        """Gather with this group from now on; None: not at all."""
        assert group is None or (group.rank, group.size) == (self.rank, self.size)
        self._loading, self._group, self.sent = False, group, None

    def gather(self, mine: Tensor) -> Sequence[Tensor]:
        """See `TPGroup`."""
        return [mine] * self.size if self._loading else self.group.gather(mine)

    # --- what a slice asks ------------------------------------------------------------------------

    def no_graphs(self) -> str:
        if self._loading or self.group.supports_graphs:
            return ""
        return "as the host adds up the results of its tensor-parallel members"

    def require_divisible(self, path: Path, config: Any, *, requantized: bool) -> None:
        found = has_plan(config)
        require_tp_divisible(path, config.model_type, found, self.size, requantized=requantized)

    def prepare(
        self,
        units: Units,
        state: MutableMapping[str, Any] | None,
        keep: Callable[..., None],
        model: PreTrainedModel,
    ) -> None:
        assert state is not None, "packages' matrices are not divided"
        self.plan = tp_plan.plan_cuts(model, self.size, units)
        mine = {name: parts[self.rank] for name, parts in self.plan.cuts.items()}
        tp_plan.cut_state(model, state, mine)
        tp_plan.shrink(model, mine)
        if self.rank:
            tp_plan.drop_summed_biases(model, self.plan)
        keep(model, {name: cut.part for name, cut in mine.items()})
        tp_plan.add_collectives(model, self, self.plan)

    def batch(self, inputs: Tensor, plan: AttentionPlan) -> None:
        if self.sent is not None:
            self.group.broadcast(tp_messages.pack(inputs, plan, self.sent))

    def logits(self, hidden: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        self._begin_head(tp_messages.LOGITS, hidden)
        return gather_columns(self, compute(hidden), self.plan.vocabulary)

    def best_tokens(
        self, hidden: Tensor, compute: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        self._begin_head(tp_messages.BEST_TOKENS, hidden)
        return gather_best(self, compute(hidden), self.plan.vocabulary)

    def _begin_head(self, kind: int, hidden: Tensor) -> None:
        if self.sent is not None:
            self.group.broadcast(tp_messages.head_message(kind, len(hidden)))
            self.gather(hidden)

    def least(self, mine: int) -> int:
        return min(int(each) for each in self.gather(torch.tensor([int(mine)])))


# --- an epoch -----------------------------------------------------------------------------------


@contextmanager
def _joined(model: ModelSlice, group: TPBroadcastGroup, capture: CaptureFunction) -> Iterator[int]:
    """Use this group within the block, with the attention backend and graphs of member 0; yields
    the number of KV slots that every member has.

    Graphs are captured again with this group. No KV slot may be in use meanwhile. Raises ModelError
    if this member cannot use the backend, RankFailed if another member is lost.
    """
    member = model.parallel
    assert isinstance(member, TPMember)
    member.join(group)
    try:
        rows = list(model.graphs.captured)
        if group.rank == 0:
            choice = json.dumps([model.attention, rows]).encode()
            group.broadcast(torch.frombuffer(bytearray(choice), dtype=torch.uint8))
        else:
            attention, rows = json.loads(bytes(group.receive().numpy()))
            model.adopt_backend(attention)
        if rows:
            capture_graphs(model, rows, capture)
        else:
            model.graphs.drop()  # those captured while it was loaded gather nothing
        slots = member.least(model.num_slots)
        member.sent = None if group.rank else tp_messages.Pages()
        yield slots
    finally:
        member.join(None)
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
    pages = tp_messages.Pages()
    with _joined(model, group, capture), progress.part(LATE_S):
        while len(message := group.receive()):
            if (head := tp_messages.head_of(message)) is None:
                model.forward(*tp_messages.unpack(message, model, pages))
                continue
            kind, rows = head
            none = torch.zeros(rows, model.hidden_size, dtype=model.dtype, device=model.device)
            compute = model.logits if kind == tp_messages.LOGITS else model.best_tokens
            compute(group.gather(none)[0])
