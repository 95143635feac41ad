"""K and V in 8 bits: what is stored, and what is read again."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipespec.engine.attention.attention_plan import POOL_TYPES, LayerPool, packed, unpacked
from pipespec.engine.precision import KV_SCALE_BYTES

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


@pytest.mark.parametrize("form", POOL_TYPES)
def test_a_pool_takes_half_the_memory_of_16_bits(form):
    like = torch.zeros(1, 4, 64, dtype=torch.bfloat16)
    plain, narrow = (LayerPool.allocate(1000, like, like, kind) for kind in ("auto", form))
    assert plain.num_bytes >= 1.9 * narrow.num_bytes
    rows = torch.randn(5, 4, 64)
    slots = torch.tensor([3, 900, 17, 0, 5])
    narrow.store(slots, rows, 2 * rows)
    keys, values = (unpacked(each, torch.float32) for each in (narrow.keys, narrow.values))
    torch.testing.assert_close(values[slots], 2 * keys[slots], rtol=0.01, atol=0.01)
    others = torch.ones(1001, dtype=torch.bool)
    others[slots] = False
    assert not keys[others].any()
