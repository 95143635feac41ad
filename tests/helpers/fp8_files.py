"""FP8 checkpoints as they are published, and what they are in plain float32 weights, number by
number: nothing here is shared with what reads them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from safetensors.torch import load_file
from torch import Tensor

from tools.rig.packing import MATRICES, compressed_tensors, write_checkpoint

LARGEST = 448.0
# The largest number of weights that are all zero, for their scale.
LEAST = 1e-4


@dataclass(frozen=True)
class Fp8Kind:
    """A published form, and its entry in config.json.

    Attributes:
        block: rows and columns that share a scale; None: all.
        scale: the end of the name of the scales.
        shape: "tensor", "channel" or "block".
        dtype: of the scales.
        more: names of further tensors of a matrix, which concern activations.
    """

    config: dict[str, Any]
    shape: str
    scale: str = "_scale"
    block: tuple[int, int] = (128, 128)
    dtype: torch.dtype = torch.float32
    more: tuple[str, ...] = ()

    def scales(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Scales as they are stored, and one for each weight."""
        out, inputs = weight.shape
        blocks = {"tensor": (out, inputs), "channel": (1, inputs), "block": self.block}
        height, width = blocks[self.shape]
        most = F.max_pool2d(weight.abs()[None], (height, width), ceil_mode=True)[0]
        stored = (most.clamp(min=LEAST) / LARGEST).to(self.dtype)
        each = stored.float().repeat_interleave(height, 0).repeat_interleave(width, 1)
        each = each[:out, :inputs]
        return stored.reshape(()) if self.shape == "tensor" else stored, each


def _compressed(strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, **more}
    activations = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    return compressed_tensors("float-quantized", weights, input_activations=activations)


KINDS = {
    "deepseek": Fp8Kind(
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
        "block",
        "_scale_inv",
    ),
    "autofp8": Fp8Kind(
        {"quant_method": "fp8", "activation_scheme": "static"}, "tensor", more=(".input_scale",)
    ),
    "fbgemm": Fp8Kind(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        "channel",
        more=(".input_scale_ub",),
    ),
    "compressed tensor": Fp8Kind(_compressed("tensor"), "tensor", dtype=torch.bfloat16),
    "compressed channel": Fp8Kind(_compressed("channel"), "channel", dtype=torch.bfloat16),
    "compressed block": Fp8Kind(
        _compressed("block", block_structure=[32, 64]), "block", block=(32, 64)
    ),
}


def write(source: Path, folder: Path, plain: Path, kind: Fp8Kind, *, skip: str = "\0") -> None:
    """Write a checkpoint of plain weights once more, in FP8, and as what that is in float32.

    Matrices whose name holds `skip` are left as they are. Stacks of experts are stored one by one,
    as they are published.
    """
    stored: dict[str, Tensor] = {}
    dense: dict[str, Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            if not name.endswith((*MATRICES, "_proj_with_mqa.weight")) or skip in name:
                whole = name.endswith("e_score_correction_bias")  # published in float32
                stored[name] = tensor.float() if whole else tensor.bfloat16()
                dense[name] = stored[name].float()
                continue
            scales, each = kind.scales(tensor.float())
            codes = (tensor.float() / each).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
            dense[name] = codes.float() * each
            stored |= {name: codes, name + kind.scale: scales}
            for more in kind.more:
                stored[name.removesuffix(".weight") + more] = torch.ones(())
    more = {"dtype": "bfloat16", "quantization_config": kind.config}
    write_checkpoint(source, folder, stored, **more)
    write_checkpoint(source, plain, dense, dtype="float32")
