"""Tensors that say they are on `cuda:0` and hold their numbers in main memory.

For torch they are on a device of a private-use backend, as it makes CUDA tensors only where it was
built with CUDA; so device guards, factories and copies take the paths of another device. What asks
in Python (`tensor.device`, `is_cuda`) sees a GPU, so pipespec and Transformers take those of CUDA.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import backend_registration

CUDA = torch.device("cuda", 0)
_NAME = "pretended"


class _Module(backend_registration._DummyBackendModule):
    """`torch.pretended`. Whoever asks torch for an accelerator has none, as before."""

    def is_available(self) -> bool:
        return False

    def device_count(self) -> int:
        return 0


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    """The same for torch's own code."""

    def is_available(self) -> bool:
        return False

    def has_primary_context(self, device: int) -> bool:
        return False

    def is_built(self) -> bool:
        return False


@cache
def private_device() -> torch.device:
    """The device of the private-use backend, which is registered once for a process: for good, so
    that there must be no GPU."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU, whose pinned memory torch would not find any more")
    backend_registration._setup_privateuseone_for_python_backend(_NAME, _Module(), _Hooks())
    # Transformers takes it for granted that an accelerator is available.
    torch.accelerator.current_accelerator = lambda check_available=False: None  # type: ignore[assignment]
    return torch.device(_NAME, 0)


def is_gpu(device: Any) -> bool:
    """Whether it is the pretended GPU, by either name."""
    return device is not None and torch.device(device).type in (_NAME, CUDA.type)


class GpuTensor(Tensor):
    """`host` has its numbers; views share them, as their hosts are views."""

    host: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, host: Tensor) -> GpuTensor:
        assert not isinstance(host, GpuTensor)
        with torch.inference_mode(host.is_inference()):  # a view is what its base is
            made: GpuTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                cls,
                host.size(),
                strides=host.stride(),
                storage_offset=host.storage_offset(),
                dtype=host.dtype,
                device=private_device(),
                requires_grad=False,
            )
        made.host = host
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError(f"{func} runs on the pretended GPU outside of `PretendedGpu`")

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{self.host!r} on the pretended GPU"

    def __deepcopy__(self, memo: dict[int, Any]) -> GpuTensor:
        return type(self)(self.host.clone())


def host_of(value: Any) -> Any:
    return value.host if isinstance(value, GpuTensor) else value
