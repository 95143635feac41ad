"""A slice whose small operations between the products a compiler has fused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from pipespec.engine.attention.plan import Attention, AttentionPlan

Compute = Callable[[Tensor, Tensor], Tensor]

# Rows of the batches by which it proves itself.
PROVED = (1, 17, 40)
# By how many roundings of the largest value it may be off: what is fused is rounded less often.
ROUNDINGS = 64


class Compiled(Protocol):
    """What is compiled of a slice, and what it proves itself with."""

    dtype: torch.dtype
    num_slots: int

    @property
    def backend(self) -> Attention: ...
    def compute(self, inputs: Tensor, positions: Tensor) -> Tensor: ...
    def example(self, rows: int) -> tuple[Tensor, Tensor, AttentionPlan]: ...


def compiled(model: Compiled, by: str | Callable[..., Any]) -> Compute:
    """The slice's `compute`, compiled by a backend of torch.compile for any number of rows.

    The KV slots are nobody's until this is over. Raises ValueError if it is off by more than
    rounding, and whatever the compiler raises.
    """
    found: Compute = torch.compile(model.compute, fullgraph=True, dynamic=True, backend=by)
    for rows in PROVED:
        inputs, positions, plan = model.example(min(rows, model.num_slots))
        model.backend.prepare(plan)
        expected = model.compute(inputs, positions)
        off = float((found(inputs, positions) - expected).abs().max())
        allowed = ROUNDINGS * torch.finfo(model.dtype).eps * float(expected.abs().max())
        if not off <= allowed:
            raise ValueError(f"it is off by {off:.2g} where {allowed:.2g} is allowed")
    return found
