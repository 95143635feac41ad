from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pipespec.engine.attention import sdpa, select
from pipespec.engine.attention.attention_plan import (
    POOL_TYPES,
    AttentionBackend,
    LayerOptions,
    LayerPool,
    packed,
    unpacked,
)
from pipespec.engine.attention.device_plan import TorchBackend
from pipespec.engine.attention.sdpa import SdpaBackend
from pipespec.engine.precision import KV_SCALE_BYTES
from tests.helpers.plans import OPTIONS, explicit, given_rows, plans

NUM_SLOTS = 300
BACKENDS: dict[str, Callable[[], AttentionBackend]] = {
    "sdpa": SdpaBackend,
    "static": lambda: TorchBackend("cpu", NUM_SLOTS),
}


@pytest.mark.parametrize("name", BACKENDS)
@given(
    st.lists(plans(NUM_SLOTS), min_size=1, max_size=3),
    st.lists(OPTIONS, min_size=1, max_size=3),
    st.sampled_from([1, 2, 4]),
    st.integers(0, 99),
)
def test_rows_attend_as_defined_plan_after_plan(name, these, kinds, kv_heads, seed):
    backend = BACKENDS[name]()
    for plan in these:
        backend.prepare(plan)
        for options in kinds:  # layers of one slice
            query, key, value, pool = given_rows(len(plan.write), NUM_SLOTS, seed, kv_heads)
            out = backend.attend(query, key, value, pool, options)
            assert pool.keys[plan.write].equal(key)
            assert pool.values[plan.write].equal(value)
            torch.testing.assert_close(out, explicit(query, pool, plan, options), rtol=0, atol=2e-6)


@given(plans(NUM_SLOTS), st.sampled_from([torch.bfloat16, torch.float32]))
def test_masks_begin_where_cuda_reads_them(plan, dtype):
    """CUDA's kernels read a mask 16 bytes at a time: a misaligned one ended the process."""
    starts: list[int] = []

    def attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, **given_: Any):
        if attn_mask is not None:
            starts.append(attn_mask.storage_offset() * attn_mask.itemsize)
        return scaled_dot_product_attention(query, key, value, attn_mask, **given_)

    rows = len(plan.write)
    pool = LayerPool(*(torch.zeros(NUM_SLOTS + 1, 2, 8, dtype=dtype) for _ in "kv"))
    query, key, value = (torch.zeros(rows, heads, 8, dtype=dtype) for heads in (4, 2, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sdpa, "scaled_dot_product_attention", attend)
        backend = SdpaBackend()
        backend.prepare(plan)
        backend.attend(query, key, value, pool, LayerOptions(0.3))
    assert all(start % 16 == 0 for start in starts)


def test_a_backend_is_not_tried_in_a_type_that_it_lacks(monkeypatch):
    monkeypatch.setattr(select, "find_spec", lambda _name: object())
    wrong = select.missing_requirement("flashinfer", "cuda", "float32")
    assert wrong == "it computes in bfloat16 and float16, and the model is in float32"
    assert select.missing_requirement("flashinfer", "cuda", "bfloat16") is None
    assert select.missing_requirement("flashinfer", "cuda") is None
    assert select.missing_requirement("triton", "cuda", "float32") is None


# The greatest error relative to the largest number of a head: half a step of the codes, and the
# rounding of the scale.
ERROR = {"int8": 0.5 / 127 + 2**-8, "fp8": 2**-4 + 2**-8}


@pytest.mark.parametrize("form", POOL_TYPES)
@given(seed=st.integers(0, 2**31), size=st.floats(1e-6, 1e4))
def test_numbers_are_read_as_they_were_but_for_rounding(form, seed, size):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(3, 2, 16, generator=generator) * size
    stored = packed(rows, POOL_TYPES[form])
    assert stored.shape == (3, 2, 16 + KV_SCALE_BYTES)
    off = (unpacked(stored, torch.float32) - rows).abs().amax(-1)
    assert (off <= ERROR[form] * rows.abs().amax(-1)).all()


@pytest.mark.parametrize("form", POOL_TYPES)
def test_zeros_and_numbers_of_any_type_are_stored(form):
    assert not unpacked(packed(torch.zeros(1, 1, 8), POOL_TYPES[form]), torch.float32).any()
    rows = torch.randn(2, 1, 8, dtype=torch.bfloat16)
    read = unpacked(packed(rows, POOL_TYPES[form]), torch.bfloat16)
    assert read.dtype == torch.bfloat16 and read.isfinite().all()
