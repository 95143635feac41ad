"""The pretended GPU: computes on it what torch is asked to compute on `cuda:0`, and reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pipespec.engine.attention import hook
from tests.helpers.pretended_gpu import cuda_module, operations
from tests.helpers.pretended_gpu.findings import Finding, Kind, finding
from tests.helpers.pretended_gpu.tensors import (
    CUDA,
    GpuTensor,
    host_of,
    is_gpu,
    private_device,
)

# Pinned memory by address. It is never freed, so that no other memory has its address.
_pinned: dict[int, torch.UntypedStorage] = {}
HOPPER, AMPERE = (9, 0), (8, 6)


class PretendedGpu:
    """While it is entered, this thread has a GPU `cuda:0`.

    What would fail on a GPU is done all the same, so that one run reports everything.
    """

    def __init__(self, capability: tuple[int, int] = HOPPER) -> None:
        """`capability` as of `torch.cuda.get_device_capability`."""
        self.capability = capability
        self.findings: list[Finding] = []
        self._functions, self._operations = _Functions(self), _Operations(self)
        self._capturing = False
        self._scalar = False  # whether the value that is being stored is a Python number
        self._entered = ExitStack()

    def __enter__(self) -> PretendedGpu:
        private_device()
        for patched in cuda_module.patches(self):
            self._entered.enter_context(patched)
        self._entered.enter_context(self._operations)
        self._entered.enter_context(self._functions)
        return self

    def __exit__(self, *error: object) -> None:
        self._entered.close()

    @contextmanager
    def modes(self) -> Iterator[None]:
        """Within a call that a mode has taken: see what its own code calls."""
        with self._operations, self._functions:
            yield

    def report(self, kind: Kind, operation: object) -> None:
        """Add a finding of the code that runs now."""
        self.findings.append(finding(kind, str(operation), captured=self._capturing))

    def capture(self, run: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        """In place of `capture_cuda_graph`: replays by running again, and fails where a graph
        cannot capture."""
        result = self._captured(run)
        return lambda: result.copy_(self._captured(run)), result

    def _captured(self, run: Callable[[], Tensor]) -> Tensor:
        before, self._capturing = len(self.findings), True
        try:
            result = run()
        finally:
            self._capturing = False
        if found := self.findings[before:]:
            raise RuntimeError(str(found[0]))
        return result

    def take(self) -> list[Finding]:
        """The findings since the last call."""
        found, self.findings = self.findings, []
        return found

    # --- memory ---------------------------------------------------------------------------------

    def pin(self, tensor: Tensor) -> Tensor:
        """The tensor, whose memory is pinned from now on."""
        storage = tensor.untyped_storage()
        _pinned[storage.data_ptr()] = storage
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        return not isinstance(tensor, GpuTensor) and tensor.untyped_storage().data_ptr() in _pinned

    def upload(self, source: Tensor, operation: object, *, non_blocking: bool) -> None:
        """Report what is wrong with a copy of a tensor in main memory to the GPU."""
        if self._capturing:
            self.report(Kind.CAPTURE, operation)
        elif not self.is_pinned(source):
            self.report(Kind.UNPINNED, operation)
        elif not non_blocking:
            self.report(Kind.BLOCKING, operation)

    def download(self, to: Tensor | None, operation: object, *, non_blocking: bool) -> None:
        """Report what is wrong with a copy from the GPU; `to`: where, or None: to new memory."""
        if non_blocking and to is not None and self.is_pinned(to):
            return
        self.report(Kind.UNPINNED if non_blocking else Kind.READ, operation)

    # --- running --------------------------------------------------------------------------------

    def function(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function of torch in Python."""
        if (found := operations.READERS.get(function)) and isinstance(args[0], GpuTensor):
            return found(self, *args, **kwargs)
        if function in operations.ITEMS and isinstance(args[0], GpuTensor):
            return self._item(function, *args)
        if function is Tensor.cuda:
            function, args = Tensor.to, (args[0], CUDA, *args[1:])
        args = tuple(map(_translated, args)) if function in operations.MOVES else args
        kwargs = {name: _translated(value) for name, value in kwargs.items()}
        if function in operations.FROM_DATA:
            device = kwargs.get("device")
            if device is None and function is Tensor.new_tensor and isinstance(args[0], GpuTensor):
                device = private_device()
            if is_gpu(device):
                if function is Tensor.new_tensor:
                    function, args = torch.tensor, args[1:]
                    kwargs.setdefault("dtype", None)
                return function(*args, **{**kwargs, "device": "cpu"}).to(private_device())
        if function is torch.nn.functional.one_hot:
            return self._one_hot(*args, **kwargs)
        return function(*args, **kwargs)

    def _item(self, function: Any, tensor: GpuTensor, key: Any, *value: Any) -> Any:
        """`tensor[key]` or `tensor[key] = value`. Lists and arrays become tensors in main memory,
        and a number that is stored is an argument of a kernel."""
        parts = key if isinstance(key, tuple) else (key,)
        parts = tuple(operations.index(part) for part in parts)
        self._scalar = bool(value) and not isinstance(value[0], Tensor)
        try:
            return function(tensor, parts if isinstance(key, tuple) else parts[0], *value)
        finally:
            self._scalar = False

    def _one_hot(self, indices: Tensor, num_classes: int = -1) -> Tensor:
        """On CUDA it checks no values, and reads the largest only if it is given no number."""
        if not isinstance(indices, GpuTensor):
            return torch.nn.functional.one_hot(indices, num_classes)
        if num_classes < 0:
            self.report(Kind.SIZE, "one_hot")
        return GpuTensor(torch.nn.functional.one_hot(indices.host, num_classes))

    def operation(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation of torch's dispatcher."""
        if operation is torch.ops.pipespec.attend.default:
            with self.modes():  # our backends run for real
                return hook._whole(*args, **kwargs)
        name = operation._schema.name.removeprefix("aten::")
        tensors = [*_tensors((args, kwargs))]
        on_gpu = [each for each in tensors if isinstance(each, GpuTensor)]
        device = kwargs.get("device")
        if name in ("is_pinned", "_pin_memory", "pin_memory"):
            (source, *_) = args
            if name == "is_pinned":
                return self.is_pinned(source)
            return self.pin(source.clone())
        if kwargs.get("pin_memory"):
            return self.pin(operation(*args, **{**kwargs, "pin_memory": False}))
        if name == "to" and len(args) > 1 and isinstance(args[1], Tensor):
            device = args[1].device  # `tensor.to(other)`
        elif device is None:
            device = next((each for each in args if isinstance(each, torch.device)), None)
        lands_on_gpu = bool(on_gpu) if device is None else is_gpu(device)
        if not on_gpu and not lands_on_gpu:
            return operation(*args, **kwargs)
        if name in operations.COPIES:
            return self._copied(operation, name, args, kwargs, lands_on_gpu)
        kind = operations.waits(name, args, kwargs, scalar=self._scalar)
        if name == "_grouped_mm" and not operations.groups_on_gpu(args[0], self.capability):
            kind = Kind.READ
        if kind is not None:
            self.report(kind, operation)
        for tensor in tensors:
            if not isinstance(tensor, GpuTensor):
                self._report_mixed(name, operation, tensor, args)
        given = {id(each.host): each for each in on_gpu}

        def wrapped(out: Any) -> Any:
            if not isinstance(out, Tensor):
                return out
            if id(out) in given:  # computed in place
                assert given[id(out)].shape == out.shape, f"{operation} changes a shape in place"
                return given[id(out)]
            return GpuTensor(out) if lands_on_gpu else out

        return _mapped(wrapped, _run(operation, args, kwargs))

    def _copied(
        self,
        operation: Any,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        lands_on_gpu: bool,
    ) -> Tensor:
        """The result of a copy, which is reported if the host waits for it."""
        to, source = (args[0], args[1]) if name == "copy_" else (None, args[0])
        into = lands_on_gpu if to is None else isinstance(to, GpuTensor)
        names = [each.name for each in operation._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        non_blocking = bool(given.get("non_blocking"))
        moves = into != isinstance(source, GpuTensor)
        if moves and into:
            self.upload(source, name, non_blocking=non_blocking)
        elif moves:
            self.download(to, name, non_blocking=non_blocking)
        found: Tensor = _run(operation, args, kwargs)
        if to is not None:
            copied: Tensor = to
            return copied
        if found is host_of(source):
            if not moves:
                return source  # type: ignore[no-any-return]
            found = found.clone()  # though the numbers are in main memory already
        return GpuTensor(found) if into else found

    def _report_mixed(
        self, name: str, operation: object, tensor: Tensor, args: tuple[Any, ...]
    ) -> None:
        """Report a tensor in main memory among the arguments of an operation on the GPU; kernels
        take single numbers as arguments."""
        if name.startswith("new_") or name.endswith("_like"):
            return
        if name in operations.INDEXING and any(tensor is each for each in args[1]):
            self.report(Kind.INDEX, operation)
        elif tensor.ndim or name in operations.NO_SCALARS:
            self.report(Kind.MIXED, operation)


def _run(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute an operation with the numbers in main memory."""
    compute = operations.ABSENT.get(operation, operation)
    return compute(*_mapped(_on_host, args), **_mapped(_on_host, kwargs))


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors among arguments of an operation."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors([*value.values()])


def _mapped(call: Callable[[Any], Any], value: Any) -> Any:
    """Arguments or results of an operation, each given to `call`."""
    if isinstance(value, tuple | list):
        return type(value)(_mapped(call, each) for each in value)
    if isinstance(value, dict):
        return {name: _mapped(call, each) for name, each in value.items()}
    return call(value)


def _translated(value: Any) -> Any:
    """A device for torch: that of the private-use backend in place of a CUDA device."""
    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        return private_device()
    if isinstance(value, torch.device) and value.type == "cuda":
        return private_device()
    return value


def _on_host(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) else host_of(value)


# All other types compute in their own way, such as torchao's tensors of quantised weights.
_PLAIN = (Tensor, GpuTensor, torch.nn.Parameter)


class _Functions(TorchFunctionMode):
    def __init__(self, gpu: PretendedGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for kind in types:
            if not issubclass(kind, Tensor):  # such as `ExpertMatrix`, whose own code runs
                with self:
                    return kind.__torch_function__(func, types, args, kwargs or {})
        return self._gpu.function(func, args, kwargs or {})


class _Operations(TorchDispatchMode):
    def __init__(self, gpu: PretendedGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for kind in types:
            if kind not in _PLAIN:
                with self._gpu.modes():
                    return kind.__torch_dispatch__(func, types, args, kwargs or {})
        return self._gpu.operation(func, args, kwargs or {})
