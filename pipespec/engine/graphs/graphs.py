"""CUDA graphs: the forward pass of a slice, or its output head, is captured once and replayed, one
launch instead of hundreds.

A graph always computes a fixed number of rows, its *bucket*; a smaller batch is padded. So the
shapes of the matrix products do not depend on the number of draft tokens in a batch. Inputs,
positions and plans are in tensors with fixed addresses. So are the pools of layers with a running
state until they grow; the graph is then captured anew.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pipespec.engine.attention.attention_plan import AttentionPlan, causal_plan
from pipespec.engine.attention.device_plan import DevicePlanBackend, PlanCapacity
from pipespec.engine.recurrence.recurrent_layers import RecurrentLayers
from pipespec.engine.recurrence.recurrent_plan import RecurrentPlan
from pipespec.system.device_copy import staged

# Runs before the capture, in which libraries select their kernels.
WARM_UP = 3
# Rows of the batches of the self-test; the first is a prompt.
TEST_ROWS = (40, 1, 64, 17)
# Why a graph that fails it does not serve.
DIFFERENT = "replaying the graph gives other values than computing"


class CaptureFunction(Protocol):
    """Captures what a function does on the device; the function has run before."""

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        """Returns a function that replays it, and the tensor with the result of each replay."""
        ...


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
        compute: Callable[[Tensor, Tensor], Tensor],
        inputs: Tensor,
        attention: DevicePlanBackend,
        recurrent: RecurrentLayers,
        capture: CaptureFunction = capture_cuda_graph,
    ) -> None:
        """`compute` is the forward pass; `inputs` `[rows, ...]` are an example of its input, with
        the rows of the bucket. No KV slot may be in use meanwhile."""
        self.rows = len(inputs)
        self._compute = compute
        self._attention, self._recurrent = attention, recurrent
        self._inputs = torch.zeros_like(inputs)
        self._positions = torch.zeros(self.rows, dtype=torch.int64, device=inputs.device)
        self._flat = attention.reserve(self.rows)
        self._fixed = recurrent.reserve(self.rows, inputs.device)
        self._capture_by = capture
        slot = np.zeros(1, np.int64)
        attention.prepare(causal_plan(slot[:0], slot), self._flat)
        self._capture()

    def run(
        self,
        inputs: Tensor,
        positions: Tensor,
        plan: AttentionPlan,
        states: RecurrentPlan[np.ndarray] | None = None,
    ) -> Tensor | None:
        """The result of `compute` for a batch of at most `self.rows` rows; None: its plan does not
        fit. `states`: what layers with a running state do, if there are any."""
        if not self._flat.capacity.holds(PlanCapacity.of(plan)):
            return None
        if states is not None and not self._holds(states):
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
        slots. The same batches are computed whatever is found, as by the other members of a
        group."""
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

    def _holds(self, states: RecurrentPlan[np.ndarray]) -> bool:
        fixed = self._fixed
        return fixed is not None and fixed.holds(states) and self._recurrent.fits(states)

    def _capture(self) -> None:
        """Capture the forward pass. What it stores is overwritten by the next replay, or belongs to
        no sequence."""
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
        self,
        compute: Callable[[Tensor], Tensor],
        hidden: Tensor,
        capture: CaptureFunction = capture_cuda_graph,
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
