"""Products in blocks of rows: a row is the same in every batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipespec.engine.formats.fp8 import Fp8Weights
from pipespec.engine.low_bit.kept_linear import DequantisedLinear
from pipespec.engine.low_bit.row_blocks import make_batch_invariant

SIZE = 1024
COUNTS = (1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 48, 64, 100)


class Router(nn.Module):
    """As Transformers' routers: several results of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, SIZE))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        scores = functional.linear(hidden.float().view(-1, SIZE), self.weight)
        return scores, scores.topk(2).indices


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = Router()
        self.head = nn.Linear(SIZE, 3 * SIZE, dtype=torch.bfloat16)


@pytest.fixture
def rows() -> Tensor:
    return torch.randn(100, SIZE, generator=torch.Generator().manual_seed(0)).bfloat16()


@torch.inference_mode()
def test_a_row_of_layers_and_routers_is_the_same_in_every_batch(rows):
    torch.manual_seed(0)
    model = Model()
    plain = model.head(rows), *model.gate(rows)
    make_batch_invariant(model)
    whole = model.head(rows), *model.gate(rows)
    for found, expected in zip(whole, plain, strict=True):
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
    for count in COUNTS:
        part = rows[None, :count]
        assert torch.equal(model.head(part)[0], whole[0][:count])
        for found, expected in zip(model.gate(part), whole[1:], strict=True):
            assert torch.equal(found, expected[:count])


@pytest.mark.parametrize("block", [(1, SIZE), (1000, SIZE), (128, 128), (48, 100)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_fp8_weights_of_any_blocks_are_multiplied_as_their_numbers(rows, block, dtype):
    out, (height, width) = 1000, block
    random = torch.Generator().manual_seed(1)
    codes = (100 * torch.randn(out, SIZE, generator=random)).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-out // height), -(-SIZE // width), generator=random) / 1000
    layer = DequantisedLinear("it", out, SIZE)
    layer.fill(Fp8Weights(codes, scales, height, width), torch.device("cpu"))
    each = scales.repeat_interleave(height, 0)[:out].repeat_interleave(width, 1)[:, :SIZE]
    expected = rows.float() @ (codes.float() * each).T
    whole = layer(rows.to(dtype))
    most = {torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]
    assert (whole.float() - expected).abs().max() <= most * expected.abs().max()
    for count in COUNTS:
        assert torch.equal(layer(rows[:count].to(dtype)), whole[:count])
