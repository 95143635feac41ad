"""How much of a checkpoint each tensor-parallel member has, before anything is loaded."""

from __future__ import annotations

import importlib.metadata
import math
from dataclasses import dataclass
from pathlib import Path

from pipespec.engine.checkpoint.checkpoint import Checkpoint
from pipespec.engine.checkpoint.partial_checkpoint import StoredFiles
from pipespec.engine.formats.slice_tensors import LAYER
from pipespec.engine.formats.tp_cuts import CutUnits
from pipespec.system.result_cache import cached_call


@dataclass(frozen=True)
class TPShares:
    """What the members of a group have of a model, in numbers of weights and of heads.

    Attributes:
        common: weights of each layer that every member has.
        divided: the other weights of each layer.
        parts: those that each member has of them, by layer and member.
        vocabulary: rows of embedding and output head of each member.
        kv_heads: KV heads of which each member keeps K and V.
    """

    common: list[int]
    divided: list[int]
    parts: list[list[int]]
    vocabulary: list[int]
    kv_heads: list[int]


def tp_shares(path: Path, members: int) -> TPShares:
    """How `members` devices divide a checkpoint that has a plan for it; cached. Raises
    ModelError."""
    files = Checkpoint(path).files
    raw, units = files.raw, files.units()
    depends = {
        "config": raw,
        "units": [units.rows, units.columns],
        "members": members,
        "transformers": importlib.metadata.version("transformers"),
    }
    return cached_call("shares", TPShares, depends, _count, files, members, units)


def _count(files: StoredFiles, members: int, units: CutUnits) -> TPShares:
    """By the model's own class, on PyTorch's meta device."""
    import torch

    from pipespec.engine.checkpoint.building import lock
    from pipespec.engine.formats.architectures import num_layers_of
    from pipespec.engine.slice.slicing import sliced_class
    from pipespec.engine.tensor_parallel.tp_plan import num_kv_heads, plan_cuts

    config = files.config()
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    layers = range(num_layers_of(config))
    with lock, torch.device("meta"):
        model = sliced_class(config, layers)._from_config(config)
    plan = plan_cuts(model, members, units)
    found = TPShares(
        [0 for _ in layers],
        [0 for _ in layers],
        [[0] * members for _ in layers],
        [part.size for part in plan.vocabulary],
        [num_kv_heads(config)] * members
        if plan.heads is None
        else [each.num_stored for each in plan.heads],
    )
    for name, parameter in model.named_parameters():
        if (place := LAYER.search(name)) is None:
            continue
        layer = int(place[1])
        if name not in plan.cuts:
            found.common[layer] += parameter.numel()
            continue
        found.divided[layer] += parameter.numel()
        for member, part in enumerate(plan.cuts[name]):
            found.parts[layer][member] += math.prod(part.shape(parameter.shape))
    return found
