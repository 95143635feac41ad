"""Counts how many experts the rows of a batch choose, in the layers that are mixtures of experts.

Every row reads its own experts' weights, so this says what further rows of a batch cost. Rows of a
text choose more alike than chance, which `pipespec plan --experts` takes into account.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pipespec.system.device_copy import to_host
from pipespec.timing.batch_times import size_bucket

# One of so many batches is counted, so that counting costs little.
SAMPLED = 16


class ExpertCounts:
    """Counts of a slice. A mixture is a module `experts` whose inputs are hidden states, the chosen
    experts `[rows, chosen]` and their weights, as in Transformers."""

    def __init__(self, base: nn.Module) -> None:
        self._mixtures = [
            module for name, module in base.named_modules() if name.endswith(".experts")
        ]
        self._batches = 0
        self._layers: list[Tensor] = []  # experts read by each mixture, of the batch being counted
        # By bucket of rows: batches, and the sums of their rows and, on the device, experts.
        self._found: dict[int, tuple[int, int, Tensor | float]] = {}

    @contextmanager
    def sampled(self, rows: int) -> Iterator[None]:
        """Count the batch of so many rows that the layers compute meanwhile, if it is its turn."""
        self._batches += 1
        if not self._mixtures or self._batches % SAMPLED:
            yield
            return
        hooks = [module.register_forward_pre_hook(self._count) for module in self._mixtures]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            layers, self._layers = self._layers, []
        if layers:
            batches, sum_rows, experts = self._found.get(size_bucket(rows), (0, 0, 0.0))
            experts = torch.stack(layers).double().mean() + experts
            self._found[size_bucket(rows)] = batches + 1, sum_rows + rows, experts

    def points(self) -> list[tuple[float, float]]:
        """Rows of a batch and experts that they chose in a layer, on average, by rising rows."""
        if not self._found:
            return []
        counts = [self._found[bucket] for bucket in sorted(self._found)]
        (sums,) = to_host(torch.stack([torch.as_tensor(experts) for *_, experts in counts]))
        return [
            (rows / batches, experts / batches)
            for (batches, rows, _), experts in zip(counts, sums.tolist(), strict=True)
        ]

    def _count(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if len(inputs) > 1 and isinstance(inputs[1], Tensor) and not inputs[1].is_floating_point():
            chosen = inputs[1].flatten().sort().values
            self._layers.append((chosen[1:] != chosen[:-1]).sum() + 1)
