"""Triton's kernels: interpreted on every machine, compiled where there is a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipespec.engine.attention import self_test
from pipespec.engine.attention.attention_plan import LayerOptions, LayerPool
from pipespec.engine.attention.select import make_backend, missing_requirement
from pipespec.engine.precision import name_of

INTERPRETED = Path(__file__).with_name("interpreted_kernels.py")
WINDOWED = LayerOptions(0.1, window=60, softcap=20.0)


@pytest.mark.long  # `make check-gpu-code` runs it
@pytest.mark.timeout(900)
def test_kernels_in_the_interpreter(long):
    pytest.importorskip("triton")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(INTERPRETED)]
        + ["--long"] * long,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["triton", "static", "flashinfer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 1, 64), (32, 8, 128), (16, 16, 256)])
def test_backends_prove_themselves_on_a_gpu(name, dtype, heads, kv_heads, dim):
    device = torch.device("cuda")
    if (why := missing_requirement(name, "cuda", name_of(dtype))) is not None:
        pytest.skip(why)
    pool = LayerPool(*(torch.zeros(2, kv_heads, dim, dtype=dtype, device=device) for _ in "kv"))
    sinks = LayerOptions(0.1, sinks=torch.randn(heads, device=device))
    layers = [
        self_test.AttentionLayer(heads, each, pool) for each in (LayerOptions(0.1), WINDOWED, sinks)
    ]
    backend = make_backend(name, device, self_test.NUM_SLOTS)
    assert self_test.self_test_error(backend, self_test.NUM_SLOTS, layers) is None
