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
