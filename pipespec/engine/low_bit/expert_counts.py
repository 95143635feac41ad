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
# Counts that may be on a device before they are read, which waits for it.
MAX_UNREAD = 64


class ExpertCounts:
    """Counts of a slice. A mixture is a module `experts` whose inputs are hidden states, the chosen
    experts `[rows, chosen]` and their weights, as in Transformers."""

    def __init__(self, base: nn.Module) -> None:
        self._mixtures = [
            module for name, module in base.named_modules() if name.endswith(".experts")
        ]
        self._batches = 0
        self._layers: list[Tensor] = []  # experts read by each mixture, of the batch being counted
        self._unread: list[tuple[int, Tensor]] = []  # rows, and the mean over the mixtures
        # By bucket of rows: batches, and the sums of their rows and experts.
        self._found: dict[int, tuple[int, int, float]] = {}

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
            self._unread.append((rows, torch.stack(layers).float().mean()))
        if len(self._unread) >= MAX_UNREAD:
            self.points()

    def points(self) -> list[tuple[float, float]]:
        """Rows of a batch and experts that they chose in a layer, on average, by rising rows."""
        unread, self._unread = self._unread, []
        means = to_host(torch.stack([mean for _, mean in unread]))[0].tolist() if unread else []
        for (rows, _), experts in zip(unread, means, strict=True):
            bucket = size_bucket(rows)
            batches, sum_rows, sum_experts = self._found.get(bucket, (0, 0, 0.0))
            self._found[bucket] = batches + 1, sum_rows + rows, sum_experts + experts
        return [
            (rows / batches, experts / batches)
            for _, (batches, rows, experts) in sorted(self._found.items())
        ]

    def _count(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if len(inputs) > 1 and isinstance(inputs[1], Tensor) and not inputs[1].is_floating_point():
            chosen = inputs[1].flatten().sort().values
            self._layers.append((chosen[1:] != chosen[:-1]).sum() + 1)
