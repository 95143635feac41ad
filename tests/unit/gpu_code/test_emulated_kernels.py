"""The Triton kernels as they are compiled for a GPU, executed on the CPU.

`make check-gpu-code` runs these. The backend's own self-test compares them, on plans of trees.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.compiler.errors import CompilationError

from pipespec.engine.attention import self_test
from pipespec.engine.attention.attention_plan import LayerOptions, LayerPool, causal_plan
from pipespec.engine.attention.triton_backend import TritonBackend
from tests.helpers.planted_kernels import plant
from tools.gpu_code.emulated_gpu import emulated_gpu
from tools.gpu_code.ptx_memory import PtxFault

CACHE = Path(__file__).parents[3] / "build" / "gpu_code" / "triton"
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def layer(
    dtype: torch.dtype, heads: tuple[int, int], dims: tuple[int, int], **options: Any
) -> self_test.AttentionLayer:
    """A layer with so many heads and KV heads; `sinks=True` makes some."""
    if options.get("sinks"):
        options["sinks"] = torch.linspace(-2, 2, heads[0]).to(dtype)
    pool = LayerPool(*(torch.zeros(2, heads[1], dim, dtype=dtype) for dim in dims))
    return self_test.AttentionLayer(heads[0], LayerOptions(0.1, **options), pool)


LAYERS = {
    "bfloat16, window and cap": layer(BF16, (8, 2), (64, 64), window=60, softcap=20.0),
    "bfloat16, chunk": layer(BF16, (8, 2), (64, 64), chunk=48),
    "bfloat16, many heads": layer(BF16, (16, 1), (128, 128), sinks=True),
    "bfloat16, single heads": layer(BF16, (4, 4), (80, 80)),
    "bfloat16, wide": layer(BF16, (16, 2), (256, 256), window=100),
    "bfloat16, wide keys": layer(BF16, (4, 4), (192, 128)),
    "float16, three heads": layer(F16, (6, 2), (80, 48), softcap=20.0, sinks=True),
    "float16, many heads": layer(F16, (16, 1), (64, 64), window=60),
    "float32": layer(F32, (8, 2), (64, 64), window=60, softcap=20.0),
    "float32, wide": layer(F32, (8, 2), (256, 256), sinks=True),
    "float32, small": layer(F32, (4, 2), (24, 40), chunk=48),
}


def fault_in(name: str) -> str | None:
    """What is wrong with the kernels for a layer; None: nothing."""
    backend = TritonBackend("cpu", self_test.NUM_SLOTS)
    try:
        with emulated_gpu(CACHE):
            wrong = self_test.self_test_error(backend, self_test.NUM_SLOTS, [LAYERS[name]])
            return wrong or padding_fault(backend, LAYERS[name])
    except PtxFault as fault:
        return str(fault)
    except CompilationError as error:
        return f"it is not compiled: {error}"


def padding_fault(backend: TritonBackend, layer: self_test.AttentionLayer) -> str | None:
    """What is wrong with a batch that is padded, as in a CUDA graph, so that the last slot of the
    pools is read; None: nothing."""
    slots = torch.arange(9).numpy()
    plan = causal_plan(slots[:6], slots[6:])
    backend.prepare(plan, backend.reserve(4))
    kinds = {"dtype": layer.pool.keys.dtype}
    rng = torch.Generator().manual_seed(3)
    (_, kv_heads, dim), value_dim = layer.pool.keys.shape, layer.pool.values.shape[2]
    shapes = ((layer.heads, dim), (kv_heads, dim), (kv_heads, value_dim))
    query, key, value = (torch.randn(4, *shape, generator=rng).to(**kinds) for shape in shapes)
    num_slots = self_test.NUM_SLOTS + 1
    pools = (torch.randn(num_slots, *shape, generator=rng) for shape in shapes[1:])
    pool = LayerPool(*(each.to(**kinds) for each in pools))
    out = backend.attend(query, key, value, pool, layer.options)
    expected = self_test.reference_attention(query[:3], pool, plan, layer.options)
    off = float((out[:3].to(expected) - expected).abs().max())
    if not out.isfinite().all() or off > max(4 * torch.finfo(kinds["dtype"]).eps, 3e-6):
        return f"a padded batch is wrong by {off:.2g}"
    return None


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", LAYERS)
def test_compiled_kernels_pass_the_self_test(name: str) -> None:
    assert fault_in(name) is None


# How a fault is found: by results, by an access, or by the compiler.
WRONG, OUTSIDE, REFUSED = "its error is", "an access is outside of", "it is not compiled"
# One token of the kernels' source each: what it is, what it becomes, a layer that shows it, how.
PLANTED = {
    "the mask is read by another key": (
        "(word >> (j % BITS)[None, :])",
        "(word >> (i % BITS)[None, :])",
        "bfloat16, single heads",
        WRONG,
    ),
    "the mask is left out where it begins": (
        "if start + KEYS > prefix:",
        "if start > prefix:",
        "bfloat16, single heads",
        WRONG,
    ),
    "a part of the keys ends a key later": (
        "seen = there[:, None] & (i[None, :] < high)",
        "seen = there[:, None] & (i[None, :] <= high)",
        "float16, many heads",
        WRONG,
    ),
    "a window is one key shorter": (
        "seen & (at[None, :] >= since[:, None])",
        "seen & (at[None, :] > since[:, None])",
        "bfloat16, chunk",
        WRONG,
    ),
    "a tile takes other rows": (
        "row, member = top + pair // TAKEN",
        "row, member = top + pair % TAKEN",
        "bfloat16, many heads",
        OUTSIDE,
    ),
    "heads beyond the group are stored": (
        "there = (pair // TAKEN < count) & (member < group)",
        "there = (pair // TAKEN < count) & (member < TAKEN)",
        "float16, three heads",
        OUTSIDE,
    ),
    "values beyond a head are read": (
        "(i[:, None] < high) & (e[None, :] < value_dim)",
        "(i[:, None] < high) & (e[None, :] < VALUE)",
        "float16, three heads",
        OUTSIDE,
    ),
    "weights of another type": (
        "weight.to(v.dtype)",
        "weight.to(tl.float16)",
        "bfloat16, chunk",
        REFUSED,
    ),
    "sums of fewer bits": (
        "total = tl.zeros([PAIRS], tl.float32)",
        "total = tl.zeros([PAIRS], tl.float16)",
        "float32",
        REFUSED,
    ),
    "slots in 32 bits": (
        "slot = tl.load(slots + first + i, i < high, 0).to(tl.int64)",
        "slot = tl.load(slots + first + i, i < high, 0).to(tl.int32)",
        "bfloat16, chunk",
        OUTSIDE,
    ),
    "stored slots in 32 bits": (
        "slot = tl.load(write + row).to(tl.int64)",
        "slot = tl.load(write + row).to(tl.int32)",
        "bfloat16, chunk",
        OUTSIDE,
    ),
    "parts of another row are merged": (
        "there = s < tl.load(splits + row)",
        "there = s < tl.load(splits)",
        "bfloat16, many heads",
        WRONG,
    ),
    "the sink of another head": (
        "sink = tl.load(sinks + head)",
        "sink = tl.load(sinks + row)",
        "float32, wide",
        WRONG,
    ),
}


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", PLANTED)
def test_a_kernel_that_is_wrong_by_one_token_is_found(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after, name, found = PLANTED[fault]
    plant(before, after, tmp_path, monkeypatch)
    assert (fault_in(name) or "").startswith(found)
