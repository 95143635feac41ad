"""What the ranks of a deployment hold of weights of few bits, in words."""

from __future__ import annotations

from collections.abc import Iterator

from pipespec.cluster.deployment import memory
from pipespec.cluster.deployment.deployment import Deployment
from pipespec.engine.formats.quantization import KEPT_FORMATS
from pipespec.engine.inspection.inspection import CheckpointInfo
from pipespec.system.sizes import size_text


def summary(deployment: Deployment) -> str | None:
    """A line with bytes and format of each rank's weights; None: none has few bits."""
    if not any(info.few_bits for _, info in deployment.models):
        return None
    found = []
    for name, info, rank in _ranks(deployment):
        held = deployment.weight_format(info)
        size = memory.held_bytes(deployment, info, memory.layers_of(deployment, info, rank))
        how = deployment.dtype_of(info) if held is None else KEPT_FORMATS.get(held, held)
        found.append(f"{name} {size_text(size)} ({how})")
    return f"Weights: {'; '.join(found)}."


def groups(deployment: Deployment) -> str | None:
    """A line with what each device of a group takes of the weights of its rank at most, and what of
    a rank is on several of its devices; None: each rank has a device of its own."""
    found = []
    for name, info, rank in _ranks(deployment):
        members = memory.members_of(deployment, rank, mid=info is deployment.mid)
        if members == 1:
            continue
        layers = memory.layers_of(deployment, info, rank)
        size = memory.held_bytes(deployment, info, layers, members)
        weights, kv_heads = info.repeated(members, layers, deployment.dtype_of(info))
        repeated = f"{size_text(weights)} of norms and other weights on each"
        if kv_heads:
            repeated += f", and {kv_heads} KV head{'s' * (kv_heads > 1)} of each layer once more"
        found.append(f"{name} {size_text(size)} on each of {members} ({repeated})")
    return f"Devices of a group hold at most: {'; '.join(found)}." if found else None


def expanded(deployment: Deployment) -> str | None:
    """A line that names checkpoints whose weights take more memory than their files, if any do."""
    reasons = [
        f"those of {info.path} {reason}"
        for _, info in deployment.models
        if (reason := _expansion(deployment, info)) is not None
    ]
    return f"Weights are expanded: {'; '.join(reasons)}." if reasons else None


def _expansion(deployment: Deployment, info: CheckpointInfo) -> str | None:
    """Why a model takes more memory than its files of few bits, as a clause; None: it does not."""
    become, held = f"become {deployment.dtype_of(info)}", deployment.weight_format(info)
    if not info.few_bits:
        return None
    if held in KEPT_FORMATS:
        some = sum(each.expanded > 0 for each in info.storage.kept_layers)
        return f"{become} in {some} of {info.num_layers} layers in part" if some else None
    if not info.can_keep:
        return f"{become}, as no product takes their format ({info.storage.dequantized_from})"
    return f"{become}, as model.keep_quantized is no"


def _ranks(deployment: Deployment) -> Iterator[tuple[str, CheckpointInfo, int]]:
    for rank in range(deployment.num_ranks):
        for mid in (False, True) if rank == 0 and deployment.mid is not None else (False,):
            if (info := memory.model_of(deployment, rank, mid=mid)) is not None:
                yield f"stage {rank}" if rank else "mid-size model" if mid else "draft", info, rank
