"""Compiles a slice, so that the small operations between matrix products are fused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from pipespec.engine.attention.attention_plan import AttentionBackend, AttentionPlan

Compute = Callable[[Tensor, Tensor], Tensor]

# Rows of the batches of the self-test.
TEST_ROWS = (1, 17, 40)
# The allowed error, in roundings of the largest value: fused operations round less often.
ROUNDINGS = 64


class Compilable(Protocol):
    """The part of a slice that is compiled, and what its self-test needs."""

    dtype: torch.dtype
    num_slots: int

    @property
    def backend(self) -> AttentionBackend: ...
    def compute(self, inputs: Tensor, positions: Tensor) -> Tensor: ...
    def example_batch(self, rows: int) -> tuple[Tensor, Tensor, AttentionPlan]: ...


def compile_slice(model: Compilable, by: str | Callable[..., Any]) -> Compute:
    """The slice's `compute`, compiled by a backend of torch.compile for any number of rows.

    No KV slot may be in use meanwhile. Raises ValueError if the results differ by more than
    rounding, and whatever the compiler raises.
    """
    found: Compute = torch.compile(model.compute, fullgraph=True, dynamic=True, backend=by)
    for rows in TEST_ROWS:
        inputs, positions, plan = model.example_batch(min(rows, model.num_slots))
        model.backend.prepare(plan)
        expected = model.compute(inputs, positions)
        off = float((found(inputs, positions) - expected).abs().max())
        allowed = ROUNDINGS * torch.finfo(model.dtype).eps * float(expected.abs().max())
        if not off <= allowed:
            raise ValueError(f"its error is {off:.2g} where {allowed:.2g} is allowed")
    return found
