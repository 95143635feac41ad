"""Copies between main memory and the device of a model.

The host waits for a copy to a GPU unless its source is pinned, and for every read of a result. So
what a step sends to the GPU goes through pinned memory, which torch keeps and reuses once it is
copied, and what a step reads is read at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # clients have none
    import torch
    from torch import Tensor

# Arrays that are copied together start at multiples of it, in bytes.
_ALIGNMENT = 8


def staged(values: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """The same values where a copy to `device` starts that the host does not wait for: pinned, if
    it is a GPU and they are in main memory."""
    import torch

    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    return tensor.pin_memory() if device.type == "cuda" and not tensor.is_cuda else tensor


def to_device(values: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """The same values on `device`; the host does not wait for the copy."""
    return staged(values, device).to(device, non_blocking=device.type == "cuda")


def to_device_together(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """The same arrays on `device`; for a GPU they are one copy."""
    if device.type != "cuda" or not arrays:
        return [to_device(each, device) for each in arrays]
    import torch

    starts = [0]
    for each in arrays:
        starts.append(starts[-1] + -(-each.nbytes // _ALIGNMENT) * _ALIGNMENT)
    whole = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
    found = []
    there = torch.empty_like(whole, device=device)
    for each, start in zip(arrays, starts, strict=False):
        tensor = torch.from_numpy(each)
        part = slice(start, start + each.nbytes)
        whole[part].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        found.append(there[part].view(tensor.dtype).view(tensor.shape))
    there.copy_(whole, non_blocking=True)
    return found


def to_host(*tensors: Tensor) -> list[np.ndarray]:
    """The values of tensors on one device; the host waits for it once, until they are computed."""
    device = tensors[0].device
    if device.type != "cuda":
        return [each.numpy() for each in tensors]
    import torch

    copies = [torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in tensors]
    for copy, each in zip(copies, tensors, strict=True):
        copy.copy_(each, non_blocking=True)
    torch.cuda.current_stream(device).synchronize()
    return [copy.numpy() for copy in copies]
