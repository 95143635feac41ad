"""The Triton kernels in Triton's interpreter; `test_triton_backend.py` runs this in a process of
its own, since Triton decides when it is imported whether it interprets."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipespec.engine.attention.attention_plan import AttentionPlan, LayerOptions, Reach
from pipespec.engine.attention.triton_backend import HOPPER, OLDEST, TritonBackend
from tests.helpers.plans import explicit, given_rows, plans

NUM_SLOTS = 300
EXAMPLES = 3 if settings.default.max_examples <= 50 else 60


@settings(max_examples=EXAMPLES)
@given(
    st.lists(plans(NUM_SLOTS), min_size=1, max_size=2),
    st.sampled_from([(1, 1), (4, 2), (3, 1), (20, 1)]),
    st.sampled_from([(16, 16), (8, 6), (24, 40)]),
    st.sampled_from([Reach(), Reach(1), Reach(6), Reach(200), Reach(chunk=5), Reach(chunk=64)]),
    st.sampled_from([None, 1.5]),
    st.booleans(),
    st.sampled_from([torch.float32, torch.float16]),
    st.sampled_from([OLDEST, HOPPER]),
)
def test_kernels_attend_as_defined(these, heads, dims, reach, softcap, sinks, dtype, capability):
    backend = TritonBackend("cpu", NUM_SLOTS, capability)
    learned = torch.linspace(-1, 1, heads[0]) if sinks else None
    options = LayerOptions(0.3, reach.window, softcap, learned, reach.chunk)
    for plan in these:
        query, key, value, pool = given_rows(
            len(plan.write), NUM_SLOTS, 1, heads[1], heads[0], dims, dtype
        )
        backend.prepare(plan)
        out = backend.attend(query, key, value, pool, options)
        assert pool.keys[plan.write].equal(key)
        assert pool.values[plan.write].equal(value)
        expected = explicit(query, pool, plan, options).to(dtype)
        limit = 3e-6 if dtype == torch.float32 else 3e-3
        torch.testing.assert_close(out, expected, rtol=0, atol=limit)


@settings(max_examples=1 if EXAMPLES == 3 else 8)
@given(plans(NUM_SLOTS))
def test_rows_of_padding_change_nothing(plan: AttentionPlan):
    backend = TritonBackend("cpu", NUM_SLOTS)
    backend.prepare(plan)
    rows, padded = len(plan.write), backend.flat.capacity.rows
    query, key, value, pool = given_rows(padded, NUM_SLOTS, dims=(16, 16))
    out = backend.attend(query, key, value, pool, LayerOptions(0.3))
    assert out.isfinite().all()
    expected = explicit(query[:rows], pool, plan, LayerOptions(0.3))
    torch.testing.assert_close(out[:rows], expected, rtol=0, atol=3e-6)
