"""The CUDA graphs of a slice: its forward pass, or its output head, is captured once and replayed,
one launch instead of hundreds.

A graph always computes a fixed number of rows, its *bucket*; a smaller batch is padded. So the
shapes of the matrix products do not depend on the number of draft tokens in a batch. Inputs,
positions and plans are in tensors with fixed addresses. So are the pools of layers with a running
state until they grow; the graph is then captured anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from pipespec.engine.attention.attention_plan import AttentionBackend, AttentionPlan, causal_plan
from pipespec.engine.attention.device_plan import DevicePlanBackend, PlanCapacity
from pipespec.engine.recurrence.recurrent_layers import RecurrentLayers
from pipespec.engine.recurrence.recurrent_plan import RecurrentPlan
from pipespec.system.device_copy import staged
from pipespec.system.validation import reason

T = TypeVar("T")
# The forward pass: hidden states of inputs and positions.
Compute = Callable[[Tensor, Tensor], Tensor]
# Captures what a function does on the device, which has run before: returns a function that replays
# it, and the tensor with the result of each replay.
CaptureFunction = Callable[[Callable[[], Tensor]], tuple[Callable[[], object], Tensor]]

# Runs before the capture, in which libraries select their kernels.
WARM_UP = 3
# Rows of the batches of the self-test; the first is a prompt.
TEST_ROWS = (40, 1, 64, 17)
# Why a graph that fails it is not used.
DIFFERENT = "replaying the graph gives other values than computing"


@cache
def _capture_stream(gpu: int) -> torch.cuda.Stream:
    """The stream of all captures on a GPU: libraries keep memory for each stream. torch's own is of
    the GPU that was current at the first capture."""
    return torch.cuda.Stream(gpu)


def capture_cuda_graph(run: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
    """Capture a CUDA graph; it fails if the host waits for the device. Other threads may use CUDA
    meanwhile."""
    graph = torch.cuda.CUDAGraph()
    stream = _capture_stream(torch.cuda.current_device())
    # A capture that fails would leave this thread on its stream.
    with (
        torch.cuda.stream(torch.cuda.current_stream()),
        torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
    ):
        result = run()
    return graph.replay, result


class CapturedGraph:
    """The graph of a slice's forward pass for one bucket."""

    def __init__(
        self,
        compute: Compute,
        inputs: Tensor,
        attention: DevicePlanBackend,
        recurrent: RecurrentLayers,
        capture: CaptureFunction,
    ) -> None:
        """`inputs` `[rows, ...]` are an example of the input of `compute`, with the rows of the
        bucket. No KV slot may be in use meanwhile."""
        self.rows = len(inputs)
        self._compute, self._capture_by = compute, capture
        self._attention, self._recurrent = attention, recurrent
        self._inputs = torch.zeros_like(inputs)
        self._positions = torch.zeros(self.rows, dtype=torch.int64, device=inputs.device)
        self._flat = attention.reserve(self.rows)
        self._fixed = recurrent.reserve(self.rows, inputs.device)
        slot = np.zeros(1, np.int64)
        attention.prepare(causal_plan(slot[:0], slot), self._flat)
        self._capture()

    def run(
        self,
        inputs: Tensor,
        positions: Tensor,
        plan: AttentionPlan,
        states: RecurrentPlan[np.ndarray] | None,
    ) -> Tensor | None:
        """The result of `compute` for a batch of at most `self.rows` rows; None: its plan does not
        fit. `states`: what layers with a running state do, if there are any."""
        if not self._flat.capacity.holds(PlanCapacity.of(plan)):
            return None
        if states is not None and not (
            self._fixed is not None and self._fixed.holds(states) and self._recurrent.fits(states)
        ):
            return None
        rows = len(positions)
        for static, given in ((self._inputs, inputs), (self._positions, positions)):
            static[:rows].copy_(staged(given, static.device), non_blocking=True)
        self._attention.prepare(plan, self._flat)
        if states is not None and self._fixed is not None:
            if self._num_growths != self._recurrent.num_growths:
                self._capture()
            self._fixed.fill(states)
        self._replay()
        return self._result[:rows].clone()  # the next replay overwrites it

    def replays_alike(self, inputs: Tensor, num_slots: int) -> bool:
        """Whether replayed and computed results are identical, for a growing text in so many KV
        slots. The same batches are computed whatever is found, as by the other devices."""
        alike, length = True, 0
        slots = np.arange(num_slots)
        for rows in TEST_ROWS:
            rows = min(rows, self.rows, num_slots - length)
            if self._fixed is not None:
                rows = min(rows, self._fixed.depth)
            if not rows:
                break
            plan = causal_plan(slots[:length], slots[length : length + rows], imagined=True)
            states = self._recurrent.plan(plan)
            replayed = self.run(inputs[:rows], torch.arange(length, length + rows), plan, states)
            computed = self._forward()[:rows]
            alike = alike and replayed is not None and replayed.equal(computed)
            length += rows
        return alike

    def _capture(self) -> None:
        """What this stores is overwritten by the next replay, or belongs to no sequence."""
        if self._fixed is not None:
            self._fixed.clear()
        for _ in range(WARM_UP):
            self._forward()
        self._replay, self._result = self._capture_by(self._forward)
        self._num_growths = self._recurrent.num_growths

    def _forward(self) -> Tensor:
        if self._fixed is not None:
            self._recurrent.use_fixed(self._fixed)
        return self._compute(self._inputs, self._positions)


class CapturedHead:
    """The graph of a model's output head for one number of rows."""

    def __init__(
        self, compute: Callable[[Tensor], Tensor], hidden: Tensor, capture: CaptureFunction
    ) -> None:
        """`compute` returns logits; `hidden` `[rows, hidden]` is an example of its input."""
        self.rows = len(hidden)
        self._inputs = hidden.clone()
        for _ in range(WARM_UP):
            compute(self._inputs)
        self._replay, self._result = capture(lambda: compute(self._inputs))
        other = hidden.flip(0)[: max(1, self.rows - 1)]
        if not self.run(other).equal(compute(self._inputs)[: len(other)]):
            raise ValueError(DIFFERENT)

    def run(self, hidden: Tensor) -> Tensor:
        """The logits of `[k, hidden]`, at most `self.rows` rows."""
        rows = len(hidden)
        self._inputs[:rows].copy_(hidden, non_blocking=True)
        self._replay()
        return self._result[:rows].clone()  # the next replay overwrites it


class SliceGraphs:
    """Those of the layers and of the output head. A batch takes the smallest that holds it.
    `captured`: the numbers of rows of the layers' graphs, those that were released, or whose
    capture was interrupted, included."""

    def __init__(self) -> None:
        self._layers: list[CapturedGraph] = []  # by rising number of rows
        self._heads: list[CapturedHead] = []
        self.captured: tuple[int, ...] = ()

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(graph.rows for graph in self._layers)

    def drop(self) -> None:
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
        return next((each.run(hidden) for each in self._heads if len(hidden) <= each.rows), None)

    def capture_layers(
        self,
        compute: Compute,
        examples: Sequence[Tensor],
        attention: AttentionBackend,
        name: str,
        recurrent: RecurrentLayers,
        num_slots: int,
        capture: CaptureFunction,
        agree: Callable[[bool], bool],
    ) -> list[str]:
        """Capture a graph for inputs like each of these examples, in place of earlier ones; what
        could not be captured, in sentences. `name`: of the attention backend; `num_slots`: those
        that every device of the stage has; `agree`: whether all of them say so."""
        self._layers, refused = [], []
        self.captured = tuple(map(len, examples))
        recurrent.make_room(max(map(len, examples), default=0))
        for inputs in examples:
            why = f"attention={name} cannot be captured"
            graph: CapturedGraph | None = None
            if isinstance(attention, DevicePlanBackend):
                args = compute, inputs, attention, recurrent, capture
                graph, why = _tried(partial(CapturedGraph, *args))
            # A replay waits for that of every other device.
            if agree(graph is not None) and graph is not None:
                alike, why = _tried(partial(graph.replays_alike, inputs, num_slots))
                if agree(bool(alike)):
                    self._layers.append(graph)
                    continue
                why = why or DIFFERENT
            refused.append(
                f"Batches of up to {len(inputs)} rows are computed without a graph: "
                f"{why or 'another device of the stage cannot capture it'}."
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
