"""What the settings of a deployment ask for and its models or devices cannot do, and what its ranks
hold of weights of few bits, in words."""

from __future__ import annotations

from collections import Counter

from pipespec.cluster.deployment import memory
from pipespec.cluster.deployment.deployment import Deployment, quantization_of
from pipespec.engine.attention.select import missing_requirement
from pipespec.engine.formats.quantization import KEPT_FORMATS
from pipespec.engine.ggml import library
from pipespec.engine.inspection.draft_heads import require_head_fit
from pipespec.engine.inspection.inspection import CheckpointInfo
from pipespec.engine.model_settings import model_name
from pipespec.errors import ConfigError
from pipespec.system.sizes import size_text


def require_attention(deployment: Deployment) -> None:
    """Raise ConfigError if a stage here cannot use the attention backend of the settings."""
    name, local = deployment.config.model.attention, deployment.local_workers
    for rank, (worker, device) in enumerate(
        zip(deployment.workers, deployment.devices, strict=True)
    ):
        kind = device.partition(":")[0]
        wrong = None
        if worker in local or kind == "cpu":
            wrong = missing_requirement(name, kind, deployment.dtype)
        if rank and wrong:
            raise ConfigError(
                f"model.attention is {name}, but rank {rank} cannot use it: {wrong}; set "
                "model.attention=auto."
            )


def check_groups(deployment: Deployment) -> None:
    """Raise ConfigError or ModelError unless those that are to compute together can."""
    model = deployment.config.model
    head, *stages = deployment.workers
    for worker in (*stages, *deployment.spares):
        if followers := deployment.followers_of(worker):
            deployment.target.check_tensor_parallel(1 + len(followers), model.quantization)
    if followers := deployment.followers_of(head):
        if deployment.draft is None:
            raise ConfigError(
                f"The head is {1 + len(followers)} devices, but its proposer has no draft model; "
                "give it one device."
            )
        if deployment.head is not None:
            raise ConfigError(
                f"The head is {1 + len(followers)} devices, but a draft head is computed by one; "
                "give it one device."
            )
        deployment.draft.check_tensor_parallel(1 + len(followers), model.draft_quantization)


def require_fit(deployment: Deployment) -> None:
    """Raise ModelError unless the classes of the models accept the headers of their files."""
    for _, info in deployment.models:
        if info.head is None:
            info.require_fit()
        else:
            require_head_fit(info, deployment.target)


def require_quantizers(deployment: Deployment) -> None:
    """Raise ModelError unless this machine can load what its workers are to hold."""
    model, local = deployment.config.model, deployment.local_workers
    head, *stages = deployment.workers
    for kind, info in deployment.models if local else ():
        name = quantization_of(kind)
        holders = local.intersection(stages if info is deployment.target else (head,))
        if holders:
            info.require_quantizer(f"model.{name}", getattr(model, name))


def shared_gpu(deployment: Deployment) -> str | None:
    """A line that names a GPU which computes several stages or members of stages, if one does."""
    if deployment.config.emulate:
        return None
    followers = [each for lead in deployment.workers[1:] for each in deployment.followers_of(lead)]
    places = [
        *_places_of_stages(deployment),
        *((each.rpartition("/")[0], deployment.device_of(each)) for each in followers),
    ]
    what, settings = "stages", "cluster.stages"
    if followers:
        what, settings = "members of stages", "cluster.stages or cluster.tensor_parallel"
    counts = Counter(place for place in places if place[1] != "cpu")
    for (host, device), count in counts.most_common(1):
        if count > 1:
            return (
                f"{count} {what} share {device} of {host}, which computes one of them at a time. "
                f"Fewer of them ({settings}), at most one for each GPU, are likely faster."
            )
    return None


def without_ggml(deployment: Deployment) -> str | None:
    """Why CPUs of this machine compute weights of few bits without ggml; None: they do not."""
    here = deployment.local_workers & {*deployment.workers}
    on_cpu = any(deployment.device_of(each) == "cpu" for each in here)
    few_bits = any(info.can_keep for _, info in deployment.models)
    return (library.why_not() or None) if on_cpu and few_bits else None


def scaled(deployment: Deployment) -> str | None:
    """A line that says so if the target's rotary frequencies are those of a long text."""
    if deployment.scaled_for is None:
        return None
    return (
        f"The target's rotary embedding is scaled for {deployment.scaled_for} tokens, in short "
        f"texts too; with model.context={deployment.target.unscaled} or less it is the original."
    )


def _places_of_stages(deployment: Deployment) -> list[tuple[str, str]]:
    workers, devices = deployment.workers[1:], deployment.devices[1:]
    return [
        (worker.rpartition("/")[0], device) for worker, device in zip(workers, devices, strict=True)
    ]


def chosen(deployment: Deployment) -> str | None:
    """A line with the settings that were chosen for a model, and why; None: there are none."""
    names, devices = deployment.config.chosen, deployment.devices[1:]
    on = f"cluster.stages={len(deployment.layers)} (on {', '.join(devices)})"
    found = [on] * ("cluster.stages" in names)
    found += ["proposer=suffix (no draft is named: --draft MODEL)"] * ("proposer" in names)
    model = model_name(deployment.config.model.target)
    return f"Chosen for {model}: {', '.join(found)}." if found else None


def summary(deployment: Deployment) -> str | None:
    """A line with bytes and format of each rank's weights; None: none has few bits."""
    if not any(info.few_bits for _, info in deployment.models):
        return None
    found = []
    for name, info, rank in memory.models_by_rank(deployment):
        held = deployment.weight_format(info)
        size = memory.held_bytes(deployment, info, rank)
        how = deployment.dtype_of(info) if held is None else KEPT_FORMATS.get(held, held)
        found.append(f"{name} {size_text(size)} ({how})")
    return f"Weights: {'; '.join(found)}."


def loading(deployment: Deployment) -> str:
    """What is loaded, how many bytes of it, and which hosts are waited for, in words."""
    size = sum(memory.bytes_by_rank(deployment))
    by_hand = [host.name for host in deployment.hosts if host.by_hand]
    waiting = f", waiting for {', '.join(by_hand)}" if by_hand else ""
    return f"loading {model_name(deployment.config.model.target)}, {size_text(size)}{waiting}"


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
