"""Headers of checkpoints with packed matrices, once unpacked, and their zero points."""

from pathlib import Path

import pytest
import torch

from pipespec.engine.formats.fp8 import Fp8Packing
from pipespec.engine.formats.packing import packing
from pipespec.engine.formats.safetensors_headers import Tensor


def test_a_weight_that_is_called_a_scale_is_no_left_over() -> None:
    tensors = {
        "model.layers.0.router.per_expert_scale": Tensor((4,), 8, "BF16"),
        "model.layers.0.self_attn.q_proj.weight": Tensor((4, 4), 32, "BF16"),
        "model.layers.0.self_attn.q_proj.weight_scale": Tensor((4,), 16, "F32"),
        "model.layers.0.self_attn.k_scale": Tensor((1,), 4, "F32"),
    }
    assert [*Fp8Packing(Path("model"), None).as_plain(tensors)] == [*tensors][:2]


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(
    ("form", "sym", "stored", "zero"),
    [
        ("gptq", True, -1, 0),
        ("gptq", True, 0, 0),
        ("gptq_v2", True, 0, 0),
        ("gptq_v2", True, -1, 0),
        ("gptq", None, 0, 0),
        ("gptq", 1, 0, 0),
        ("gptq", False, 0, 1),
        ("gptq_v2", False, -1, -1),
    ],
)
def test_zero_points_of_symmetric_gptq_are_the_middle_under_either_label(
    bits: int, form: str, sym: bool | None, stored: int, zero: int
) -> None:
    """Given and expected relative to the middle of the codes."""
    middle = 1 << (bits - 1)
    word = sum((middle + stored) << at for at in range(0, 32, bits))
    word -= (word >> 31) << 32
    parts = {
        "m.scales": torch.ones(1, 32),
        "m.qzeros": torch.full((1, bits), word, dtype=torch.int32),
        "m.qweight": torch.zeros(bits, 32, dtype=torch.int32),
    }

    class Files:
        def read(self, name: str, *index: slice) -> torch.Tensor | None:
            return parts[name][index] if name in parts else None

    config = {"quant_method": "gptq", "bits": bits, "group_size": 32}
    config |= {} if sym is None else {"sym": sym}
    found = packing(Path("m"), config | {"checkpoint_format": form})
    assert found.read("m", Files()).zeros.unique().tolist() == [middle + zero]
