"""What is special about some of torch's functions and operations on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tests.helpers.pretended_gpu.findings import Kind
from tests.helpers.pretended_gpu.tensors import GpuTensor

if TYPE_CHECKING:
    from tests.helpers.pretended_gpu.gpu import PretendedGpu

# --- functions in Python ----------------------------------------------------------------------


def _tolist(gpu: PretendedGpu, tensor: GpuTensor) -> Any:
    gpu.report(Kind.READ, "tolist")
    return tensor.host.tolist()


def _numpy(gpu: PretendedGpu, *_: Any, **__: Any) -> Any:
    gpu.report(Kind.MIXED, "numpy")
    raise TypeError("a tensor on a GPU has no NumPy array; copy it to main memory first")


def _address(_: PretendedGpu, tensor: GpuTensor) -> int:
    return tensor.host.data_ptr()


def _storage(_: PretendedGpu, tensor: GpuTensor) -> torch.UntypedStorage:
    return tensor.host.untyped_storage()


def _nothing(*_: Any, **__: Any) -> None: ...


# What torch does not do for subclasses of Tensor.
READERS: dict[Any, Any] = {
    Tensor.tolist: _tolist,
    Tensor.numpy: _numpy,
    Tensor.__array__: _numpy,
    Tensor.data_ptr: _address,
    Tensor.untyped_storage: _storage,
    Tensor.record_stream: _nothing,
}
ITEMS = frozenset((Tensor.__getitem__, Tensor.__setitem__))
# Positional arguments of these may be devices.
MOVES = frozenset((Tensor.to,))
# They copy numbers of Python or NumPy, which is within a call that no mode sees.
FROM_DATA = frozenset((torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor))


def index(part: Any) -> Any:
    """A part of the key of `tensor[key]` as torch takes it."""
    if isinstance(part, list | np.ndarray):
        return torch.as_tensor(np.asarray(part, np.int64 if not len(part) else None))
    return part


# --- operations of the dispatcher -------------------------------------------------------------

COPIES = frozenset(("_to_copy", "copy_", "to", "_copy_from", "cpu"))
INDEXING = frozenset(("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"))


def _histc(values: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch.histc(values.float(), *args, **kwargs).to(values.dtype)


def _wide_product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    return left.to(dtype) @ right.to(dtype)


# Rows of a tile of torch's product for weights of 4 bits.
_TILE = 8


def _pack_int4(pairs: Tensor, tiles: int) -> Tensor:
    """In the shape of the kernel's own format (aten/src/ATen/native/cuda/int4mm.cu)."""
    rows, columns = len(pairs), 2 * pairs.shape[1]
    assert pairs.dtype == torch.uint8
    assert rows % _TILE == 0
    assert columns % (16 * tiles) == 0
    shape = (rows // _TILE, columns // (16 * tiles), 32, tiles // 2)
    return pairs.view(torch.int32).reshape(shape)


def _multiply_int4(rows: Tensor, packed: Tensor, group: int, scale_and_zero: Tensor) -> Tensor:
    pairs = packed.contiguous().view(torch.uint8).view(_TILE * len(packed), -1)
    codes = torch.stack((pairs >> 4, pairs & 15), -1).view(len(pairs), -1, group)
    scales, zeros = scale_and_zero.transpose(0, 1).float().unsqueeze(2).unbind(-1)
    weights = ((codes - 8.0) * scales + zeros).view(len(pairs), -1)
    # No row may depend on the others, as in the kernel.
    return (rows.double() @ weights.double().T).to(rows.dtype)


# Operations that a CPU does not have, or not for all types.
ABSENT: dict[Any, Any] = {
    torch.ops.aten._convert_weight_to_int4pack.default: _pack_int4,
    torch.ops.aten._weight_int4pack_mm.default: _multiply_int4,
    torch.ops.aten.histc.default: _histc,
    torch.ops.aten.mm.dtype: _wide_product,
}
# They take no single number in main memory.
NO_SCALARS = frozenset(("cat", "stack", "index_copy_", "index_copy", "scatter_", "gather", "set_"))
_READS = frozenset(("_local_scalar_dense", "item", "is_nonzero", "equal", "allclose"))
_SIZES = frozenset(
    (
        "nonzero",
        "nonzero_numpy",
        "argwhere",
        "masked_select",
        "unique_dim",
        "unique_consecutive",
        "unique_dim_consecutive",
        "_unique",
        "_unique2",
        "bincount",
    )
)


def groups_on_gpu(rows: Tensor, capability: tuple[int, int]) -> bool:
    """Whether torch has a kernel for grouped products; else it reads the sizes of the groups
    (aten/src/ATen/native/cuda/GroupedBlas.cpp)."""
    return rows.dtype == torch.bfloat16 and capability >= (9, 0)


def waits(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, scalar: bool) -> Kind | None:
    """Why an operation makes the host wait; None: it does not. `scalar`: it stores a Python
    number."""
    if name in _READS:
        return Kind.READ
    if name in _SIZES:
        return Kind.SIZE
    if name == "repeat_interleave" and (len(args) == 1 or isinstance(args[1], Tensor)):
        return None if kwargs.get("output_size") is not None else Kind.SIZE
    if name in INDEXING and not scalar:
        masks = (torch.bool, torch.uint8)
        if any(isinstance(each, Tensor) and each.dtype in masks for each in args[1]):
            return Kind.SIZE
    if name == "tensor_split" and isinstance(args[1], Tensor):
        return Kind.READ
    return None
