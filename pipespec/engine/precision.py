"""What numbers weights are kept in: a type, and fewer bits where they are quantised.

Quantisation here is weight-only: a layer's matrices are kept in few bits, and multiplied in the
model's type (nf4, on a CPU with AVX-512 BF16, in bfloat16 whatever that is). Whatever a batch
holds, a row then computes the same, so decoding stays lossless: the text is that of the
quantised model.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from pipespec.errors import ModelError

# Bytes of a number of each type that weights, KV and hidden states may have.
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Quantization:
    """`package` does it while the model loads.

    `bits` of a weight, with its share of scales. A matrix `[out, in]` must have `in` a multiple of
    `block` and `out` one of `pack`.
    """

    package: str
    bits: float
    block: int = 1
    pack: int = 1


# `int8`: one scale per output channel. `nf4`: QLoRA's 4-bit NormalFloat (arXiv 2305.14314,
# section 3), a float32 scale for every 64 weights.
QUANTIZATIONS = {
    "int8": Quantization("torchao", 8.0),
    "nf4": Quantization("bitsandbytes", 4.5, block=64, pack=32),
}

# How a checkpoint may have been quantised before (`quant_method` of its config.json); the package
# that reads it has the same name. A method enters with its test in
# tests/integration/test_quantization.py.
METHODS = ("bitsandbytes", "torchao")

# The method of published gpt-oss: experts in blocks of 32 4-bit floats with one scale. They are
# dequantised while they load, on every device, so that all ranks compute the same; such a
# checkpoint then counts as one of plain weights.
MXFP4 = "mxfp4"


def require_package(package: str, why: str) -> None:
    """Raise ModelError unless the package is installed; `why`: what wants it, for the message."""
    if find_spec(package) is None:
        raise ModelError(
            f"{why} needs {package}, which is not installed; pip install 'pipespec[quantize]'"
        )
