"""Whether a device computes what it should: attention, graphs, compiled slices, few bits."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch

from pipespec.config.entries import numbered
from pipespec.engine.attention import select
from pipespec.engine.attention.attention_plan import LayerOptions, LayerPool
from pipespec.engine.attention.self_test import AttentionLayer
from pipespec.engine.formats.fp8 import FP8, Fp8Weights
from pipespec.engine.formats.matrix_packing import GROUPED_KIND
from pipespec.engine.formats.packing import PACKED_INT4, GroupedWeights
from pipespec.engine.low_bit.kept_weights import LayerMaker, self_test_error
from pipespec.engine.precision import name_of
from pipespec.engine.slice.model_slice import ModelSlice
from pipespec.engine.slice.speedups import capture_graphs, capture_head, compile_slice
from pipespec.errors import PipespecError
from pipespec.system.device_copy import make_current
from pipespec.system.silence_warnings import silence_warnings

with silence_warnings():
    from transformers import AutoConfig

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
# Token slots of models that are only checked.
NUM_SLOTS = 512
# Two layers each: grouped queries; windows, soft caps and large heads; sinks and experts; layers
# with a running state.
SMALL: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 256, "sliding_window": 64},
    "gpt_oss": {"head_dim": 64, "num_key_value_heads": 2, "num_local_experts": 4},
    "qwen3_next": {
        "head_dim": 64,
        "num_key_value_heads": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
    },
}
_OF_ALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": 1024,
    "max_position_embeddings": NUM_SLOTS,
    "pad_token_id": 0,
}


def check_device(
    device: str, on_part: Callable[[str, dict[str, Any]], None] = lambda title, found: None
) -> dict[str, dict[str, Any]]:
    """The findings of each part of the check by its title, as JSON values, of a device as torch
    names it; clauses under `wrong` say what is. `on_part` is called after each part."""
    device = numbered(device)
    make_current(device)
    parts = {}
    for title, check in PARTS.items():
        try:
            with torch.inference_mode():
                found = check(torch.device(device))
        except (RuntimeError, PipespecError) as error:  # torch's own are the first
            found = {"wrong": [f"it fails: {_in_a_line(error)}"]}
        parts[title] = found
        on_part(title, found)
    return parts


def _in_a_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def attention(device: torch.device) -> dict[str, Any]:
    """For each backend and type the error of its self-test by shape; None: it passes."""
    found: dict[str, Any] = {backend: {} for backend in BACKENDS}
    wrong = []
    for backend, dtype in product(BACKENDS, DTYPES):
        name = name_of(dtype)
        missing = select.missing_requirement(backend, device.type, name)
        if missing is not None:
            found[backend][name] = {"not_available": missing}
            continue
        found[backend][name] = errors = {
            _shape_name(shape): select.backend_error(
                backend, device, [layer_of(shape, dtype, device)]
            )
            for shape in SHAPES
        }
        wrong += [f"{backend}, {name}, {shape}: {why}" for shape, why in errors.items() if why]
    return {"backends": found, "wrong": wrong}


def layer_of(
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


def graphs(device: torch.device) -> dict[str, Any]:
    """Of each small model the rows of its graphs, and what was refused."""
    if device.type != "cuda":
        return {"not_available": "CUDA graphs need a GPU"}
    models, wrong = {}, []
    for name in SMALL:
        for backend in (select.STATIC, select.TRITON):
            if select.missing_requirement(backend, device.type) is None:
                part = small_slice(name, device, torch.bfloat16, backend)
                capture_graphs(part, BUCKETS)
                capture_head(part, BUCKETS)
                models[f"{name}, {backend}"] = _described(part)
                wrong += [f"{name}, {backend}: {sentence}" for sentence in part.refused]
    return {"models": models, "wrong": wrong}


def compiled(device: torch.device) -> dict[str, Any]:
    """Whether a small slice can be compiled, and then captured."""
    part = small_slice("llama", device, torch.float32, select.STATIC)
    compile_slice(part)
    if device.type == "cuda":
        capture_graphs(part, BUCKETS)
    return _described(part) | {"wrong": part.refused}


def _described(part: ModelSlice) -> dict[str, Any]:
    how = part.describe()
    return {name: how[name] for name in ("attention", "graph_rows", "compiled", "refused")}


def packed_weights(device: torch.device) -> dict[str, Any]:
    """Why the products of each kind of weights are wrong; None: they are right."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (OUT, INPUTS), generator=generator, dtype=torch.uint8)
    scales = torch.rand(OUT, INPUTS // GROUP, generator=generator) * 0.01 + 0.001
    zeros = torch.full(scales.shape, 8, dtype=torch.int16)
    wide = torch.randn(OUT, INPUTS, generator=generator).to(torch.float8_e4m3fn)
    blocks = torch.rand(OUT // GROUP, INPUTS // GROUP, generator=generator) * 0.01 + 0.001
    kinds: dict[str, Any] = {
        PACKED_INT4: (GROUPED_KIND, GroupedWeights(codes, scales, zeros)),
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
            found[name] = f"it fails: {_in_a_line(error)}"
    return {"kinds": found, "wrong": [f"{name}: {why}" for name, why in found.items() if why]}


def small_slice(
    model_type: str, device: torch.device, dtype: torch.dtype, attention: str
) -> ModelSlice:
    """A whole small model of an architecture of SMALL."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**_OF_ALL, **SMALL[model_type]})
    layers = range(config.num_hidden_layers)
    return ModelSlice.random(
        config, layers, dtype=dtype, device=device, num_slots=NUM_SLOTS, attention=attention
    )


PARTS: dict[str, Callable[[torch.device], dict[str, Any]]] = {
    "Attention backends, beside attention by its definition": attention,
    "CUDA graphs of layers and output head": graphs,
    "Products of weights in few bits": packed_weights,
    "torch.compile": compiled,
}
