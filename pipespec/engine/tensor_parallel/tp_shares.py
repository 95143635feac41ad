"""How much of a checkpoint each tensor-parallel member has, before anything is loaded."""

from __future__ import annotations

import importlib.metadata
import math
from dataclasses import dataclass
from pathlib import Path

from pipespec.engine.checkpoint.checkpoint import StoredFiles, open_files
from pipespec.engine.formats.slice_tensors import LAYER
from pipespec.engine.formats.stored import Units
from pipespec.system.result_cache import cached_call


@dataclass(frozen=True)
class TPShares:
    """What the first member of a group, which has most, has of a model, in numbers of weights.

    Attributes:
        common: weights of each layer that every member has.
        divided: the other weights of each layer.
        part: those that the member has of them, by layer.
        vocabulary: rows of embedding and output head.
        kv_heads: KV heads of which each member keeps K and V.
    """

    common: list[int]
    divided: list[int]
    part: list[int]
    vocabulary: int
    kv_heads: int


def tp_shares(path: Path, members: int) -> TPShares:
    """How `members` devices divide a checkpoint that has a plan for it; cached. Raises
    ModelError."""
    files = open_files(path)
    raw, units = files.raw, files.units()
    depends = {
        "config": raw,
        "units": [units.rows, units.columns],
        "members": members,
        "transformers": importlib.metadata.version("transformers"),
    }
    return cached_call("shares", TPShares, depends, _count, files, members, units)


def _count(files: StoredFiles, members: int, units: Units) -> TPShares:
    """By the model's own class, on PyTorch's meta device."""
    import torch

    from pipespec.engine.checkpoint.building import lock
    from pipespec.engine.formats.architectures import num_layers_of
    from pipespec.engine.slice.loading import sliced_class
    from pipespec.engine.tensor_parallel.tp_plan import num_kv_heads, plan_cuts

    config = files.config()
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    layers = range(num_layers_of(config))
    with lock, torch.device("meta"):
        model = sliced_class(config, layers)._from_config(config)
    plan = plan_cuts(model, members, units)
    kv_heads = num_kv_heads(config)
    zeros = [0] * len(layers)
    found = TPShares(
        zeros,
        zeros.copy(),
        zeros.copy(),
        plan.vocabulary[0].size,
        kv_heads // min(kv_heads, members),
    )
    for name, parameter in model.named_parameters():
        if (place := LAYER.search(name)) is None:
            continue
        layer = int(place[1])
        if name not in plan.cuts:
            found.common[layer] += parameter.numel()
            continue
        found.divided[layer] += parameter.numel()
        found.part[layer] += math.prod(plan.cuts[name][0].shape(parameter.shape))
    return found
