"""Our use of FlashInfer's wrappers: the real ones on a CPU, their kernels replaced by torch."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pipespec.engine.attention import self_test
from pipespec.engine.attention.attention_plan import LayerOptions, LayerPool, Reach
from tests.helpers.plans import explicit, given_rows, plans

flashinfer = pytest.importorskip("flashinfer", reason="make test-flashinfer installs it")
NUM_SLOTS = 300
HEADS, KV_HEADS, DIM, VALUE_DIM = 4, 2, 16, 8


class Kernels:
    """What fa2's module does, as its wrapper calls it: masks are bits, a request's beginning at
    the byte that is named for it, and log-sum-exps are binary."""

    def plan(self, *_: object) -> list[int]:
        return []

    def paged_run(self, *given_: Any) -> None:
        _, _, _, query, keys, values, rows, pages, slots, lengths, out, lse = given_[:12]
        custom, window, mask, starts = given_[12], given_[14], given_[16], given_[17]
        softcap, scale, sinks = given_[22], given_[23], given_[41]
        assert sinks is None, "fa2 ignores sinks"
        assert window == -1
        assert (custom == 2) == (mask is not None)
        assert lengths.eq(1).all()
        for i in range(len(rows) - 1):
            mine = slice(int(rows[i]), int(rows[i + 1]))
            picked = slots[int(pages[i]) : int(pages[i + 1])].long()
            seen = torch.ones(mine.stop - mine.start, len(picked), dtype=torch.bool)
            if mask is not None:
                bits = torch.arange(seen.numel())
                read = mask[int(starts[i]) + bits // 8].int() >> (bits % 8) & 1
                seen = read.bool().view(seen.shape)
            out[mine], lse[mine] = attended(
                query[mine], keys[picked, 0], values[picked, 0], seen, scale, softcap
            )


def attended(
    query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    group = query.shape[1] // keys.shape[1]
    keys, values = (each.double().repeat_interleave(group, 1) for each in (keys, values))
    scores = torch.einsum("rhd,nhd->rhn", query.double(), keys) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    weight = (
        scores.logsumexp(-1) if scores.shape[-1] else scores.new_full(scores.shape[:2], -torch.inf)
    )
    shares = torch.exp(scores - weight[..., None]).nan_to_num(0.0)
    return torch.einsum("rhn,nhd->rhd", shares, values), weight / torch.log(torch.tensor(2.0))


@pytest.fixture(scope="module")
def made() -> Any:
    from pipespec.engine.attention.flashinfer import FlashInferBackend

    empty = torch.empty

    def pageable(*sizes: Any, **options: Any) -> Tensor:
        """There is nothing to pin memory for."""
        return empty(*sizes, **{k: v for k, v in options.items() if k != "pin_memory"})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", pageable)
        patch.setattr(flashinfer.prefill, "get_batch_prefill_module", lambda *_: Kernels())
        yield lambda: FlashInferBackend("cpu")


@given(
    st.lists(plans(NUM_SLOTS), min_size=1, max_size=3),
    st.sampled_from([Reach(), Reach(1), Reach(6), Reach(200), Reach(chunk=5), Reach(chunk=64)]),
    st.sampled_from([None, 1.5]),
    st.sampled_from([None, torch.tensor([0.5, -1.0, 2.0, 0.0])]),
)
def test_wrappers_attend_as_defined_plan_after_plan(made, these, reach, softcap, sinks):
    backend = made()
    kinds = [LayerOptions(0.3), LayerOptions(0.3, reach.window, softcap, sinks, reach.chunk)]
    for plan in these:
        backend.prepare(plan)
        for options in kinds:  # layers take turns
            query, key, value, pool = given_rows(
                len(plan.write), NUM_SLOTS, heads=HEADS, dims=(DIM, VALUE_DIM)
            )
            out = backend.attend(query, key, value, pool, options)
            assert pool.keys[plan.write].equal(key)
            expected = explicit(query, pool, plan, options)
            torch.testing.assert_close(out, expected, rtol=0, atol=3e-6)


def test_the_wrappers_prove_themselves(made):
    pool = LayerPool(torch.zeros(2, KV_HEADS, DIM), torch.zeros(2, KV_HEADS, VALUE_DIM))
    kinds = (LayerOptions(0.3), LayerOptions(0.3, window=60), LayerOptions(0.3, softcap=1.5))
    layers = [self_test.AttentionLayer(HEADS, options, pool) for options in kinds]
    assert self_test.self_test_error(made(), self_test.NUM_SLOTS, layers) is None
