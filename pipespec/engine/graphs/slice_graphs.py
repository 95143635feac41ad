"""The CUDA graphs of a slice, by their numbers of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
from torch import Tensor

from pipespec.engine.attention.attention_plan import AttentionBackend, AttentionPlan
from pipespec.engine.attention.device_plan import DevicePlanBackend
from pipespec.engine.graphs.graphs import DIFFERENT, CapturedGraph, CapturedHead, CaptureFunction
from pipespec.engine.recurrence.recurrent_layers import RecurrentLayers
from pipespec.engine.recurrence.recurrent_plan import RecurrentPlan
from pipespec.system.validation import reason

T = TypeVar("T")


class SliceGraphs:
    """Those of the layers and of the output head. A batch takes the smallest that holds it.

    Attributes:
        captured: the numbers of rows of the layers' graphs, those that were released, or whose
            capture was interrupted, included.
    """

    def __init__(self) -> None:
        self._layers: list[CapturedGraph] = []  # by rising number of rows
        self._heads: list[CapturedHead] = []
        self.captured: tuple[int, ...] = ()

    @property
    def rows(self) -> tuple[int, ...]:
        """The numbers of rows of the layers' graphs."""
        return tuple(graph.rows for graph in self._layers)

    def drop(self) -> None:
        """Drop the layers' graphs."""
        self._layers, self.captured = [], ()

    def release(self) -> None:
        """Free the layers' graphs, which are to be captured again, before the group whose
        collectives they contain ends: NCCL does not end a group that a graph holds."""
        self._layers = []

    def run(
        self,
        inputs: Tensor,
        positions: Tensor,
        plan: AttentionPlan,
        states: RecurrentPlan[np.ndarray] | None,
    ) -> Tensor | None:
        """The hidden states of a batch; None: no graph holds it. See `CapturedGraph.run`."""
        for graph in self._layers:
            if len(positions) <= graph.rows:
                found = graph.run(inputs, positions, plan, states)
                if found is not None:
                    return found
        return None

    def logits(self, hidden: Tensor) -> Tensor | None:
        """The logits of `[k, hidden]`; None: no graph holds so many rows."""
        return next((each.run(hidden) for each in self._heads if len(hidden) <= each.rows), None)

    def capture_layers(
        self,
        compute: Callable[[Tensor, Tensor], Tensor],
        examples: Sequence[Tensor],
        attention: AttentionBackend,
        name: str,
        recurrent: RecurrentLayers,
        num_slots: int,
        capture: CaptureFunction,
        agree: Callable[[bool], bool],
    ) -> list[str]:
        """Capture a graph for inputs like each of these examples, in place of earlier ones; what
        could not be captured, in sentences. Raises RankFailed if another member is lost.

        Args:
            name: of the attention backend.
            num_slots: those that every member has.
            agree: whether all members that compute the slice together say so.
        """
        self._layers, refused = [], []
        self.captured = tuple(map(len, examples))
        recurrent.make_room(max(map(len, examples), default=0))
        for inputs in examples:
            why = f"attention={name} cannot be captured"
            graph: CapturedGraph | None = None
            if isinstance(attention, DevicePlanBackend):
                graph, why = _tried(
                    partial(CapturedGraph, compute, inputs, attention, recurrent, capture)
                )
            # A replay waits for that of every other member.
            if agree(graph is not None) and graph is not None:
                alike, why = _tried(partial(graph.replays_alike, inputs, num_slots))
                if agree(bool(alike)):
                    self._layers.append(graph)
                    continue
                why = why or DIFFERENT
            refused.append(
                f"Batches of up to {len(inputs)} rows are computed without a graph: "
                f"{why or 'another tensor-parallel member cannot capture it'}."
            )
        self.captured = self.rows
        return refused

    def capture_heads(
        self,
        compute: Callable[[Tensor], Tensor],
        examples: Sequence[Tensor],
        capture: CaptureFunction,
    ) -> list[str]:
        """The same for the output head."""
        self._heads, refused = [], []
        for hidden in examples:
            head, why = _tried(partial(CapturedHead, compute, hidden, capture))
            if head is not None:
                self._heads.append(head)
            else:
                refused.append(
                    f"The output head computes up to {len(hidden)} rows without a graph: {why}."
                )
        return refused


def _tried(make: Callable[[], T]) -> tuple[T | None, str]:
    """What a call returns, or None and why it failed."""
    try:
        return make(), ""
    except Exception as error:  # noqa: BLE001 - models, drivers and kernels raise anything
        return None, reason(error, named=False)
