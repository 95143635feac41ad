"""Selects the fastest attention backend of a slice on its GPU, of those that pass their self-test.

Which one is fastest depends on the GPU, on what is installed and on whether a CUDA graph can be
captured around it. So whole forward passes are timed, with as many rows as speculation feeds and a
context of usual length.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from pipespec.engine.attention import select
from pipespec.engine.attention.attention_plan import causal_plan
from pipespec.engine.model_slice import ModelSlice

# The timed batch: its rows, and the tokens of context before them.
ROWS, CONTEXT = 64, 2048
WARM_UP, TIMES = 2, 5


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
    """Milliseconds of a forward pass, the median of several."""
    rows = min(ROWS, model.num_slots)
    context = min(CONTEXT, model.num_slots - rows)
    slots = np.arange(context + rows)
    plan = causal_plan(slots[:context], slots[context:], imagined=True)
    positions = torch.from_numpy(plan.positions)
    inputs = torch.zeros(rows, model.hidden_size, dtype=model.dtype)
    if model.is_first:
        inputs = torch.zeros(rows, dtype=torch.int64)
    took = []
    for _ in range(WARM_UP + TIMES):
        _synchronize(model.device)
        began = time.perf_counter()
        model.forward(inputs, positions, plan)
        _synchronize(model.device)
        took.append((time.perf_counter() - began) * 1e3)
    return statistics.median(took[WARM_UP:])


def _synchronize(device: torch.device) -> None:
    """Wait until the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
