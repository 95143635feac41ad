"""How long a device takes for a call."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from pipespec.clock import monotonic_ns

WARM_UPS = 2
LEAST_RUNS, MOST_RUNS = 5, 50
LEAST_S = 0.3
NS_PER_MS = 1e6
NS_PER_S = 1e9


def median_ms(device: torch.device, function: Callable[..., object], *args: object) -> float:
    """The median time of several calls of `function(*args)`, until the device has finished."""
    for _ in range(WARM_UPS):
        function(*args)
    times: list[float] = []
    begun = monotonic_ns()
    while len(times) < LEAST_RUNS or (
        len(times) < MOST_RUNS and monotonic_ns() - begun < LEAST_S * NS_PER_S
    ):
        _wait(device)
        start = monotonic_ns()
        function(*args)
        _wait(device)
        times.append((monotonic_ns() - start) / NS_PER_MS)
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    """Until the device has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
