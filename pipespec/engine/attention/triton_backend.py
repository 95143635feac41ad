"""Tree attention over the KV pool as Triton kernels, by a device plan.

There are three launches per layer, whatever the plan: store the rows' K and V, attend with the keys
split among programs (Flash-Decoding), merge. A program computes some rows of one segment and the
query heads that share a KV head, so that it reads K and V once for all of them. It reads the mask
only for keys that not all rows see.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from pipespec.engine.attention import kernels
from pipespec.engine.attention.attention_plan import LayerOptions, LayerPool
from pipespec.engine.attention.device_plan import MOST_SPLITS, WORD, DevicePlanBackend
from pipespec.engine.attention.launch_table import OLDEST, Capability, attend_launch, tile_rows

# The smallest side of a matrix that Triton multiplies.
LEAST = 16
# Products and sums are fused, which was Triton's default up to 3.9.
OPTIONS = {"enable_fp_fusion": True}


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
        kernels.store[rows, kv_heads](
            key, value, keys, values, flat.write, kv_heads, **wide, **OPTIONS
        )
        group = heads // kv_heads
        launch = attend_launch(
            self.capability, query.itemsize, max(wide["DIM"], wide["VALUE"]), group
        )
        taken = min(triton.next_power_of_2(group), launch.heads)
        tiling = flat.tilings[launch.rows]
        parts = torch.empty(
            MOST_SPLITS, rows, heads, value_dim, dtype=torch.float32, device=query.device
        )
        weights = torch.empty(MOST_SPLITS, rows, heads, dtype=torch.float32, device=query.device)
        kernels.attend[flat.capacity.rows, kv_heads * triton.cdiv(group, taken), MOST_SPLITS](
            query,
            keys,
            values,
            parts,
            weights,
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
            parts,
            weights,
            tiling.splits,
            sinks,
            out,
            rows,
            value_dim,
            VALUE=wide["VALUE"],
            SPLIT=MOST_SPLITS,
            SINKS=options.sinks is not None,
            **OPTIONS,
        )
        return out


def _power(count: int) -> int:
    """The next power of two, at least LEAST."""
    return max(triton.next_power_of_2(count), LEAST)
