"""K and V in 8 bits: each head of a token has its own scale.

A head of `dim` numbers takes `dim + KV_SCALE_BYTES` bytes of the pool: its codes, then its scale in
bfloat16. The type of the pool tells the format: int8 codes, or the bytes of E4M3 floats. What a
row stores depends on that row alone, so the text is the same for every policy and stage count.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipespec.engine.precision import KV_FP8, KV_INT8, KV_SCALE_BYTES

# The type of a pool in each format, and the largest number of its codes.
POOL_TYPES = {KV_INT8: torch.int8, KV_FP8: torch.uint8}
LARGEST = {torch.int8: 127.0, torch.uint8: 448.0}


def is_packed(pool: Tensor) -> bool:
    """Whether a pool holds 8-bit codes with scales."""
    return pool.dtype in LARGEST


def packed(numbers: Tensor, pool_type: torch.dtype) -> Tensor:
    """`[rows, heads, dim]` -> what a pool of this type stores,
    `[rows, heads, dim + KV_SCALE_BYTES]`."""
    wide = numbers.float()
    scales = (wide.abs().amax(-1, keepdim=True) / LARGEST[pool_type]).to(torch.bfloat16)
    # A head of zeros has no scale; the least one keeps its codes finite.
    codes = wide / scales.float().clamp(min=torch.finfo(torch.float32).tiny)
    codes = codes.clamp(-LARGEST[pool_type], LARGEST[pool_type])
    if pool_type == torch.int8:
        stored = codes.round().to(torch.int8)
    else:
        stored = codes.to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.cat((stored, scales.contiguous().view(pool_type)), -1)


def unpacked(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `packed`, but for rounding, in this type; plain numbers in another type."""
    if not is_packed(stored):
        return stored.to(dtype)
    codes, scales = stored[..., :-KV_SCALE_BYTES], stored[..., -KV_SCALE_BYTES:]
    if stored.dtype == torch.uint8:
        codes = codes.contiguous().view(torch.float8_e4m3fn)
    return codes.to(dtype) * scales.contiguous().view(torch.bfloat16).to(dtype)
