"""Whether a device computes what it should: attention, graphs, compiled slices, few bits."""

from __future__ import annotations

from typing import Any

import torch

from pipespec.engine.attention import select
from pipespec.engine.attention.attention_plan import LayerOptions, LayerPool
from pipespec.engine.attention.self_test import AttentionLayer
from pipespec.engine.checkpoint.formats.fp8 import FP8, Fp8Weights
from pipespec.engine.checkpoint.formats.groups import GroupedWeights
from pipespec.engine.checkpoint.formats.packing import GROUPED_KIND, PACKED_INT4
from pipespec.engine.kept_weights import LayerMaker, self_test_error
from pipespec.engine.model_slice import ModelSlice
from pipespec.instruments.device_check.models import SMALL, small_slice

BACKENDS = (select.STATIC, select.TRITON, select.FLASHINFER)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Heads, KV heads and size of a head, and whether there are a window and a soft cap, or sinks.
SHAPES = (
    (32, 8, 128, False, False),
    (32, 8, 64, False, True),
    (8, 4, 256, True, False),
    (24, 8, 96, False, False),
)
BUCKETS = (16, 64)
# Rows and inputs of the products, and inputs that share a scale.
OUT, INPUTS, GROUP = 1024, 2048, 128


def check_attention(device: torch.device) -> dict[str, Any]:
    """For each backend and type the error of its self-test by shape; None: it passes."""
    found: dict[str, Any] = {}
    for backend in BACKENDS:
        missing = select.missing_requirement(backend, device.type)
        if missing is not None:
            found[backend] = {"not_available": missing}
            continue
        found[backend] = {
            select.dtype_name(dtype): _by_shape(backend, dtype, device) for dtype in DTYPES
        }
    return {"backends": found}


def _by_shape(backend: str, dtype: torch.dtype, device: torch.device) -> dict[str, str | None]:
    missing = select.missing_requirement(backend, device.type, select.dtype_name(dtype))
    if missing is not None:
        return {"not_available": missing}
    return {
        _shape_name(shape): select.backend_error(backend, device, [_layer(shape, dtype, device)])
        for shape in SHAPES
    }


def _layer(
    shape: tuple[int, int, int, bool, bool], dtype: torch.dtype, device: torch.device
) -> AttentionLayer:
    heads, kv_heads, size, bounded, sinks = shape
    like = torch.zeros(1, kv_heads, size, device=device, dtype=dtype)
    options = LayerOptions(
        size**-0.5,
        window=48 if bounded else None,
        softcap=30.0 if bounded else None,
        sinks=torch.linspace(-1, 1, heads, device=device, dtype=dtype) if sinks else None,
    )
    return AttentionLayer(heads, options, LayerPool(like, like))


def _shape_name(shape: tuple[int, int, int, bool, bool]) -> str:
    heads, kv_heads, size, bounded, sinks = shape
    extra = " window and soft cap" * bounded + " sinks" * sinks
    return f"{heads}/{kv_heads} heads of {size}{extra}"


def check_graphs(device: torch.device) -> dict[str, Any]:
    """Of each small model the rows of its graphs, and what was refused."""
    if device.type != "cuda":
        return {"not_available": "CUDA graphs need a GPU"}
    models = {}
    for name in SMALL:
        for backend in (select.STATIC, select.TRITON):
            if select.missing_requirement(backend, device.type) is None:
                part = small_slice(name, device, torch.bfloat16, backend)
                part.capture_graphs(BUCKETS)
                part.capture_head(BUCKETS)
                models[f"{name}, {backend}"] = _described(part)
    return {"models": models}


def check_compile(device: torch.device) -> dict[str, Any]:
    """Whether a small slice can be compiled, and then captured."""
    part = small_slice("llama", device, torch.float32, select.STATIC)
    part.compile()
    if device.type == "cuda":
        part.capture_graphs(BUCKETS)
    return _described(part)


def _described(part: ModelSlice) -> dict[str, Any]:
    how = part.describe()
    return {name: how[name] for name in ("attention", "graph_rows", "compiled", "refused")}


def check_packed_weights(device: torch.device) -> dict[str, Any]:
    """Why the products of each kind of weights are wrong; None: they are right."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (OUT, INPUTS), generator=generator, dtype=torch.uint8)
    scales = torch.rand(OUT, INPUTS // GROUP, generator=generator) * 0.01 + 0.001
    zeros = torch.full(scales.shape, 8, dtype=torch.int16)
    group_of = torch.arange(INPUTS) // GROUP
    wide = torch.randn(OUT, INPUTS, generator=generator).to(torch.float8_e4m3fn)
    blocks = torch.rand(OUT // GROUP, INPUTS // GROUP, generator=generator) * 0.01 + 0.001
    kinds: dict[str, Any] = {
        PACKED_INT4: (GROUPED_KIND, GroupedWeights(codes, scales, zeros, group_of)),
        FP8: (FP8, Fp8Weights(wide, blocks, GROUP, GROUP)),
    }
    found: dict[str, Any] = {}
    for name, (kind, weights) in kinds.items():
        try:
            make = LayerMaker({name: kind}, device, torch.bfloat16)
            layer: Any = make.layer(name, OUT, INPUTS)
            layer.fill(weights, device)
            found[name] = self_test_error(layer, weights, device, torch.bfloat16)
        except RuntimeError as error:  # also where the device lacks an operator
            found[name] = f"it fails: {' '.join(str(error).split())[:200]}"
    return {"kinds": found}
