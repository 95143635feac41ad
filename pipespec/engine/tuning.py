"""The fastest way in which a slice computes on its GPU, of those that prove themselves.

Which backend of attention is best depends on the GPU, on what is installed and on whether a graph
can be recorded around it. So whole forwards are timed, of as many rows as speculation feeds, over a
text of usual length.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from pipespec.engine.attention import choose
from pipespec.engine.attention.plan import causal_plan
from pipespec.engine.model import ModelSlice

# What is timed: rows of a batch, and tokens of text before them.
ROWS, CONTEXT = 64, 2048
WARM_UP, TIMES = 2, 5
# Less than this lies in caches, and says nothing of memory.
LEAST_BYTES = 256 << 20


def tune(
    model: ModelSlice,
    buckets: Sequence[int],
    record: Callable[[ModelSlice, Sequence[int]], None] = ModelSlice.record,
    time_ms: Callable[[ModelSlice], float] | None = None,
) -> None:
    """Let a slice compute in the fastest way; its KV slots are nobody's until this is over.

    `buckets`: rows of the graphs that are recorded (`ModelSlice.record`). What fails its proof is
    among `model.refused`; what is not installed was not asked for, and what a slower way could not
    do is of no use to know.
    """
    time_ms = time_ms or step_ms
    took: dict[str, float] = {}
    refused = model.refused
    for name in (choose.SDPA, *choose.NEXT):
        if choose.missing(name, model.device.type):
            continue
        wrong = None
        if name != choose.SDPA:
            wrong = choose.fault(name, model.device, model.attention_layers)
        if wrong is None:
            model.refused = []
            _compute_by(model, name, buckets, record)
            took[name] = time_ms(model)
        else:
            refused.append(f"attention={name} is not used: {wrong}.")
    best = min(took, key=took.__getitem__)
    if model.attention != best:
        model.refused = []
        _compute_by(model, best, buckets, record)
    model.refused = refused + model.refused
    model.step_ms, model.floor_ms = took[best], floor_ms(model)
    # What is recorded has shown that it waits for nothing.
    if model.device.type == "cuda" and not model.graph_rows and (why := waits(model)):
        model.refused.append(f"A forward waits for its device before it is over: {why}.")


def _compute_by(
    model: ModelSlice,
    name: str,
    buckets: Sequence[int],
    record: Callable[[ModelSlice, Sequence[int]], None],
) -> None:
    model.attend_by(name, choose.make(name, model.device, model.num_slots))
    if name != choose.SDPA:
        record(model, buckets)


@torch.inference_mode()
def step_ms(model: ModelSlice) -> float:
    """Milliseconds of a forward, the median of some."""
    rows = min(ROWS, model.num_slots)
    context = min(CONTEXT, model.num_slots - rows)
    slots = np.arange(context + rows)
    plan = causal_plan(slots[:context], slots[context:])
    positions = torch.from_numpy(plan.positions)
    inputs = torch.zeros(rows, model.hidden_size, dtype=model.dtype)
    if model.is_first:
        inputs = torch.zeros(rows, dtype=torch.int64)
    took = []
    for _ in range(WARM_UP + TIMES):
        _settle(model.device)
        began = time.perf_counter()
        model.forward(inputs, positions, plan)
        _settle(model.device)
        took.append((time.perf_counter() - began) * 1e3)
    return statistics.median(took[WARM_UP:])


def waits(model: ModelSlice) -> str | None:
    """What makes the host wait for the GPU within a forward, as torch says it; None: nothing."""
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
    """Milliseconds in which the device reads the slice's weights, by how fast it copies within its
    KV pools, which are nobody's until this is over; None: they are too small to say."""
    pools = [layer.pool for layer in model.attention_layers]
    pairs = [(pool.keys.view(-1), pool.values.view(-1)) for pool in pools]
    copied = sum(min(len(keys), len(values)) * keys.itemsize for keys, values in pairs)
    if copied < LEAST_BYTES:
        return None
    took = []
    for _ in range(WARM_UP + TIMES):
        _settle(model.device)
        began = time.perf_counter()
        for keys, values in pairs:
            size = min(len(keys), len(values))
            values[:size].copy_(keys[:size])
        _settle(model.device)
        took.append((time.perf_counter() - began) * 1e3)
    # What is copied is read and written.
    return statistics.median(took[WARM_UP:]) * model.num_weight_bytes / (2 * copied)


def _settle(device: torch.device) -> None:
    """Until the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
