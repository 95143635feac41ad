"""What is decided before any rank starts: the checkpoints, who holds which layers, the prompt.

No model and no rank's loop is imported here, so a command is quick to say what is wrong, and a
process that only asks or starts ranks does not pay for what they need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pipespec.config.hosts import Host, load_hosts, this_machine
from pipespec.config.schema import NCCL, ClusterConfig, Config
from pipespec.controller.graph import Layout
from pipespec.engine.checkpoint import KEPT_DTYPE, CheckpointInfo, inspect
from pipespec.engine.precision import automatic
from pipespec.engine.quantization import KEPT
from pipespec.errors import ConfigError
from pipespec.head.source.draft_model import DraftModel
from pipespec.head.source.parallel import Parallel
from pipespec.head.source.protocol import SourceSpec
from pipespec.planning.costs import Needs, Problem, Worker
from pipespec.planning.partition import Placement, plan_slices, split_evenly
from pipespec.planning.placement import unmeasured
from pipespec.sampling.spec import check_vocabulary
from pipespec.system.devices import num_cuda


@dataclass(frozen=True)
class Deployment:
    """All that a rank must know, decided before any rank starts. It travels by pickle.

    `draft` is None where the source needs none, and so is `mid`, the mid-size model of a cascade.
    `placement` says which workers of the `hosts` begin at which rank. `layers` has one entry per
    stage, `devices` and `sizes` (how many workers compute it) one per rank; in a later epoch they
    may be others. `context` is the longest sequence in tokens that the KV pools are
    made for.
    """

    config: Config
    target: CheckpointInfo
    draft: CheckpointInfo | None
    placement: Placement
    layers: tuple[range, ...]
    devices: tuple[str, ...]
    context: int
    hosts: tuple[Host, ...]
    mid: CheckpointInfo | None = None
    sizes: tuple[int, ...] = ()

    @property
    def models(self) -> list[tuple[str, CheckpointInfo]]:
        """All checkpoints, by their names in `model.`, the target's first."""
        named = {"target": self.target, "draft": self.draft, "mid": self.mid}
        return [(name, info) for name, info in named.items() if info is not None]

    @property
    def mid_device(self) -> str:
        """Where the head's machine computes the mid-size model."""
        return self.config.cluster.mid_device or self.devices[0]

    @property
    def workers(self) -> tuple[str, ...]:
        """Who holds each rank at first, the head's first."""
        return self.placement.workers_by_rank

    @property
    def spares(self) -> tuple[str, ...]:
        """Workers that hold none until one is needed."""
        return self.placement.spares

    def device_of(self, worker: str) -> str:
        """The device of a worker."""
        return next(
            device
            for host in self.hosts
            for name, device in zip(host.workers, host.devices, strict=True)
            if name == worker
        )

    def followers_of(self, worker: str) -> tuple[str, ...]:
        """The workers that compute the layers of a stage together with this one, which can hold
        the rank."""
        return next(host.members[worker] for host in self.hosts if worker in host.members)[1:]

    @property
    def num_ranks(self) -> int:
        return len(self.layers) + 1

    @property
    def layout(self) -> Layout:
        return Layout(len(self.layers), self.config.cluster.group_sizes, self.config.cluster.sync)

    @property
    def dtype(self) -> str:
        """Of the target, as torch calls it. It decides the text, so in every epoch it stays."""
        return self.dtype_of(self.target)

    def dtype_of(self, info: CheckpointInfo) -> str:
        """What one of the models computes in."""
        name = self.config.model.dtype
        if name == "auto":
            name = automatic(map(self.device_of, self.placement.workers_by_rank[1:]))
        return info.computes_in(name)

    def held(self, info: CheckpointInfo) -> str | None:
        """How the weights of one of the models are held, in every epoch; see CheckpointInfo."""
        model = self.config.model
        wanted = getattr(model, quantization_of(self.name_of(info)))
        return info.held(wanted, model.keep_quantized, self.dtype_of(info))

    def made_plain(self) -> Deployment:
        """The same with all weights of four bits made plain."""
        model = replace(self.config.model, keep_quantized="no")
        return replace(self, config=replace(self.config, model=model))

    def with_model(self, name: str, info: CheckpointInfo) -> Deployment:
        """With another checkpoint as the draft or the mid-size model."""
        return replace(self, draft=info) if name == "draft" else replace(self, mid=info)

    def name_of(self, info: CheckpointInfo) -> str:
        """What it is called in `model.`."""
        return next(name for name, each in self.models if each is info)

    @property
    def parallel(self) -> Parallel | None:
        """How the draft guesses several tokens per pass, if it does."""
        draft = self.draft
        if draft is None or draft.mask_token is None:
            return None
        tokens = draft.parallel_tokens
        if isinstance(self.config.source, DraftModel) and self.config.source.parallel is not None:
            tokens = self.config.source.parallel
        if tokens == 1:
            return None
        return Parallel(draft.mask_token, tokens, min(self.context, draft.context))

    @property
    def max_rows(self) -> int:
        """Rows of a batch at most."""
        return self.config.max_rows


def quantization_of(name: str) -> str:
    """The entry of `model.` that says how the weights of the model of that name are held."""
    return "quantization" if name == "target" else f"{name}_quantization"


@dataclass(frozen=True)
class ControllerAddress:
    """Which controller, which life of the cluster, and what its ranks know one another by."""

    url: str = field(repr=False)  # it holds a password
    namespace: str
    epoch: int = 0
    secret: str = field(default="", repr=False)


def decide(config: Config, placement: Placement | None = None) -> Deployment:
    """Look at the checkpoints and the machine.

    `placement` is what was planned from measured figures; without it devices count as equal.
    Raises ConfigError, in one sentence.
    """
    target = inspect(config.model.target)
    target.check_quantization("model.quantization", config.model.quantization)
    draft = None
    if config.source.needs_draft:
        assert config.model.draft is not None  # as Config checks
        draft = inspect(config.model.draft)
        draft.check_quantization("model.draft_quantization", config.model.draft_quantization)
        check_parallel(config.source, draft)
    mid = None
    if config.needs_mid:
        assert config.model.mid is not None  # as Config checks
        mid = inspect(config.model.mid)
        mid.check_quantization("model.mid_quantization", config.model.mid_quantization)
    if config.model.dtype not in ("auto", target.computes_in(config.model.dtype)):
        raise ConfigError(
            f"model.dtype is {config.model.dtype}, but {target.path} is quantised for "
            f"{target.dtype}; leave model.dtype out."
        )
    context = target.context
    if config.model.context is not None:
        if config.model.context > target.context:
            raise ConfigError(
                f"model.context is {config.model.context}, but the target was made for at most "
                f"{target.context} tokens; lower model.context."
            )
        context = config.model.context
    check_vocabulary(config.verify.sampling(fresh_seed=0), target.vocab_size)
    children = max(each.children for each in config.policies)
    if children > target.vocab_size:
        raise ConfigError(
            f"feed.children is {children}, but the target's vocabulary has "
            f"{target.vocab_size} tokens; lower feed.children."
        )
    if config.cluster.hosts is None:
        count = config.cluster.stages + config.cluster.spares
        groups = [config.cluster.draft_tensor_parallel, *[config.cluster.tensor_parallel] * count]
        devices = resolve_devices(config.cluster.devices, sum(groups))
        hosts: tuple[Host, ...] = (this_machine(devices, groups),)
        placement = place_here(tuple(hosts[0].members), target.num_layers, config.cluster)
    else:
        hosts_file = load_hosts(config.cluster.hosts)
        hosts_file.require_devices()
        hosts = hosts_file.hosts
        if config.cluster.stages != hosts_file.num_stages:
            raise ConfigError(
                f"cluster.stages is {config.cluster.stages}, but {config.cluster.hosts} has "
                f"workers for {hosts_file.num_stages} stages; leave cluster.stages out."
            )
        if config.cluster.split is not None:
            hosts_file = replace(hosts_file, split=tuple(config.cluster.split))
        if placement is None:
            placement = plan_slices(unmeasured(hosts_file, config, target, draft, mid, context))
    found = Deployment(config, target, draft, placement, placement.layers, (), context, hosts, mid)
    _check_groups(found)
    if config.model.keep_quantized == "yes":
        _require_kept(found)
    return replace(
        found,
        devices=tuple(map(found.device_of, found.workers)),
        sizes=tuple(1 + len(found.followers_of(worker)) for worker in found.workers),
    )


def _check_groups(deployment: Deployment) -> None:
    """Raise ConfigError or ModelError unless those that are to compute together can."""
    model = deployment.config.model
    head, *stages = deployment.workers
    for worker in (*stages, *deployment.spares):
        if followers := deployment.followers_of(worker):
            deployment.target.check_shared(1 + len(followers), model.quantization)
    if followers := deployment.followers_of(head):
        if deployment.draft is None:
            raise ConfigError(
                f"The head is {1 + len(followers)} devices, but its source asks no draft model; "
                "give it one device."
            )
        deployment.draft.check_shared(1 + len(followers), model.draft_quantization)


def _require_kept(deployment: Deployment) -> None:
    """Raise ConfigError unless weights stay in four bits."""
    packed = [info for _, info in deployment.models if any(each.weights for each in info.kept)]
    if not packed:
        raise ConfigError(
            f"model.keep_quantized is yes, but {deployment.target.path} has no weights that can "
            "stay in four bits; leave it out."
        )
    if all(deployment.held(info) != KEPT for info in packed):
        raise ConfigError(
            f"model.keep_quantized is yes, but weights of four bits are multiplied in {KEPT_DTYPE} "
            f"alone and model.dtype is {deployment.dtype_of(packed[0])}; set "
            f"model.dtype={KEPT_DTYPE}."
        )


def check_parallel(source: SourceSpec, draft: CheckpointInfo) -> None:
    """Raise ConfigError if the draft is to guess several tokens per pass and was not made to."""
    wanted = source.parallel if isinstance(source, DraftModel) else None
    if wanted is not None and wanted > 1 and draft.mask_token is None:
        raise ConfigError(
            f"source.parallel is {wanted}, but {draft.path} is no parallel draft (its config.json "
            "names no pard_token); leave source.parallel out, or make one with tools/train_pard.py."
        )


def require_quantizers(deployment: Deployment) -> None:
    """Raise ModelError unless this machine can load what its workers are to hold."""
    model = deployment.config.model
    if any(host.local for host in deployment.hosts):
        for kind, info in deployment.models:
            name = quantization_of(kind)
            info.require_quantizer(f"model.{name}", getattr(model, name))


def require_backend(deployment: Deployment) -> None:
    """Raise ConfigError if NCCL is asked for and a stage has no CUDA device of its own, or they are
    in several hosts."""
    if deployment.config.transport.backend != NCCL:
        return
    stages = [
        (worker.rpartition("/")[0], "cuda:0" if device == "cuda" else device)
        for worker, device in zip(deployment.workers[1:], deployment.devices[1:], strict=True)
    ]
    devices = [device for _, device in stages]
    if "cpu" in devices or len(set(stages)) < len(stages):
        raise ConfigError(
            "transport.backend is nccl, but NCCL needs a CUDA device of its own for every stage, "
            f"and the stages are on {', '.join(devices)}; use auto or gloo."
        )
    if len(names := sorted({host for host, _ in stages})) > 1:
        raise ConfigError(
            "transport.backend is nccl, but NCCL is for the devices of one host, and the stages "
            f"are on {', '.join(names)}; use auto or gloo."
        )


def place_here(workers: Sequence[str], num_layers: int, cluster: ClusterConfig) -> Placement:
    """The layout of a cluster on this machine, whose workers are equals. Raises ConfigError."""
    stages = cluster.stages
    split = tuple(cluster.split or map(len, split_evenly(num_layers, stages)))
    return plan_slices(
        Problem(
            tuple(map(Worker, workers)),
            Needs((0,) * num_layers),
            draft=workers[0],
            split=split,
            spares=tuple(workers[stages + 1 :]),
        )
    )


def resolve_devices(names: list[str], num_ranks: int) -> tuple[str, ...]:
    """One device per rank. "auto" and "cuda" go round the CUDA devices; "auto" is CPU without."""
    count = num_cuda() if set(names) != {"cpu"} else 0
    names = names * num_ranks if len(names) == 1 else names
    devices = []
    for rank, name in enumerate(names):
        if name == "auto":
            name = "cuda" if count else "cpu"
        kind, _, index = name.partition(":")
        if kind == "cuda" and (not count or int(index or 0) >= count):
            raise ConfigError(
                f"cluster.devices asks for {name} at rank {rank}, but this machine has {count} "
                "CUDA devices; see `pipespec check`."
            )
        # The head's draft shares a device only when there are fewer devices than ranks.
        devices.append(name if index or kind == "cpu" else f"cuda:{(rank - 1) % count}")
    return tuple(devices)


def fit_context(deployment: Deployment, prompt_length: int, requests: int) -> Deployment:
    """The deployment with KV pools for so many requests at once and no longer context than they
    can reach."""
    config = deployment.config
    reach = prompt_length + config.decode.max_new_tokens
    most = min(config.scheduler.max_num_seqs, requests)
    config = replace(config, scheduler=replace(config.scheduler, max_num_seqs=most))
    return replace(deployment, config=config, context=min(deployment.context, reach))
