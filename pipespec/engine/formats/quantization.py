"""Weight-only quantisation.

A layer's matrices have few bits, and are multiplied in the model's type (nf4 on a CPU with AVX-512
BF16: always in bfloat16). The result of a row does not depend on its batch, so decoding stays
lossless: the text is that of the quantised model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipespec.engine.formats.fp4 import FP4_FORMATS, MXFP4, NVFP4, Fp4Packing, Mxfp4Packing
from pipespec.engine.formats.fp8 import FBGEMM, FP8, fp8_packing
from pipespec.engine.formats.gguf import GGUF
from pipespec.engine.formats.matrix_packing import MatrixPacking
from pipespec.engine.formats.packing import (
    AWQ,
    COMPRESSED,
    GPTQ,
    PACKED_INT4,
    PACKED_INT8,
    packing,
)
from pipespec.errors import ModelError
from pipespec.system.validation import Unreadable

if TYPE_CHECKING:  # a wrong setting is refused without them
    import torch


@dataclass(frozen=True, slots=True)
class Quantization:
    """A method of quantising weights while they load.

    `package` implements it; `bits` per weight, scales included. A matrix `[out, in]` must have `in`
    a multiple of `block` and `out` a multiple of `pack`.
    """

    package: str
    bits: float
    block: int = 1
    pack: int = 1


# `int8`: one scale per output channel. `nf4`: QLoRA's 4-bit NormalFloat (arXiv 2305.14314,
# section 3), a float32 scale for every 64 weights.
TORCHAO, BY_TORCHAO = "torchao", "int8"
QUANTIZATIONS = {
    BY_TORCHAO: Quantization(TORCHAO, 8.0),
    "nf4": Quantization("bitsandbytes", 4.5, block=64, pack=32),
}

# Methods of quantised checkpoints (`quant_method` in config.json); the package that reads them has
# the same name. Add a method together with its test in tests/integration/test_quantization.py.
METHODS = ("bitsandbytes", TORCHAO)

# The formats in which stored weights stay in memory (`model.keep_quantized`), in words.
KEPT_FORMATS = {
    PACKED_INT4: "4 bits",
    PACKED_INT8: "8 bits",
    FP8: "8 bits, FP8",
    MXFP4: "4 bits, MXFP4",
    NVFP4: "4 bits, NVFP4",
    GGUF: "as in its GGUF file",
}

# Those whose matrices ggml multiplies on a CPU.
GGML_FORMATS = (PACKED_INT4, PACKED_INT8, MXFP4, GGUF)

# Methods whose weights pipespec reads itself.
PACKED_METHODS = (AWQ, GPTQ, COMPRESSED, FP8, FBGEMM, MXFP4)


def require_package(package: str, why: str) -> None:
    """Raise ModelError unless the package is installed; `why`: what needs it, for the message."""
    if find_spec(package) is None:
        raise ModelError(
            f"{why} needs {package.replace('_', '-')}, which is not installed; pip install "
            "'pipespec[quantize]'"
        )


def stored_method(path: Path, config: Any) -> str | None:
    """The method by which the files are quantised, None for plain weights. Raises ModelError.

    `config` is the `quantization_config` of config.json.
    """
    if config is None:
        return None
    settings = config if isinstance(config, dict) else {}
    in_8_bit = settings.get("load_in_8bit")
    old = "bitsandbytes" if in_8_bit or settings.get("load_in_4bit") else None
    method = str(settings.get("quant_method", old))
    known = (*METHODS, *PACKED_METHODS)
    if method not in known:
        raise ModelError(
            f"{path} is quantised by {method!r}, which is not supported; supported are "
            f"{', '.join(known)}"
        )
    kind = "LLM.int8" if in_8_bit else _activations(settings.get("quant_type"))
    if kind is not None:
        raise ModelError(
            f"{path} is quantised by {kind}, which may round a row by what else is in its batch, "
            "so the text would depend on the draft tokens; take a 4-bit or a weight-only checkpoint"
        )
    return method


def stored_packing(path: Path, settings: Mapping[str, Any]) -> MatrixPacking:
    """How the files' matrices are packed or scaled, given the `quantization_config` of
    config.json, by one of PACKED_METHODS. Raises ModelError."""
    method = settings["quant_method"]
    if method == MXFP4:
        return Mxfp4Packing(path)
    if (of_fp4 := FP4_FORMATS.get(str(settings.get("format")))) is not None:
        return Fp4Packing(path, *of_fp4)
    try:
        return fp8_packing(path, settings) or packing(path, settings)
    except (Unreadable, ValueError) as error:
        raise ModelError(
            f"{path} is quantised by {method} in a way that is not supported: {error}; take "
            "another checkpoint"
        ) from error


def _activations(config: Any) -> str | None:
    """The first kind in a torchao config that quantises more than weights."""
    if isinstance(config, dict):
        kind = str(config.get("_type", ""))
        if kind.endswith("Config") and not kind.endswith(("WeightOnlyConfig", "FqnToConfig")):
            return kind
        config = list(config.values())
    found = map(_activations, config) if isinstance(config, list) else ()
    return next((kind for kind in found if kind is not None), None)


def loading_options(name: str | None, dtype: torch.dtype | None) -> dict[str, Any]:
    """The arguments of `from_pretrained` that quantise; packages are imported when needed."""
    if name not in QUANTIZATIONS:
        return {}
    if name == BY_TORCHAO:
        from torchao.quantization import Int8WeightOnlyConfig
        from transformers import TorchAoConfig

        return {"quantization_config": TorchAoConfig(Int8WeightOnlyConfig())}
    from transformers import BitsAndBytesConfig

    return {
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type=name, bnb_4bit_compute_dtype=dtype
        )
    }
