"""NVFP4 and MXFP4 checkpoints of compressed-tensors, as its own code packs them, and in plain
float32 weights, as it unpacks them: nothing here is shared with what reads them."""

from pathlib import Path

import torch
from compressed_tensors.compressors.mx_utils import compress_mx_scale, decompress_mx_scale
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
from safetensors.torch import load_file

from tools.rig.packing import MATRICES, compressed_tensors, write_checkpoint

LARGEST = 6.0
NUMBERS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
# Of each form: its format in config.json, and numbers with one scale.
FORMS = {"nvfp4": ("nvfp4-pack-quantized", 16), "mxfp4": ("mxfp4-pack-quantized", 32)}


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """To the nearest 4-bit float."""
    nearest = (weight.abs().unsqueeze(-1) - NUMBERS).abs().argmin(-1)
    return NUMBERS[nearest] * weight.sign()


def pack(source: Path, folder: Path, plain: Path, form: str) -> None:
    """A checkpoint of plain weights in 4 bits, and as what that is in float32."""
    kind, group = FORMS[form]
    stored: dict[str, torch.Tensor] = {}
    dense: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith(MATRICES):
            stored[name], dense[name] = tensor.bfloat16(), tensor.bfloat16().float()
            continue
        matrix, (out, inputs) = name.removesuffix(".weight"), tensor.shape
        by_group = tensor.float().view(out, -1, group)
        most = by_group.abs().amax(-1)
        if form == "nvfp4":
            whole = LARGEST * 448 / most.max()
            scales = (most / LARGEST * whole).to(torch.float8_e4m3fn)
            stored[f"{matrix}.weight_global_scale"] = whole.reshape(1)
            each = scales.float() / whole
        else:
            scales = compress_mx_scale(most / LARGEST, torch.uint8)
            each = decompress_mx_scale(scales).float()
        codes = rounded(by_group / each.clamp(min=1e-12).unsqueeze(-1)).view(out, inputs)
        packed = pack_fp4_to_uint8(codes)
        stored |= {f"{matrix}.weight_packed": packed, f"{matrix}.weight_scale": scales}
        numbers = unpack_fp4_from_uint8(packed, out, inputs).float().view(out, -1, group)
        dense[name] = (numbers * each.unsqueeze(-1)).view(out, inputs)
    weights_of = {"num_bits": 4, "type": "float", "group_size": group, "symmetric": True}
    write_checkpoint(
        source, folder, stored, quantization_config=compressed_tensors(kind, weights_of)
    )
    write_checkpoint(source, plain, dense)
