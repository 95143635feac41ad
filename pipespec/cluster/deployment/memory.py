"""The memory and the open files that a deployment needs, and what is free. Only memory that is
certainly used is counted, so that no cluster is refused that could run. On a CPU weights of the
checkpoint's own type are files mapped into memory, of which the system keeps as much as it has room
for; they count where loading converts them, and where there is room they are packed
(`pipespec.engine.low_bit.cpu_products`) or copied (`pipespec.engine.ggml.compute.laid_out`)."""

from __future__ import annotations

import resource
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import psutil

from pipespec.cluster.deployment.deployment import Deployment
from pipespec.core import NUM_COLUMNS
from pipespec.engine.formats.quantization import QUANTIZATIONS
from pipespec.engine.inspection.inspection import CheckpointInfo
from pipespec.engine.model_settings import KV_SHARE, kv_amount
from pipespec.engine.precision import ITEM_BYTES
from pipespec.engine.recurrence.state_sizes import fixed_entries
from pipespec.errors import ConfigError
from pipespec.placement.measurements import draft_slots, slots_by_setting
from pipespec.placement.slices import GIB
from pipespec.system import heap
from pipespec.system.devices import require_device

WEIGHTS = "the weights"
# Bytes of a node of `pipespec.head.tree.Tree`: eight numbers of 8 bytes and two flags.
NODE_BYTES = 8 * 8 + 2
SLOT_BYTES = 8  # in the list of free slots

# Measured with 1, 4 and 8 stages: with fewer files a cluster does not start. The process with most
# files holds pipes to every worker; a private Redis needs 32 itself and has two to four connections
# to every worker.
FILES, REDIS_FILES, FILES_PER_WORKER = 30, 35, 4

REMEDIES = {
    WEIGHTS: "use more hosts or devices, or a smaller model",
    "model.context": "lower model.context",
    "model.kv_memory": "lower model.kv_memory",
    "policy.width": "lower policy.width",
    "policy.capacity": "lower policy.capacity, or policy.width and policy.children",
    "scheduler.max_num_seqs": "lower scheduler.max_num_seqs",
    "decode.prefill_chunk": "lower decode.prefill_chunk",
}


def model_of(deployment: Deployment, rank: int) -> CheckpointInfo | None:
    """The model of a rank; of the head the draft model."""
    return deployment.target if rank else deployment.draft


def required_bytes(deployment: Deployment, rank: int) -> Counter[str]:
    """Bytes that a rank, or each tensor-parallel member of it, uses on its device, by setting or
    WEIGHTS."""
    info = model_of(deployment, rank)
    if info is None:
        return Counter()
    item = ITEM_BYTES[deployment.dtype_of(info)]
    slot = slot_bytes(deployment, info, rank)
    config = deployment.config
    found = Counter({name: n * slot for name, n in least_slots(deployment, rank).items()})
    if kv_amount(config.model.kv_memory)[1] is not None:
        found["model.kv_memory"] += (kv_slots(deployment, rank, 0) * slot) - found.total()
    logits = config.fed_rows * info.vocab_size * item
    if rank == 0:
        nodes = config.scheduler.max_num_seqs * config.max_nodes
        found["policy.capacity"] += nodes * NODE_BYTES
        found["policy.width"] += logits
    else:
        row = NUM_COLUMNS * 8 + info.hidden_size * item
        found["policy.width"] += config.fed_rows * row
        if layers_of(deployment, info, rank).stop == info.num_layers:
            found["policy.width"] += logits
    found["scheduler.max_num_seqs"] += recurrent_bytes(deployment, info, rank)
    found[WEIGHTS] += weight_bytes(deployment, info, rank, deployment.sizes[rank])
    return found


def layers_of(deployment: Deployment, info: CheckpointInfo, rank: int) -> range:
    return deployment.layers[rank - 1] if rank else range(info.num_layers)


def slot_bytes(deployment: Deployment, info: CheckpointInfo, rank: int) -> int:
    """Bytes of a token in the KV pool of a rank, or of each of its members."""
    members = deployment.sizes[rank]
    of_layer = info.kv_bytes(deployment.dtype_of(info), deployment.config.model.kv_dtype, members)
    return info.kv_layers(layers_of(deployment, info, rank)) * of_layer + SLOT_BYTES


def recurrent_bytes(deployment: Deployment, info: CheckpointInfo, rank: int) -> int:
    """Bytes of the running states of a rank's layers: of as many sequences as there may be, those
    that are kept of prompts, and those of tree nodes."""
    settings, members = deployment.config.model, deployment.sizes[rank]
    kept = deployment.kept_states if rank else deployment.kept_states_of(info, members)
    sequences = deployment.config.scheduler.max_num_seqs + kept
    nodes = draft_slots(deployment.config, num_ranks=deployment.num_ranks, head=rank == 0)
    if deployment.devices[rank] != "cpu" and settings.graph_rows:
        nodes = max(nodes, fixed_entries(max(settings.graph_rows)))
        sequences += 1  # of padding
    nodes = 1 << (nodes - 1).bit_length()  # pools of nodes grow twofold
    layers = layers_of(deployment, info, rank)
    return info.recurrent_bytes(layers, deployment.dtype_of(info), sequences, nodes)


def least_slots(deployment: Deployment, rank: int) -> Counter[str]:
    """KV slots that a rank needs to decode the longest sequence, by setting."""
    return slots_by_setting(
        deployment.config,
        context=deployment.context,
        num_ranks=deployment.num_ranks,
        head=rank == 0,
    )


def kv_slots(deployment: Deployment, rank: int, free: int) -> int:
    """How many KV slots a rank allocates with `free` bytes before its weights are loaded. As many
    as `max_num_seqs` of the longest sequences need, if they fit `model.kv_memory`; at least as many
    as one such sequence needs."""
    info = model_of(deployment, rank)
    assert info is not None
    least = least_slots(deployment, rank).total()
    slot = slot_bytes(deployment, info, rank)
    share, amount = kv_amount(deployment.config.model.kv_memory)
    if amount is None:
        share = share or KV_SHARE[deployment.devices[rank].partition(":")[0]]
        weights = weight_bytes(deployment, info, rank, deployment.sizes[rank])
        states = recurrent_bytes(deployment, info, rank)
        amount = int(share * max(free - weights - states, 0))
    most = least + (deployment.config.scheduler.max_num_seqs - 1) * deployment.context
    return min(most, max(least, amount // slot))


def require_kv(deployment: Deployment, rank: int) -> None:
    """Raise ConfigError if `model.kv_memory` is an amount and a rank cannot decode the longest
    sequence with it."""
    info = model_of(deployment, rank)
    _, amount = kv_amount(deployment.config.model.kv_memory)
    if info is None or amount is None:
        return
    wanted = least_slots(deployment, rank).total() * slot_bytes(deployment, info, rank)
    if amount < wanted:
        raise ConfigError(
            f"model.kv_memory is {deployment.config.model.kv_memory}, but rank {rank} needs "
            f"{wanted / 2**20:.3g} MiB for one sequence of {deployment.context} tokens and its "
            "draft tokens; raise it, or lower model.context."
        )


def kv_tokens(deployment: Deployment, rank: int, slots: int) -> int:
    """Tokens of text that so many KV slots of a rank hold, besides draft tokens."""
    return slots - draft_slots(deployment.config, num_ranks=deployment.num_ranks, head=rank == 0)


def weight_bytes(deployment: Deployment, info: CheckpointInfo, rank: int, members: int = 1) -> int:
    """Bytes of weights that loading the layers of a rank, or the part of a member of them,
    certainly uses on its device."""
    held = deployment.weight_format(info)
    sizes = info.loaded(deployment.dtype_of(info), held)
    whole = members == 1  # parts are copied
    plain = held is None and info.storage.dequantized_from is None
    mapped = whole and plain and sizes == info.stored
    if deployment.devices[rank] == "cpu" and mapped:
        return 0
    return held_bytes(deployment, info, rank, members)


def held_bytes(deployment: Deployment, info: CheckpointInfo, rank: int, members: int = 1) -> int:
    """Bytes of the weights of a rank's layers, with embedding and head where they belong to them,
    or of the part of a member of them; those that are mapped from files count too."""
    layers, dtype = layers_of(deployment, info, rank), deployment.dtype_of(info)
    whole = info.loaded(dtype, deployment.weight_format(info))
    sizes = info.loaded_part(whole, members, dtype)
    first, last = layers.start == 0, layers.stop == info.num_layers
    embedding = sizes.embedding if first or (last and info.tied) else 0
    return sum(sizes.layers[layers.start : layers.stop]) + embedding + last * sizes.head


def bytes_by_rank(deployment: Deployment) -> list[int]:
    """Bytes of the weights of each rank."""
    found = [0] * deployment.num_ranks
    for _, info, rank in models_by_rank(deployment):
        found[rank] += held_bytes(deployment, info, rank)
    return found


def models_by_rank(deployment: Deployment) -> Iterator[tuple[str, CheckpointInfo, int]]:
    """What users call each model of each rank, its checkpoint, and the rank."""
    for rank in range(deployment.num_ranks):
        if (info := model_of(deployment, rank)) is not None:
            yield f"stage {rank}" if rank else "draft", info, rank


def free_bytes(device: str) -> int:
    """Raises ConfigError: this machine has no such device."""
    if device == "cpu":
        swap = psutil.swap_memory().free
        return heap.free_bytes() + swap
    require_device(device, "A rank of this machine is to compute on")
    import torch

    return int(torch.cuda.mem_get_info(torch.device(device))[0])


def share_bytes(device: str, sharing: int) -> int:
    """The share of one of so many ranks on a device of this machine, in bytes. Ranks on a GPU load
    one after another, so the free memory depends on their order; its total memory does not."""
    if device == "cpu" or sharing == 1:
        return free_bytes(device) // sharing
    import torch

    return int(torch.cuda.mem_get_info(torch.device(device))[1]) // sharing


def require_memory(
    deployment: Deployment,
    ranks: Iterable[int],
    free_on: Callable[[str], int] = free_bytes,
    *,
    followers: bool = True,
) -> None:
    """Raise ConfigError unless this machine has the memory that these ranks certainly use, and
    `model.kv_memory`, if it is an amount, holds the longest sequence. `free_on`: what is free on a
    device, in bytes. `followers`: also count the ranks' tensor-parallel followers."""
    ranks = list(ranks)
    for rank in ranks:
        require_kv(deployment, rank)
    by_device = _needed(deployment, ranks, followers=followers)
    free = {device: free_on(device) for device in by_device}
    for device, wanted in by_device.items():
        if wanted.total() > free[device]:
            what, most = wanted.most_common(1)[0]
            remedy = REMEDIES[what]
            for setting, fewer in _with_fewer_bits(deployment) if what == WEIGHTS else ():
                with suppress(ConfigError):  # parts of groups, which cannot be quantised
                    needed = _needed(fewer, ranks, followers=followers)
                    if cpu := needed.get("cpu"):  # weights that would be mapped need room as well
                        held = bytes_by_rank(fewer)
                        on_cpu = [held[rank] for rank in ranks if fewer.devices[rank] == "cpu"]
                        cpu[WEIGHTS] = max(cpu[WEIGHTS], sum(on_cpu))
                    if all(each.total() <= free[name] for name, each in needed.items()):
                        remedy = f"set {setting}, with which they fit"
                        break
            raise ConfigError(
                f"The ranks of this machine need {wanted.total() / GIB:.3g} GiB on {device}, of "
                f"which {most / GIB:.3g} are for {what}, but {free[device] / GIB:.3g} GiB are "
                f"free; {remedy}."
            )


def _needed(
    deployment: Deployment, ranks: Iterable[int], *, followers: bool
) -> Mapping[str, Counter[str]]:
    """Bytes that ranks certainly use, by device and by what they are for."""
    by_device: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for rank in ranks:
        others = deployment.followers_of(deployment.workers[rank]) if followers else ()
        devices = (deployment.devices[rank], *map(deployment.device_of, others))
        for device in devices:
            by_device[device] += required_bytes(deployment, rank)
    return by_device


def _with_fewer_bits(deployment: Deployment) -> Iterator[tuple[str, Deployment]]:
    """Settings with which the weights may take less, and the deployment with each."""
    target, changes = deployment.target, list[tuple[str, Any]]()
    if target.compute_dtype("bfloat16") == "bfloat16":
        changes.append(("dtype", "bfloat16"))
    for value in QUANTIZATIONS:
        with suppress(ConfigError):
            target.check_quantization("model.quantization", value)
            changes.append(("quantization", value))
    for name, value in changes:
        model = replace(deployment.config.model, **{name: value})
        config = replace(deployment.config, model=model)
        yield f"model.{name}={value}", replace(deployment, config=config)


def require_files(deployment: Deployment, limit: int | None = None) -> None:
    """Raise ConfigError unless this process and its children may open files enough, or `limit`."""
    if limit is None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    wanted = FILES + FILES_PER_WORKER * len(deployment.local_workers)
    if deployment.config.controller.url is None:
        workers = sum(len(host.workers) for host in deployment.hosts)
        wanted = max(wanted, REDIS_FILES + FILES_PER_WORKER * workers)
    if limit != resource.RLIM_INFINITY and limit < wanted:
        raise ConfigError(
            f"This process may open {limit} files, but {wanted} are needed for "
            f"{deployment.num_ranks} ranks; raise the limit with `ulimit -n`."
        )


def local_ranks(deployment: Deployment) -> list[int]:
    here = deployment.local_workers
    return [rank for rank, worker in enumerate(deployment.workers) if worker in here]
