"""What the ranks of a deployment hold of weights of few bits, in words."""

from __future__ import annotations

from collections.abc import Iterator

from pipespec.cluster import memory
from pipespec.cluster.deployment import Deployment
from pipespec.engine.checkpoint import KEPT_DTYPE, CheckpointInfo
from pipespec.engine.quantization import KEPT_FORMATS
from pipespec.system.sizes import size_text


def summary(deployment: Deployment) -> str | None:
    """A line with the bytes and the format of each rank's weights; None: no checkpoint has weights
    of few bits."""
    if not any(info.few_bits for _, info in deployment.models):
        return None
    held = "; ".join(
        f"{name} {size_text(size)} ({_format(deployment, info)})"
        for name, info, size in _ranks(deployment)
    )
    return f"Weights: {held}."


def expanded(deployment: Deployment) -> str | None:
    """A line that names the checkpoints whose weights take more memory than their files, and
    why; None: there are none."""
    reasons = [
        f"those of {info.path} {reason}"
        for _, info in deployment.models
        if (reason := _expansion(deployment, info)) is not None
    ]
    return f"Weights are expanded: {'; '.join(reasons)}." if reasons else None


def _format(deployment: Deployment, info: CheckpointInfo) -> str:
    """How the weights of the layers of one of the models are held."""
    held = deployment.weight_format(info)
    return deployment.dtype_of(info) if held is None else KEPT_FORMATS.get(held, held)


def _expansion(deployment: Deployment, info: CheckpointInfo) -> str | None:
    """Why one of the models takes more memory than its files of few bits, as a clause; None: it
    does not."""
    become = f"become {deployment.dtype_of(info)}"
    if not info.few_bits:
        return None
    held = deployment.weight_format(info)
    if held in KEPT_FORMATS:
        some = sum(each.expanded > 0 for each in info.kept_layers)
        return f"{become} in {some} of {info.num_layers} layers in part" if some else None
    if not info.can_keep:
        return f"{become}, as no product takes their format ({info.dequantized_from})"
    if deployment.config.model.keep_quantized == "no":
        return f"{become}, as model.keep_quantized is no"
    return f"{become}, as 4 bits are multiplied in {KEPT_DTYPE} alone"


def _ranks(deployment: Deployment) -> Iterator[tuple[str, CheckpointInfo, int]]:
    """Name, model and bytes of the weights of each rank's models."""
    for rank in range(deployment.num_ranks):
        for mid in (False, True) if rank == 0 and deployment.mid is not None else (False,):
            info = memory.model_of(deployment, rank, mid=mid)
            if info is None:
                continue
            name = f"stage {rank}" if rank else "mid-size model" if mid else "draft"
            layers = memory.layers_of(deployment, info, rank)
            members = memory.members_of(deployment, rank, mid=mid)
            yield name, info, memory.held_bytes(deployment, info, layers, members)
