"""Linear layers whose weights stay packed in 4 bits, by PyTorch's own kernels.

A weight is `(code - 8) * scale + zero` in bfloat16, with one scale and zero for a group of inputs.
On a CPU and on a GPU (tinygemm, compute capability 8.0 and later) a row of the product does not
depend on the other rows of its batch, which `self_test_error` checks. The results differ from those
of dequantised weights, so all stages of a cluster must use the same format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from pipespec.engine.formats.groups import GroupedWeights
from pipespec.errors import ModelError, PackedMatmulError

# The allowed error of a product, relative to its largest number.
TOLERANCE = 0.02
# A row must be the same in batches of these sizes.
TEST_BATCH_SIZES = (1, 2, 3, 8, 17, 64)
# Possible numbers of tiles of 16 inputs per thread of the GPU kernel.
INNER_TILES = (8, 4, 2)
PLAIN = "set model.keep_quantized=no"


class Int4Linear(nn.Module):
    """A linear layer whose weights `[out, in]` are 4-bit integers.

    It has no weights until `fill`; `bias` is loaded like that of any layer.
    """

    packed: Tensor | None
    scale_and_zero: Tensor | None

    def __init__(self, plain: nn.Linear):
        super().__init__()
        self.in_features = plain.in_features
        self.out_features = plain.out_features
        self.bias = plain.bias
        self.group = 0
        self.register_buffer("packed", None)
        self.register_buffer("scale_and_zero", None)

    def fill(self, weights: GroupedWeights, device: torch.device) -> None:
        """Set the weights. Raises ModelError if they do not fit."""
        shape = (self.out_features, self.in_features)
        if tuple(weights.codes.shape) != shape:
            raise ModelError(f"it is {list(weights.codes.shape)}, but must be {list(shape)}")
        if not weights.in_order:
            raise ModelError("its groups are of any inputs, though config.json says otherwise")
        self.group = self.in_features // weights.zeros.shape[1]
        scales, zeros = weights.scales.float(), weights.zeros.float()
        both = torch.stack((scales, (8 - zeros) * scales), -1).to(torch.bfloat16)
        self.scale_and_zero = both.transpose(0, 1).contiguous().to(device)  # [groups, out, 2]
        codes = weights.codes.to(device)
        if device.type == "cpu":
            self.packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
        else:
            pairs = codes[:, ::2] << 4 | codes[:, 1::2]
            tiles = next(n for n in INNER_TILES if self.in_features % (16 * n) == 0)
            self.packed = torch.ops.aten._convert_weight_to_int4pack(pairs.contiguous(), tiles)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in]` bfloat16 -> `[..., out]`."""
        rows = x.reshape(-1, self.in_features)
        multiply = torch.ops.aten._weight_int4pack_mm
        if rows.device.type == "cpu":
            multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
        y = multiply(rows, self.packed, self.group, self.scale_and_zero)
        y = y.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias

    def self_test_error(self, weights: GroupedWeights) -> str | None:
        """Why its products on this device are wrong, as a clause; None: they are right."""
        assert self.packed is not None
        generator = torch.Generator().manual_seed(0)
        device = self.packed.device
        rows = torch.randn(max(TEST_BATCH_SIZES), self.in_features, generator=generator)
        rows = rows.to(device, torch.bfloat16)
        with torch.inference_mode():
            whole = self(rows)
            if self.bias is not None:
                whole = whole - self.bias
            for size in TEST_BATCH_SIZES:
                part = self(rows[:size])
                part = part if self.bias is None else part - self.bias
                if not torch.equal(part, whole[:size]):
                    return f"a row differs in a batch of {size}"
            expected = rows.float() @ weights.dense().float().T.to(device)
        off = float((whole.float() - expected).abs().max() / expected.abs().max())
        return None if off <= TOLERANCE else f"its error is {off:.3f} of the largest number"


def replace(model: nn.Module, names: Iterable[str]) -> None:
    """Replace the linear layers with these names, if the model has them, by `Int4Linear`."""
    for name in names:
        parent, _, child = name.rpartition(".")
        try:
            plain = model.get_submodule(name)
        except AttributeError:  # belongs to another slice
            continue
        if isinstance(plain, nn.Linear):
            setattr(model.get_submodule(parent), child, Int4Linear(plain))


def fill(
    model: nn.Module, weights: Mapping[str, Callable[[], GroupedWeights]], device: torch.device
) -> None:
    """Read the weights of every `Int4Linear` of the model, and test the first of each shape.

    Raises ModelError, PackedMatmulError.
    """
    tested = set()
    for name, module in model.named_modules():
        if not isinstance(module, Int4Linear):
            continue
        read = weights[name]()
        try:
            module.fill(read, device)
        except ModelError as error:
            raise ModelError(f"{name} cannot stay packed in 4 bits: {error}; {PLAIN}") from error
        shape = (module.out_features, module.in_features, module.group)
        if shape not in tested:
            wrong = module.self_test_error(read)
            if wrong is not None:
                raise PackedMatmulError(
                    f"the kernel for packed 4-bit weights failed its self-test on {device}: "
                    f"in {name}, {wrong}"
                )
            tested.add(shape)
