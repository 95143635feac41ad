"""The loop over experts against Transformers' own, bit for bit."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from torch import nn

from pipespec.engine.low_bit.experts import loop_over_experts, use_loop
from pipespec.engine.slice.model_slice import ModelSlice
from tests.helpers import models

# Bias and transposed stacks, a gate of its own, a plain one.
SOME = ("gpt_oss", "mixtral", "qwen3_moe")
ROWS, CHOSEN = 7, 2


def mixtures(model_type: str) -> list[nn.Module]:
    """The mixtures of a model of 4 layers."""
    layers = range(models.NUM_LAYERS)
    base = ModelSlice.load(models.shared(model_type), layers, num_slots=4).base
    return [module for name, module in base.named_modules() if name.endswith(".experts")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", SOME)
@torch.inference_mode()
def test_rows_are_those_of_the_loop_of_transformers(model_type: str, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    found = mixtures(model_type)
    assert found
    for module in found:
        module.to(dtype)
        rows = torch.randn(ROWS, models._COMMON["hidden_size"], generator=generator).to(dtype)
        # No row chooses the third expert.
        scores = torch.rand(ROWS, module.num_experts, generator=generator)
        scores[:, 2] = -1
        weights, chosen = scores.topk(CHOSEN)
        given = rows, chosen, weights.to(dtype)
        own = copy.copy(module.config)
        own._experts_implementation, module.config = "eager", own
        expected = module(*given)
        use_loop(module)
        assert module.config._experts_implementation == "pipespec"
        assert own._experts_implementation == "eager"
        assert torch.equal(module(*given), expected)
        assert torch.equal(loop_over_experts(module, *given), expected)
        assert len(Counter(chosen.flatten().tolist())) == module.num_experts - 1


def test_a_mixture_of_another_form_keeps_its_own_loop():
    module = nn.Module()
    module.config = type("Config", (), {"_experts_implementation": "grouped_mm"})()  # type: ignore[assignment]
    use_loop(module)
    assert module.config._experts_implementation == "eager"
