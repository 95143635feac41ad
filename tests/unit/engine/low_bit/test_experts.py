"""The experts of a mixture: the loop over them against Transformers' own, and by ggml."""

import copy
from collections import Counter

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize
from torch import nn

from pipespec.engine.formats.gguf_blocks import GgmlWeights
from pipespec.engine.ggml import library
from pipespec.engine.ggml.self_test import quantised
from pipespec.engine.low_bit.experts import GgmlExperts, loop_over_experts, stacked, use_loop
from pipespec.engine.slice.model_slice import ModelSlice
from tests.helpers import models

CPU = torch.device("cpu")
EXPERTS, HIDDEN, INNER, CHOSEN = 6, 256, 512, 2


# Bias and transposed stacks, a gate of its own, a plain one.
SOME = ("gpt_oss", "mixtral", "qwen3_moe")
ROWS = 7


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
        # MKL's products may differ by rounding from call to call.
        torch.testing.assert_close(module(*given), expected)
        torch.testing.assert_close(loop_over_experts(module, *given), expected)
        assert len(Counter(chosen.flatten().tolist())) == module.num_experts - 1


def test_a_mixture_of_another_form_keeps_its_own_loop():
    module = nn.Module()
    module.config = type("Config", (), {"_experts_implementation": "grouped_mm"})()  # type: ignore[assignment]
    use_loop(module)
    assert module.config._experts_implementation == "eager"


class Mixture:
    """What the loop needs of Transformers' modules."""

    has_bias = is_transposed = False
    num_experts = EXPERTS

    def __init__(self, kind: str):
        random = np.random.default_rng(0)
        ggml = library.load()
        assert ggml is not None
        self.dense: dict[str, list[torch.Tensor]] = {}
        for stack, out, inputs in (
            ("gate_up_proj", 2 * INNER, HIDDEN),
            ("down_proj", HIDDEN, INNER),
        ):
            weights = random.standard_normal((EXPERTS * out, inputs), np.float32) / 16
            blocks = quantised(ggml, kind, weights)
            plain = dequantize(blocks, GGMLQuantizationType[kind]).reshape(EXPERTS, out, inputs)
            self.dense[stack] = list(torch.from_numpy(plain))
            parts = 2 if out > HIDDEN else 1
            halves = blocks.reshape(EXPERTS, parts, out // parts, -1)
            layer = GgmlExperts([["it"] * parts] * EXPERTS, out // parts, inputs)
            read = [
                [GgmlWeights((half,), kind, (out // parts, inputs)) for half in expert]
                for expert in halves
            ]
            layer.fill(read, CPU)
            setattr(self, stack, layer)

    def _apply_gate(self, found: torch.Tensor) -> torch.Tensor:
        gate, up = found.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q8_0", "MXFP4", "F16"])
@torch.inference_mode()
def test_rows_of_a_mixture_are_right_and_do_not_depend_on_their_batch(kind):
    mixture = Mixture(kind)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(33, HIDDEN, generator=generator)
    weights, chosen = torch.rand(33, EXPERTS, generator=generator).topk(CHOSEN)
    chosen[5, 1] = EXPERTS  # of another member, or of none
    whole = loop_over_experts(mixture, rows, chosen, weights)
    for start, stop in ((0, 1), (1, 3), (5, 6), (4, 20)):
        some = slice(start, stop)
        part = loop_over_experts(mixture, rows[some], chosen[some], weights[some])
        assert torch.equal(part, whole[some])
    stacks = mixture.gate_up_proj, mixture.down_proj
    for row in (0, 5, 32):
        expected = torch.zeros(HIDDEN)
        for expert, weight in zip(chosen[row].tolist(), weights[row], strict=True):
            if expert < EXPERTS:
                found = mixture._apply_gate(mixture.dense["gate_up_proj"][expert] @ rows[row])
                expected += weight * (mixture.dense["down_proj"][expert] @ found)
                one = torch.nn.functional.linear(rows[row : row + 1], stacks[0][expert])
                alone = stacks[0].product(rows[row : row + 1, None], torch.tensor([[expert]]))
                assert torch.equal(one, alone[0])
        assert (whole[row] - expected).norm() <= 0.05 * expected.norm()


def test_experts_of_a_file_are_not_copied():
    whole = np.arange(24, dtype=np.uint8).reshape(3, 2, 4)
    found = stacked(list(whole))
    assert found.ctypes.data == whole.ctypes.data
    assert np.array_equal(found.reshape(whole.shape), whole)
    apart = stacked(list(whole[::-1]))
    assert np.array_equal(apart, whole[::-1])
