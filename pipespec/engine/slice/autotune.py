"""Selects the fastest attention backend of a slice on its GPU, of those that pass their self-test.

Which one is fastest depends on the GPU, on what is installed and on whether a CUDA graph can be
captured around it. So whole forward passes are timed, with as many rows as speculation feeds and a
context of usual length.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from pipespec.engine.attention import select
from pipespec.engine.slice.model_slice import ModelSlice

# The timed batch: its rows, and the tokens of context before them.
ROWS, CONTEXT = 64, 2048
WARM_UPS = 2
LEAST_RUNS, MOST_RUNS, LEAST_S = 5, 50, 0.3


def autotune(
    model: ModelSlice,
    buckets: Sequence[int],
    record: Callable[[ModelSlice, Sequence[int]], None] = ModelSlice.capture_graphs,
    time_ms: Callable[[ModelSlice], float] | None = None,
) -> None:
    """Switch a slice to its fastest backend. No KV slot may be in use meanwhile.

    `buckets`: rows of the graphs to capture (`ModelSlice.capture_graphs`). Backends that fail their
    self-test are listed in `model.refused`; backends that are not available, and failures of slower
    backends to be captured, are not."""
    time_ms = time_ms or step_ms
    took: dict[str, float] = {}
    refused = model.refused
    for name in (select.SDPA, *select.FALLBACK):
        if select.missing_requirement(name, model.device.type, select.dtype_name(model.dtype)):
            continue
        wrong = None
        if name != select.SDPA:
            wrong = select.backend_error(name, model.device, model.attention_layers)
        if wrong is None:
            model.refused = []
            _use_backend(model, name, buckets, record)
            took[name] = time_ms(model)
        else:
            refused.append(f"attention={name} is not used: {wrong}.")
    best = min(took, key=took.__getitem__)
    if model.attention != best:
        model.refused = []
        _use_backend(model, best, buckets, record)
    model.refused = refused + model.refused


def _use_backend(
    model: ModelSlice,
    name: str,
    buckets: Sequence[int],
    record: Callable[[ModelSlice, Sequence[int]], None],
) -> None:
    model.set_backend(name, select.make_backend(name, model.device, model.num_slots))
    if name != select.SDPA:
        record(model, buckets)


@torch.inference_mode()
def step_ms(model: ModelSlice) -> float:
    """Milliseconds of a forward pass."""
    rows = min(ROWS, model.num_slots)
    context = min(CONTEXT, model.num_slots - rows)
    return median_ms(model.device, model.forward, *model.example_batch(rows, context))


def median_ms(device: torch.device, function: Callable[..., object], *args: object) -> float:
    """The median time of several calls of `function(*args)`, until the device has finished."""
    for _ in range(WARM_UPS):
        function(*args)
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < LEAST_RUNS or (
        len(times) < MOST_RUNS and time.perf_counter() - begun < LEAST_S
    ):
        _synchronize(device)
        start = time.perf_counter()
        function(*args)
        _synchronize(device)
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def _synchronize(device: torch.device) -> None:
    """Wait until the device has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
