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
# Smaller copies fit into caches, so their time is not that of the memory.
LEAST_BYTES = 256 << 20


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
    model.step_ms, model.floor_ms = took[best], floor_ms(model)
    # Capturing fails if the host waits for the device, so captured graphs need no check.
    if model.device.type == "cuda" and not model.graph_rows and (why := host_sync_error(model)):
        model.refused.append(f"The host waits for the device during a forward pass: {why}.")


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


def host_sync_error(model: ModelSlice) -> str | None:
    """What makes the host wait for the GPU during a forward pass, in torch's words; None:
    nothing."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        step_ms(model)
    except RuntimeError as error:
        return " ".join(str(error).split())[:200]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return None


@torch.inference_mode()
def floor_ms(model: ModelSlice) -> float | None:
    """Milliseconds that the device needs to read the slice's weights, estimated from how fast it
    copies within the KV pools, which must not be in use; None: the pools are too small."""
    pools = [layer.pool for layer in model.attention_layers]
    pairs = [(pool.keys.view(-1), pool.values.view(-1)) for pool in pools]
    copied = sum(min(len(keys), len(values)) * keys.itemsize for keys, values in pairs)
    if copied < LEAST_BYTES:
        return None
    took = []
    for _ in range(WARM_UP + TIMES):
        _synchronize(model.device)
        began = time.perf_counter()
        for keys, values in pairs:
            size = min(len(keys), len(values))
            values[:size].copy_(keys[:size])
        _synchronize(model.device)
        took.append((time.perf_counter() - began) * 1e3)
    # A copy reads and writes.
    return statistics.median(took[WARM_UP:]) * model.num_weight_bytes / (2 * copied)


def _synchronize(device: torch.device) -> None:
    """Wait until the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
