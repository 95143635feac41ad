"""Stand-ins for the kernels of `TritonBackend`: they check what a launch is given, and compute the
same in torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipespec.engine.attention import kernels
from pipespec.engine.attention.attention_plan import LayerOptions, LayerPool
from pipespec.engine.attention.torch_backend import TorchBackend
from tests.helpers.pretended_gpu.findings import Kind
from tests.helpers.pretended_gpu.tensors import GpuTensor, host_of

if TYPE_CHECKING:
    from tests.helpers.pretended_gpu.gpu import PretendedGpu

NAMES = ("store", "attend", "merge")
# What Triton itself takes of a launch.
OPTIONS = {"num_warps", "num_stages", "enable_fp_fusion"}


class Launches:
    """The kernels of one slice's layers, which are launched in this order for each layer."""

    def __init__(self, gpu: PretendedGpu) -> None:
        self._gpu = gpu
        self._given: dict[str, dict[str, Any]] = {}  # of the layer, by kernel

    def kernel(self, name: str) -> _Kernel:
        return _Kernel(self, name)

    def launch(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check the arguments; the last kernel of a layer computes what all three do."""
        names = getattr(kernels, name).arg_names
        given = dict(zip(names, args, strict=False)) | kwargs
        for option in OPTIONS & given.keys():
            del given[option]
        assert given.keys() == set(names), f"{name} is launched with other arguments"
        for key, value in given.items():
            if isinstance(value, Tensor):
                if not isinstance(value, GpuTensor):
                    self._gpu.report(Kind.MIXED, f"{name}({key}=...)")
                assert value.is_contiguous(), f"{name}({key}=...) reads memory as contiguous"
        self._given[name] = {key: host_of(value) for key, value in given.items()}
        if name == NAMES[-1]:
            self._attend()

    def _attend(self) -> None:
        stored, given, merged = (SimpleNamespace(**self._given.pop(each)) for each in NAMES)
        rows = given.rows
        backend = TorchBackend("cpu", 1)
        backend.flat = SimpleNamespace(  # type: ignore[assignment]
            write=stored.write,
            positions=given.positions,
            first=given.firsts,
            prefix=given.prefixes,
            tree=given.trees,
            tree_first=given.tree_firsts,
            mask=given.mask,
            tree_positions=given.tree_positions,
            slots=given.slots,
            longest=int((given.prefixes + given.trees)[:rows].max()),
        )
        options = LayerOptions(
            given.scaling,
            window=given.span if given.WINDOWED else None,
            softcap=given.softcap if given.CAPPED else None,
            sinks=merged.sinks if merged.SINKS else None,
            chunk=given.span if given.CHUNKED else None,
        )
        pool = LayerPool(given.keys, given.values)
        found = backend.attend(given.query, stored.key, stored.value, pool, options)
        merged.out.copy_(found)


class _Kernel:
    """`kernel[grid](*args)`."""

    def __init__(self, launches: Launches, name: str) -> None:
        self._launches, self._name = launches, name
        self._real = getattr(kernels, name)

    @property
    def arg_names(self) -> list[str]:
        found: list[str] = self._real.arg_names
        return found

    def __getitem__(self, grid: tuple[int, ...]) -> _Kernel:
        assert 1 <= len(grid) <= 3 and all(isinstance(each, int) and each > 0 for each in grid)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        with torch.inference_mode():
            self._launches.launch(self._name, args, kwargs)
