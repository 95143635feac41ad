"""Decides before any rank starts which checkpoints, devices and layers the ranks have. It imports
no model and no rank's loop, so that errors come quickly."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from pipespec.cluster.deployment import memory
from pipespec.cluster.deployment.checks import (
    check_groups,
    require_attention,
    require_fit,
    require_quantizers,
)
from pipespec.cluster.deployment.deployment import Deployment, fit_context, quantization_of
from pipespec.cluster.deployment.memory import REMEDIES, WEIGHTS, free_bytes
from pipespec.config.hosts import Host, load_hosts, this_machine
from pipespec.config.schema import ClusterConfig, Config
from pipespec.engine.checkpoint.checkpoint import open_files
from pipespec.engine.checkpoint.model_path import resolve
from pipespec.engine.checkpoint.partial_checkpoint import repository_of
from pipespec.engine.checkpoint.parts.folder import Repository
from pipespec.engine.inspection.draft_heads import inspect_head
from pipespec.engine.inspection.inspection import CheckpointInfo, inspect
from pipespec.errors import ConfigError, ModelError
from pipespec.placement.costs import Needs, Problem, Worker
from pipespec.placement.measurements import unmeasured
from pipespec.placement.slices import GIB, Placement, plan_slices, split_evenly
from pipespec.sampling.params import check_vocabulary
from pipespec.system.devices import resolve_devices
from pipespec.system.validation import home_expanded


def decide(
    config: Config, placement: Placement | None = None, *, ask_hosts: bool = True
) -> Deployment:
    """Plan a cluster from the checkpoints and the machine, with a placement from measured figures
    or, without one, with devices that count as equal. `ask_hosts`: models that this machine lacks
    are looked for on the other hosts. Whether their classes accept them is left to
    `checks.require_fit`. Raises ConfigError; HostFailed if another host must be asked
    and cannot."""
    hosts_file = None if config.cluster.hosts is None else load_hosts(config.cluster.hosts)
    has_head = config.proposer.needs_head
    needs_draft = config.proposer.needs_draft or (has_head and config.model.draft is not None)
    kinds = ("target", "draft") if needs_draft else ("target",)
    named = {kind: getattr(config.model, kind) for kind in kinds}
    elsewhere: Mapping[str, Path] = {}
    if hosts_file is None:
        host_here(config.cluster)  # a device that is missing is said before models are read
    elif ask_hosts:
        from pipespec.cluster.weights.distribution import find_on_hosts

        elsewhere = find_on_hosts(named, hosts_file)

    models: dict[str, CheckpointInfo] = {}
    for kind, model in named.items():
        name, place = quantization_of(kind), elsewhere.get(kind, model)
        if kind == "draft" and has_head:
            models[kind] = inspect_head(place, models["target"])
        else:
            models[kind] = inspect(place, fit=False)
        models[kind].check_quantization(f"model.{name}", getattr(config.model, name))
    target, draft = models["target"], models.get("draft")
    if has_head and draft is None:
        draft = inspect_head(None, target)
    if "cluster.stages" in config.chosen:
        stages = min(config.cluster.stages, target.num_layers)
        config = replace(config, cluster=replace(config.cluster, stages=stages))
    if config.model.dtype not in ("auto", target.compute_dtype(config.model.dtype)):
        raise ConfigError(
            f"model.dtype is {config.model.dtype}, but {target.path} is quantised for "
            f"{target.dtype}; leave model.dtype out."
        )
    context = config.model.context or target.context
    if context > target.context:
        raise ConfigError(
            f"model.context is {context}, but the target was made for at most {target.context} "
            "tokens; lower model.context."
        )
    check_vocabulary(config.sampling.params(fresh_seed=0), target.vocab_size)
    children = max(each.children for each in config.policies)
    if children > target.vocab_size:
        raise ConfigError(
            f"policy.children is {children}, but the target's vocabulary has "
            f"{target.vocab_size} tokens; lower policy.children."
        )
    if hosts_file is None:
        hosts: tuple[Host, ...] = (host_here(config.cluster),)
        if placement is None:
            stages, workers = config.cluster.stages, tuple(hosts[0].members)
            problem = Problem(  # of equal workers
                tuple(map(Worker, workers)),
                Needs((0,) * target.num_layers),
                draft=workers[0],
                split=tuple(map(len, split_evenly(target.num_layers, stages))),
                spares=workers[stages + 1 :],
            )
            placement = plan_slices(problem)
    else:
        hosts_file.require_devices()
        hosts = hosts_file.hosts
        if config.cluster.stages != hosts_file.num_stages:
            raise ConfigError(
                f"cluster.stages is {config.cluster.stages}, but {config.cluster.hosts} has "
                f"workers for {hosts_file.num_stages} stages; leave cluster.stages out."
            )
        if placement is None:
            placement = plan_slices(unmeasured(hosts_file, config, target, draft))
    found = Deployment(config, target, draft, placement, placement.layers, (), context, hosts)
    check_groups(found)
    found = replace(found.laid_out(placement), shared=shared_models(found))
    require_attention(found)
    return found


def require_room(config: Config) -> None:
    """Raise ConfigError or ModelError if models that are here cannot be read, or are too large for
    this machine, which is all that is to compute: what is known before Transformers is asked."""
    if config.cluster.hosts is not None:
        return
    models = [config.model.target, config.model.draft if config.proposer.needs_draft else None]
    paths = [home_expanded(model) for model in models if model is not None]
    least = sum(open_files(resolve(path)).least_bytes() for path in paths if os.path.exists(path))
    on_cpu = set(host_here(config.cluster).devices) == {"cpu"}
    if on_cpu and least > (free := free_bytes("cpu")):
        raise ConfigError(
            f"The models need more than {least / GIB:.3g} GiB on cpu, but {free / GIB:.3g} GiB "
            f"are free; {REMEDIES[WEIGHTS]}."
        )


def check_deployment(deployment: Deployment, *, stays: bool) -> None:
    """Raise ConfigError unless a deployment can be started from here, as far as can be known before
    its hosts have their weights. `stays`: see `session.start_agents`."""
    by_hand = [host.name for host in deployment.hosts if host.by_hand]
    if by_hand and not stays:
        raise ConfigError(
            f"The workers of {', '.join(by_hand)} are started by hand (ssh: none); start the "
            "cluster with `pipespec up`, and send requests to it with --on."
        )
    require_quantizers(deployment)
    memory.require_files(deployment)
    for _, info in deployment.models:
        if info.head is None:
            open_files(info.path).require_tokenizer()
    # A prompt that is not read yet has a token at least.
    least = deployment if stays else fit_context(deployment, 1, requests=1)
    memory.require_memory(least, memory.local_ranks(least))

    from pipespec.cluster.redis_setup import require_same_model  # what is slow to import comes last

    require_same_model(deployment)
    require_fit(deployment)  # last, as it takes longest


def shared_models(deployment: Deployment) -> dict[str, Repository]:
    """What other hosts call the models that they can get from here, which lacks no file of them."""
    found = {}
    for kind, info in deployment.models:
        with suppress(ModelError):
            found[kind] = repository_of(info.path)
    return found


def host_here(cluster: ClusterConfig) -> Host:
    """The only host of a cluster without a hosts file. Raises ConfigError."""
    count = cluster.stages + cluster.spares
    groups = [cluster.draft_tensor_parallel, *[cluster.tensor_parallel] * count]
    return this_machine(resolve_devices(cluster.devices, sum(groups)), groups)
