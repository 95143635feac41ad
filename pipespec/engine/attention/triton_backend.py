"""Tree attention over the KV pool as Triton kernels, by a device plan.

There are three launches per layer, whatever the plan: store the rows' K and V, attend with the keys
split among programs (Flash-Decoding), merge. A program computes some rows of one segment and the
query heads that share a KV head, so that it reads K and V once for all of them. It reads the mask
only for keys that not all rows see.

`make check-gpu-code` compiles the kernels for every architecture named here, and fails if a launch
takes more shared memory than a program may have, or spills registers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from pipespec.engine.attention import kernels
from pipespec.engine.attention.attention_plan import LayerOptions, LayerPool
from pipespec.engine.attention.device_plan import MOST_SPLITS, WORD, DevicePlanBackend

Capability = tuple[int, int]

# CUDA's compute capability of the oldest GPUs: Triton compiles no matrix product for sm_75.
OLDEST: Capability = (8, 0)
# KiB of shared memory that a program may have, from the CUDA C++ Programming Guide, "Technical
# Specifications per Compute Capability"; other GPUs have at least LEAST_SHARED_KIB.
SHARED_KIB: dict[Capability, int] = {
    (8, 0): 163,  # A100
    (8, 6): 99,  # RTX 3090
    (8, 9): 99,  # RTX 4090
    (9, 0): 227,  # H100
    (10, 0): 227,  # B200
    (12, 0): 99,  # RTX 5090
}
LEAST_SHARED_KIB = 99
HOPPER: Capability = (9, 0)
# GPUs whose tensor cores read operands from shared memory, which takes fewer registers.
ASYNCHRONOUS: tuple[Capability, ...] = (HOPPER, (10, 0))
# The smallest side of a matrix that Triton multiplies.
LEAST = 16
# Products and sums are fused, which was Triton's default up to 3.9.
OPTIONS = {"enable_fp_fusion": True}


class Launch(NamedTuple):
    """Of `kernels.attend`: how many rows and query heads of a KV head a program computes at most,
    how many keys it processes together, its warps, and the stages of its loop that overlap."""

    rows: int
    heads: int
    keys: int
    warps: int
    stages: int


def tile_rows(capability: Capability) -> tuple[int, ...]:
    return (8, 16) if capability == HOPPER else (8,)


def attend_launch(capability: Capability, itemsize: int, width: int, group: int) -> Launch:
    """The launch for numbers of `itemsize` bytes, K and V of up to `width` numbers per head (a
    power of two), and `group` query heads for each KV head."""
    stages = 3 if SHARED_KIB.get(capability, LEAST_SHARED_KIB) > LEAST_SHARED_KIB else 2
    if itemsize == 4:
        # Without tensor cores a program's time, code and registers grow with its products.
        return Launch(8, heads=4 if width <= 128 else 2, keys=16, warps=8, stages=stages)
    if capability == HOPPER and width <= 128 and group <= 8:
        # Of 24 on an H200 the fastest for groups of 4, and nearly so for 8 (docs/gpus.md): 64 pairs
        # of a row and a head, which four warps multiply at once.
        rows = 8 if group > 4 else 16
        return Launch(rows, heads=64 // rows, keys=64, warps=4, stages=stages)
    heads = 16 if width <= (128 if capability in ASYNCHRONOUS else 64) else 8
    # The sums of more than four heads, of eight rows each, need the registers of eight warps.
    if min(group, heads) > 4:
        return Launch(8, heads, keys=32, warps=8, stages=stages)
    return Launch(8, heads, keys=64 if width <= 128 else 32, warps=4, stages=stages)


def capability_error(capability: Capability) -> str | None:
    """Why the kernels are not for a GPU, as a clause; None: they are."""
    if capability >= OLDEST:
        return None
    had, needed = ("".join(map(str, each)) for each in (capability, OLDEST))
    return f"its kernels need a GPU of sm_{needed} or newer, and this one is of sm_{had}"


class TritonBackend(DevicePlanBackend):
    """See `AttentionBackend`. For head sizes up to 256, in float32, bfloat16 or float16."""

    def __init__(
        self, device: torch.device | str, num_slots: int, capability: Capability | None = None
    ):
        """`capability`: CUDA's compute capability to launch for; None: that of the device."""
        if capability is None:
            on_gpu = torch.device(device).type == "cuda"
            capability = torch.cuda.get_device_capability(device) if on_gpu else OLDEST
        self.capability = capability
        super().__init__(device, num_slots, tile_rows(capability))

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, pool: LayerPool, options: LayerOptions
    ) -> Tensor:
        flat, (rows, heads, dim), (_, kv_heads, value_dim) = self.flat, query.shape, value.shape
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        keys, values = pool.keys, pool.values
        wide = {"dim": dim, "value_dim": value_dim, "DIM": _power(dim), "VALUE": _power(value_dim)}
        stored = key, value, keys, values, flat.write
        kernels.store[rows, kv_heads](*stored, kv_heads, **wide, **OPTIONS)
        group = heads // kv_heads
        widest = max(wide["DIM"], wide["VALUE"])
        launch = attend_launch(self.capability, query.itemsize, widest, group)
        taken = min(triton.next_power_of_2(group), launch.heads)
        tiling = flat.tilings[launch.rows]
        parts = torch.empty(
            MOST_SPLITS, rows, heads, value_dim, dtype=torch.float32, device=query.device
        )
        weights = torch.empty(MOST_SPLITS, rows, heads, dtype=torch.float32, device=query.device)
        kernels.attend[flat.capacity.rows, kv_heads * triton.cdiv(group, taken), MOST_SPLITS](
            *(query, keys, values, parts, weights),
            *(tiling.tiles, flat.positions, flat.first, flat.prefix, flat.tree, flat.tree_first),
            *(flat.mask, flat.tree_positions, flat.slots),
            rows,
            flat.mask.shape[1],
            options.scaling,
            options.softcap or 0.0,
            options.window or options.chunk or 0,
            kv_heads,
            group,
            **wide,
            TAKEN=taken,
            PAIRS=max(launch.rows * taken, LEAST),
            BITS=WORD,
            KEYS=launch.keys,
            CAPPED=options.softcap is not None,
            WINDOWED=options.window is not None,
            CHUNKED=options.chunk is not None,
            PRECISE="ieee" if query.dtype == torch.float32 else "tf32",
            num_warps=launch.warps,
            num_stages=launch.stages,
            **OPTIONS,
        )
        out = torch.empty(rows, heads, value_dim, dtype=query.dtype, device=query.device)
        sinks = weights if options.sinks is None else options.sinks
        kernels.merge[rows, heads](
            *(parts, weights, tiling.splits, sinks, out, rows, value_dim),
            VALUE=wide["VALUE"],
            SPLIT=MOST_SPLITS,
            SINKS=options.sinks is not None,
            **OPTIONS,
        )
        return out


def _power(count: int) -> int:
    return max(triton.next_power_of_2(count), LEAST)
