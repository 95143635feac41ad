"""The types of weights, KV and hidden states."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a wrong setting is refused without it
    import torch

# Bytes of a number of each type.
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def automatic(devices: Iterable[str]) -> str:
    """The default type: bfloat16 if no stage's device is a CPU."""
    return "bfloat16" if all(device.startswith("cuda") for device in devices) else "float32"


def name_of(dtype: torch.dtype) -> str:
    """Its name, as in `ITEM_BYTES`."""
    return str(dtype).removeprefix("torch.")


# How K and V are held (`model.kv_dtype`): KV_PLAIN in the type of the activations; the others in 8
# bits, with a scale of so many bytes for each head of a token.
KV_PLAIN, KV_INT8, KV_FP8 = "auto", "int8", "fp8"
KV_DTYPES = (KV_PLAIN, KV_INT8, KV_FP8)
KV_SCALE_BYTES = 2
