"""Slices of a model of `tests.helpers.models`, one after the other, and what they decode."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipespec.engine.attention.attention_plan import AttentionPlan, causal_plan
from pipespec.engine.slice.model_slice import ModelSlice
from pipespec.engine.tensor_parallel.tensor_parallel import TPBroadcastGroup
from pipespec.engine.tensor_parallel.tp_member import TPMember
from tests.helpers.models import NUM_LAYERS

NUM_SLOTS = 96


def load(
    path: Path,
    num_slices: int,
    group: TPBroadcastGroup | None = None,
    *,
    num_layers: int = NUM_LAYERS,
    **how: Any,
) -> list[ModelSlice]:
    """The slices, or what a member of this group has of them."""
    size = num_layers // num_slices
    found = []
    for start in range(0, num_layers, size):
        part = None if group is None else TPMember(group.rank, group.size)
        how["parallel"] = part or how.get("parallel")
        layers = range(start, start + size)
        found.append(ModelSlice.load(path, layers, num_slots=NUM_SLOTS, **how))
        if part is not None:
            part.join(group)
    return found


def run(slices: list[ModelSlice], ids: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
    """The logits of all rows."""
    hidden = ids
    for part in slices:
        hidden = part.forward(hidden, positions, plan)
    return slices[-1].logits(hidden)


def decode(
    slices: list[ModelSlice],
    prompt: Tensor,
    chunk: int,
    count: int,
    choose: Callable[[Tensor, int], int] = lambda logits, _: int(logits.argmax()),
) -> list[int]:
    """Prefill `prompt` in chunks, then decode `count` tokens one by one, which are chosen by logits
    and position."""
    slots = np.random.default_rng(4).permutation(NUM_SLOTS)
    ids, tokens, num_cached = prompt, list[int](), 0
    while len(tokens) < count:
        for rows in ids.split(chunk):
            end = num_cached + len(rows)
            plan = causal_plan(slots[:num_cached], slots[num_cached:end])
            logits = run(slices, rows, torch.arange(num_cached, end), plan)
            num_cached = end
        tokens.append(choose(logits[-1], num_cached))
        ids = torch.tensor(tokens[-1:])
    return tokens
