"""Makes a slice compute faster: by the fastest attention backend, CUDA graphs, a compiler, ggml, or
other products of few rows.

Each way is tested on this machine. What it does not allow, or gets wrong, is computed as before,
and `ModelSlice.refused` says why. No KV slot may be in use meanwhile.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pipespec.engine.attention import select
from pipespec.engine.ggml import library
from pipespec.engine.graphs.ggml_graph import LEAST_SHARED, use_ggml
from pipespec.engine.graphs.graphs import CaptureFunction, Compute, capture_cuda_graph
from pipespec.engine.low_bit import cpu_products
from pipespec.engine.precision import name_of

if TYPE_CHECKING:
    from pipespec.engine.slice.model_slice import ModelSlice

# The batch by which backends are timed: its rows, and the tokens of context before them.
ROWS, CONTEXT = 64, 2048
WARM_UPS = 2
LEAST_RUNS, MOST_RUNS, LEAST_S = 5, 50, 0.3
# Rows of the batches that test a compiled slice, and the allowed error, in roundings of the largest
# value: fused operations round less often.
COMPILED_ROWS, ROUNDINGS = (1, 17, 40), 64


def autotune(
    model: ModelSlice,
    buckets: Sequence[int],
    capture: CaptureFunction = capture_cuda_graph,
    time_ms: Callable[[ModelSlice], float] | None = None,
) -> None:
    """Switch a slice to its fastest backend, of those that pass their self-test.

    Whole forward passes are timed, in graphs of `buckets` rows (`capture_graphs`) where these can
    be captured. Backends that fail their self-test are listed in `model.refused`; those that are
    not available, and failures of slower ones to be captured, are not."""
    time_ms = time_ms or step_ms
    took: dict[str, float] = {}
    refused = model.refused

    def use(name: str) -> None:
        model.refused = []
        model.set_backend(name, select.make_backend(name, model.device, model.num_slots))
        if name != select.SDPA:
            capture_graphs(model, buckets, capture)

    for name in (select.SDPA, *select.FALLBACK):
        if select.missing_requirement(name, model.device.type, name_of(model.dtype)):
            continue
        wrong = None
        if name != select.SDPA:
            wrong = select.backend_error(name, model.device, model.attention_layers)
        if wrong is None:
            use(name)
            took[name] = time_ms(model)
        else:
            refused.append(f"attention={name} is not used: {wrong}.")
    best = min(took, key=took.__getitem__)
    if model.attention != best:
        use(best)
    model.refused = refused + model.refused


@torch.inference_mode()
def step_ms(model: ModelSlice) -> float:
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
        synchronize(device)
        start = time.perf_counter()
        function(*args)
        synchronize(device)
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.inference_mode()
def capture_graphs(
    model: ModelSlice, buckets: Sequence[int], capture: CaptureFunction = capture_cuda_graph
) -> None:
    """Capture a graph for each number of rows in `buckets`, and replay them from now on. All
    members of a group capture at the same time."""
    parallel = model.parallel
    if why := parallel.no_graphs():
        model.graphs.drop()
        model.refused.append(f"The slice is computed without graphs, {why}.")
        return
    model.refused += model.graphs.capture_layers(
        model.compiled or model.compute,
        [model.example_batch(rows)[0] for rows in sorted(buckets)],
        model.backend,
        model.attention,
        model.recurrent,
        parallel.least(model.num_slots),
        capture,
        lambda well: parallel.least(well) == 1,
    )


@torch.inference_mode()
def capture_head(
    model: ModelSlice, buckets: Sequence[int], capture: CaptureFunction = capture_cuda_graph
) -> None:
    """The same for the output head of the last slice, or this member's part of it, whatever its
    attention; no other member takes part."""
    if model.is_last:
        examples = [model.random_hidden(rows) for rows in sorted(buckets)]
        model.refused += model.graphs.capture_heads(model.head, examples, capture)


@torch.inference_mode()
def compile_slice(model: ModelSlice, by: str | Callable[..., Any] = "inductor") -> None:
    """Compile a slice by this backend of torch.compile, which fuses small operations between the
    matrix products, for any number of rows."""
    why = model.parallel.no_compiler
    if model.of_ggml is not None:
        why = "as ggml computes all of it"
    elif model.recurrent:
        why = "as some layers keep a running state"
    if why:
        model.refused.append(f"The slice is not compiled, {why}.")
        return
    found: Compute = torch.compile(model.compute, fullgraph=True, dynamic=True, backend=by)
    try:
        for rows in COMPILED_ROWS:
            inputs, positions, plan = model.example_batch(min(rows, model.num_slots))
            model.backend.prepare(plan)
            expected = model.compute(inputs, positions)
            off = float((found(inputs, positions) - expected).abs().max())
            allowed = ROUNDINGS * torch.finfo(model.dtype).eps * float(expected.abs().max())
            if not off <= allowed:
                why = f"its error is {off:.2g} where {allowed:.2g} is allowed"
    except Exception as error:  # noqa: BLE001 - models, compilers and drivers raise anything
        why = " ".join(str(error).split())[:200]
    if why:
        model.refused.append(f"The slice is not compiled: {why}.")
    else:
        model.compiled = found


def use_fastest_products(model: ModelSlice, room: float = math.inf) -> None:
    """On a CPU, compute linear layers in the way that is fastest here for few rows
    (`pipespec.engine.low_bit.cpu_products`), where rows may depend on their batch by rounding.

    `room`: bytes that other copies of the weights may take, beside those of all KV pools.
    """
    if model.device.type != "cpu" or model.batch_invariant:
        return
    whole = nn.ModuleList((model.base, model.model))
    model.products = cpu_products.use_fastest(whole, room - model.num_kv_bytes)
    # A pass of few weights takes the time of Python, of which a graph of all layers has none.
    small = cpu_products.num_plain_bytes(model.base) < LEAST_SHARED and library.load() is not None
    if model.any_attention and (small or model.products == cpu_products.GGML):
        use_ggml(model)
