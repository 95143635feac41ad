"""A slice's forward, recorded once and replayed: one launch instead of hundreds.

A recording has a *bucket* of rows, all of which it computes; a batch with fewer has rows of padding
beside its own, which nobody looks at. The matrix products of a bucket are the same whatever stands
in it, so a row's result does not depend on how many guesses are beside it. What changes from step
to step lies in tensors that stay where they are: inputs, positions, and the flat plan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pipespec.engine.attention.flat import Capacity, FlatAttention
from pipespec.engine.attention.plan import AttentionPlan, causal_plan

# Runs before one is recorded: libraries choose their kernels in the first ones.
WARM_UP = 3
# Rows of the plans by which a recording proves itself; the first is a prompt.
PROVED = (40, 1, 64, 17)


class Recorder(Protocol):
    """Records what a function does on the device; it has run before."""

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        """What does it again, and where the result then lies."""
        ...


def record_cuda(run: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
    """As a CUDA graph, which refuses whatever waits for the device. Other threads may go on."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = run()
    return graph.replay, result


class Recording:
    """One bucket of a slice's forward."""

    def __init__(
        self,
        compute: Callable[[Tensor, Tensor], Tensor],
        inputs: Tensor,
        attention: FlatAttention,
        num_slots: int,
        record: Recorder = record_cuda,
    ) -> None:
        """`compute` is the forward; `inputs` `[rows, ...]` are as it takes them, and say how many
        rows the bucket has. The KV slots are nobody's until this is over."""
        self.rows = len(inputs)
        self._compute = compute
        self._attention = attention
        self._inputs = torch.zeros_like(inputs)
        self._positions = torch.zeros(self.rows, dtype=torch.int64, device=inputs.device)
        self._flat = attention.reserved(self.rows)
        slot = np.zeros(1, np.int64)
        attention.prepare(causal_plan(slot[:0], slot), self._flat)
        for _ in range(WARM_UP):
            self._whole()
        self._replay, self._result = record(self._whole)
        self._prove(inputs, num_slots)

    def run(self, inputs: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor | None:
        """What `compute` gives for a batch of no more rows than the bucket's; None: its plan does
        not fit."""
        if not self._flat.capacity.holds(Capacity.of(plan)):
            return None
        rows = len(positions)
        self._inputs[:rows].copy_(inputs, non_blocking=True)
        self._positions[:rows].copy_(positions, non_blocking=True)
        self._attention.prepare(plan, self._flat)
        self._replay()
        return self._result[:rows].clone()  # the next run overwrites it

    def _whole(self) -> Tensor:
        return self._compute(self._inputs, self._positions)

    def _prove(self, inputs: Tensor, num_slots: int) -> None:
        """Raise ValueError unless replaying and computing give the very same, as a text grows."""
        held = 0
        slots = np.arange(num_slots)
        for rows in PROVED:
            rows = min(rows, self.rows, num_slots - held)
            if not rows:
                break
            plan = causal_plan(slots[:held], slots[held : held + rows])
            replayed = self.run(inputs[:rows], torch.arange(held, held + rows), plan)
            if replayed is None or not replayed.equal(self._whole()[:rows]):
                raise ValueError("a recorded graph gives other values than what was recorded")
            held += rows
