"""Layers whose weights stay in blocks, beside the dequantised weights."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipespec.engine.formats.fp8 import Fp8Weights
from pipespec.engine.formats.gguf import KEPT_KINDS
from pipespec.engine.formats.gguf_blocks import KINDS, BlockWeights, block_sizes
from pipespec.engine.low_bit import kept_linear
from pipespec.engine.low_bit.kept_linear import DequantisedLinear, make_batch_invariant
from tests.unit.engine.formats.test_gguf_blocks import drawn

CPU = torch.device("cpu")
OUT = 7
SIZE = 1024
COUNTS = (1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 48, 64, 100)


def layer_of(kind: str, factor: float = 1.0, out: int = OUT) -> tuple[DequantisedLinear, Tensor]:
    """A layer with random weights, and these in float32."""
    rows = torch.from_numpy(drawn(kind, out, 512 // block_sizes(kind)[0]))
    weights = BlockWeights(rows, kind, factor)
    layer = DequantisedLinear("it", out, 512)
    layer.fill(weights, CPU)
    return layer, weights.dense()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_dequantised_exactly(kind, dtype):
    """A row that chooses each column has the weights."""
    layer, expected = layer_of(kind)
    found = layer(torch.eye(512, dtype=dtype)).T
    assert torch.equal(found, expected.to(dtype))
    size, num_bytes = block_sizes(kind)
    assert layer.num_bytes == OUT * 512 // size * num_bytes


def test_all_weights_are_multiplied_by_the_factor_of_the_matrix():
    layer, expected = layer_of("NVFP4", factor=0.25)
    assert torch.equal(layer(torch.eye(512)).T, expected)
    assert torch.equal(expected, layer_of("NVFP4")[1] / 4)


@pytest.mark.parametrize("some", [1, 1 << 21])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_its_batch(kind, dtype, some, monkeypatch):
    """Whether the weights are dequantised at once or some rows at a time."""
    monkeypatch.setitem(kept_linear.CHUNK, "cpu", some)
    layer, expected = layer_of(kind, out=40)
    rows = torch.randn(100, 512, generator=torch.Generator().manual_seed(1)).to(dtype)
    whole = layer(rows)
    off = (whole - rows.float() @ expected.T).abs().max() / whole.abs().max()
    assert off < {torch.float32: 1e-4, torch.bfloat16: 0.02}[dtype]
    for start, stop in ((0, 1), (1, 3), (0, 16), (8, 25), (3, 35), (0, 33), (50, 98)):
        assert torch.equal(layer(rows[start:stop]), whole[start:stop])


def test_every_kind_of_a_gguf_file_can_be_dequantised():
    assert {*KEPT_KINDS} == KINDS.keys() - {"NVFP4"}


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
