"""Weights of few bits on a pretended GPU: what is computed there, and what the host waits for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from pipespec.engine.attention.select import SDPA
from pipespec.engine.checkpoint.formats.fp8 import FP8
from pipespec.engine.checkpoint.formats.gguf import GGUF
from pipespec.engine.checkpoint.formats.packing import PACKED_INT4
from pipespec.engine.ggml import library as ggml
from pipespec.engine.model_slice import ModelSlice
from pipespec.engine.precision import KV_FP8, KV_INT8
from tests.helpers import models
from tests.helpers.pretended_gpu.allowed import refused
from tests.helpers.pretended_gpu.findings import Kind
from tests.helpers.pretended_gpu.gpu import PretendedGpu
from tools.rig import fp8_files, gguf_files, packing

ROWS = 5
WIDE = {"hidden_size": 256, "intermediate_size": 512}
# Errors of the largest logit that are allowed, in float32 and bfloat16: a GPU rounds in another
# order.
EXACT, ROUNDED = 1e-4, 0.1


def packed(kind: str, model_type: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        source = models.build(model_type, folder / "source", **WIDE)
        packing.pack(source, folder / "packed", folder / "plain", packing.KINDS[kind])
        return folder / "packed"

    return make


def in_fp8(kind: str, model_type: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        # Blocks of 128 by 128 do not divide these sizes.
        sizes = {"hidden_size": 160, "intermediate_size": 288}
        source = models.build(model_type, folder / "source", **sizes)
        kinds = fp8_files.KINDS
        fp8_files.write(source, folder / "stored", folder / "plain", kinds[kind])
        return folder / "stored"

    return make


def in_gguf(stored: Type) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        source = models.build("llama", folder / "source", **WIDE)
        file = folder / "model.gguf"
        gguf_files.write(
            source, file, "llama", lambda name: Type.F16 if "embed" in name else stored
        )
        return file

    return make


def plain(_: Path) -> Path:
    return models.shared("llama")


LONG = pytest.mark.long
NARROW = torch.bfloat16  # as clusters of GPUs compute, and torch's product for weights of 4 bits
INT4 = {"quantization": PACKED_INT4, "dtype": NARROW}
CASES: list[Any] = [
    pytest.param(packed("gptq", "llama"), INT4, id="gptq"),
    pytest.param(packed("awq", "mixtral"), INT4, id="awq mixture"),
    pytest.param(packed("compressed", "llama"), INT4, id="compressed", marks=LONG),
    pytest.param(in_fp8("deepseek", "llama"), {"quantization": FP8}, id="fp8"),
    pytest.param(in_fp8("autofp8", "mixtral"), {"quantization": FP8}, id="fp8 mixture"),
    pytest.param(in_gguf(Type.Q4_K), {"quantization": GGUF, "dtype": NARROW}, id="Q4_K as int4"),
    pytest.param(in_gguf(Type.Q6_K), {"quantization": GGUF, "dtype": NARROW}, id="Q6_K narrow"),
    *(
        pytest.param(in_gguf(stored), {"quantization": GGUF}, id=stored.name, marks=LONG)
        for stored in (
            *(Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K),
            *(Type.Q4_0, Type.Q5_1, Type.Q8_0),
        )
    ),
    pytest.param(plain, {"quantization": "int8"}, id="int8"),
    pytest.param(plain, {"kv_dtype": KV_INT8}, id="kv int8"),
    pytest.param(plain, {"kv_dtype": KV_FP8}, id="kv fp8"),
]


@pytest.mark.long
@pytest.mark.parametrize(("make", "how"), CASES)
def test_weights_of_few_bits_are_computed_on_a_gpu(
    tmp_path: Path, make: Callable[[Path], Path], how: dict[str, Any], monkeypatch
):
    monkeypatch.setattr(ggml, "load", lambda: None)  # it rounds rows to 8 bits on the CPU
    path = make(tmp_path)
    how = {"dtype": torch.float32, **how}
    tokens = torch.arange(20, 20 + ROWS)
    found = {}
    for device in ("cpu", "cuda"):
        with PretendedGpu() as gpu:
            layers = range(models.NUM_LAYERS)
            model = ModelSlice.load(
                path, layers, device=device, num_slots=16, attention=SDPA, **how
            )
            loading = gpu.take()
            assert [str(each) for each in loading if each.kind is Kind.MIXED] == []
            _, positions, plan = model.example_batch(ROWS)
            logits = model.logits(model.forward(tokens, positions, plan))
            assert refused(gpu.take()) == []
            found[device] = logits.float().cpu()
    off = (found["cuda"] - found["cpu"]).abs().max() / found["cpu"].abs().max()
    if how["dtype"] == torch.float32:
        assert off <= EXACT
    elif not model.experts._mixtures:  # in a mixture rounding chooses other experts
        assert off <= ROUNDED
