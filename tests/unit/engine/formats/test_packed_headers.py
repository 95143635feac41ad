"""Headers of checkpoints with packed matrices, once unpacked."""

from __future__ import annotations

from pathlib import Path

from pipespec.engine.formats.fp8 import Fp8Packing
from pipespec.engine.formats.safetensors_headers import Tensor


def test_a_weight_that_is_called_a_scale_is_no_left_over() -> None:
    tensors = {
        "model.layers.0.router.per_expert_scale": Tensor((4,), 8, "BF16"),
        "model.layers.0.self_attn.q_proj.weight": Tensor((4, 4), 32, "BF16"),
        "model.layers.0.self_attn.q_proj.weight_scale": Tensor((4,), 16, "F32"),
        "model.layers.0.self_attn.k_scale": Tensor((1,), 4, "F32"),
    }
    assert [*Fp8Packing(Path("model"), None).as_plain(tensors)] == [*tensors][:2]
