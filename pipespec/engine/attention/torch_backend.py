"""Attention in plain torch over a device plan: the reference for kernels, and their fallback.

It works on every device and reads nothing on the host. Every row reads its own keys block by block
with online softmax (Milakov and Gimelshein 2018), in float32. It is slower than other backends, as
rows of one segment do not share their keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipespec.engine.attention.attention_plan import LayerOptions, LayerPool, Reach
from pipespec.engine.attention.device_plan import WORD, DevicePlanBackend

# Keys of a row that are processed together.
BLOCK = 128


class TorchBackend(DevicePlanBackend):
    """See `AttentionBackend`; its name in settings is `static`."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, pool: LayerPool, options: LayerOptions
    ) -> Tensor:
        rows, heads, _ = query.shape
        kv_heads = key.shape[1]
        pool.store(self.flat.write[:rows].long(), key, value)
        grouped = query.float().view(rows, kv_heads, heads // kv_heads, -1) * options.scaling
        best = grouped.new_full(grouped.shape[:3], -torch.inf)
        total = torch.zeros_like(best)
        if options.sinks is not None:
            best = options.sinks.float().view(kv_heads, -1).expand_as(best)
            total = torch.ones_like(best)
        out = grouped.new_zeros(*grouped.shape[:3], value.shape[2])
        for start in range(0, self.flat.longest, BLOCK):
            slots, seen = self._keys(rows, start, options.reach)
            scores = torch.einsum("rkgd,rnkd->rkgn", grouped, pool.keys[slots].float())
            if options.softcap is not None:
                scores = torch.tanh(scores / options.softcap) * options.softcap
            scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
            higher = torch.maximum(best, scores.amax(-1))
            # A row that has seen no key yet has the maximum -inf.
            base = torch.where(higher == -torch.inf, 0.0, higher)
            kept, weights = torch.exp(best - base), torch.exp(scores - base[..., None])
            total = total * kept + weights.sum(-1)
            added = torch.einsum("rkgn,rnkd->rkgd", weights, pool.values[slots].float())
            out = out * kept[..., None] + added
            best = higher
        return (out / total[..., None]).to(query.dtype).view(rows, heads, -1)

    def _keys(self, rows: int, start: int, reach: Reach) -> tuple[Tensor, Tensor]:
        """The slots of the next block of keys of every row, `[rows, BLOCK]`, and whether it sees
        them."""
        flat = self.flat
        columns = (flat.positions, flat.first, flat.prefix, flat.tree, flat.tree_first)
        position, first, prefix, tree, tree_first = (column[:rows, None] for column in columns)
        i = torch.arange(start, start + BLOCK, dtype=torch.int32, device=first.device)
        there = i < prefix + tree
        slots = flat.slots[torch.where(there, first + i, 0)]
        beyond = there & (i >= prefix)
        j = torch.where(beyond, i - prefix, 0)
        words = flat.mask[:rows].gather(1, (j // WORD).long())
        seen = there & ((i < prefix) | (words >> (j % WORD) & 1).bool())
        earliest = reach.earliest(position)
        if earliest is not None:
            # `tree_first` of a row without tree keys may be out of range.
            at = torch.where(beyond, flat.tree_positions[torch.where(beyond, tree_first + j, 0)], i)
            seen &= at >= earliest
        return slots, seen
