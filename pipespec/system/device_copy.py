"""Copies between main memory and the device of a model. The host waits for a copy to a GPU unless
its source is pinned, and for every read of a result. So what a step sends to the GPU goes through
pinned memory, which torch keeps and reuses once it is copied, and what a step reads is read at
once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # clients have none
    import torch
    from torch import Tensor

# Arrays that are copied together start at multiples of it, in bytes.
_ALIGNMENT = 8


def make_current(device: str | torch.device) -> None:
    """Have this thread's CUDA calls go to a GPU: kernels are launched, graphs captured and events
    recorded on the current device, whatever that of their tensors is. This process then never
    attends by cuDNN. PyTorch prefers it on sm_90 and sm_100, where it builds a plan for every new
    number of keys, so for every token: tens of milliseconds or more."""
    import torch

    if torch.device(device).type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.enable_cudnn_sdp(False)


def on_device(device: str) -> AbstractContextManager[object]:
    """Makes a GPU the current one meanwhile, as `make_current` does."""
    import torch

    return torch.cuda.device(device) if device.startswith("cuda") else nullcontext()


def staged(values: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """The same values where a copy to `device` starts without a wait: pinned, if it is a GPU."""
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


class StagedArrays:
    """Arrays of one type on the host, and their copies at fixed addresses on a device, which one
    transfer renews. Both are by name; those that are named first come first in memory."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        import torch

        sizes = [prod(shape) for shape in shapes.values()]
        self._on_device = torch.zeros(sum(sizes), dtype=dtype, device=device)
        pinned = self._on_device.device.type == "cuda"
        self._staging = torch.zeros(sum(sizes), dtype=dtype, pin_memory=pinned)
        self._copied = torch.cuda.Event() if pinned else None
        self.host: dict[str, np.ndarray] = {}
        self.device: dict[str, Tensor] = {}
        parts = zip(self._on_device.split(sizes), self._staging.split(sizes), strict=True)
        for (name, shape), (there, here) in zip(shapes.items(), parts, strict=True):
            self.device[name] = there.view(shape)
            self.host[name] = here.view(shape).numpy()

    def wait(self) -> None:
        """Until the last transfer has read the host's arrays, which may be written then."""
        if self._copied is not None:
            self._copied.synchronize()

    def copy(self, unused: int = 0) -> None:
        """Transfer what the host holds but for the last `unused` numbers."""
        used = len(self._staging) - unused
        self._on_device[:used].copy_(self._staging[:used], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
