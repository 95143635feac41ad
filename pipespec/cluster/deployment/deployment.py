"""The plan of a cluster: which checkpoints, devices and layers the ranks have."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from pipespec.cluster.deployment.rank_assignment import RankAssignment
from pipespec.config.hosts import Host
from pipespec.config.schema import KEPT_STATES, Config
from pipespec.engine.checkpoint.parts.folder import Repository
from pipespec.engine.formats.draft_heads import DraftHead
from pipespec.engine.inspection.inspection import CheckpointInfo
from pipespec.errors import ConfigError
from pipespec.head.proposers.parallel import ParallelDraft
from pipespec.placement.slices import Placement, remaining
from pipespec.system.network_interfaces import source_address


def quantization_of(name: str) -> str:
    """The entry of `model.` that says how the weights of the model of that name are held."""
    return "quantization" if name == "target" else "draft_quantization"


@dataclass(frozen=True)
class Deployment:
    """The plan of a cluster, made before any rank starts, which is sent to the ranks as a pickle.
    `draft` is None where the proposer needs none. `placement` maps the workers of the `hosts` to
    the ranks of the first epoch. `layers` has one entry per stage, `devices` and `sizes` (how many
    workers compute it) one per rank; in a later epoch they may be others. `context` is the longest
    sequence in tokens that the KV pools are made for. `shared`: what hosts call the models that
    they can get from the hub or from one another; `fetched`: the hosts have the weights that they
    compute in the first epoch. `open_to` is the address of this machine at which hosts may join
    while the cluster runs; None: none may. `joined` are those of the `hosts` that have.
    `stage_devices` are those of the first layout, which decided the dtypes; none: this is the first
    layout."""

    config: Config
    target: CheckpointInfo
    draft: CheckpointInfo | None
    placement: Placement
    layers: tuple[range, ...]
    devices: tuple[str, ...]
    context: int
    hosts: tuple[Host, ...]
    sizes: tuple[int, ...] = ()
    shared: Mapping[str, Repository] = field(default_factory=dict)
    fetched: bool = False
    open_to: str | None = None
    joined: tuple[Host, ...] = ()
    stage_devices: tuple[str, ...] = ()

    @property
    def models(self) -> list[tuple[str, CheckpointInfo]]:
        """All checkpoints, by their names in `model.`, the target's first."""
        named = {"target": self.target, "draft": self.draft}
        return [(name, info) for name, info in named.items() if info is not None]

    @property
    def workers(self) -> tuple[str, ...]:
        """The worker of each rank in the first epoch, the head's first."""
        return self.placement.workers_by_rank

    @property
    def spares(self) -> tuple[str, ...]:
        return self.placement.spares

    @property
    def local_workers(self) -> set[str]:
        """All workers of this machine."""
        return {worker for host in self.hosts if host.local for worker in host.workers}

    def host_of(self, worker: str) -> Host:
        return next(host for host in self.hosts if worker in host.workers)

    def device_of(self, worker: str) -> str:
        host = self.host_of(worker)
        return host.devices[host.workers.index(worker)]

    def followers_of(self, worker: str) -> tuple[str, ...]:
        """The workers that compute a rank with this one, which can hold it."""
        return self.host_of(worker).members[worker][1:]

    @property
    def num_ranks(self) -> int:
        return len(self.layers) + 1

    @property
    def dtype(self) -> str:
        """The target's dtype, as torch names it: the same in all epochs, as it affects the text."""
        return self.dtype_of(self.target)

    def dtype_of(self, info: CheckpointInfo) -> str:
        stages = map(self.device_of, self.placement.workers_by_rank[1:])
        return info.chosen_dtype(self.config.model.dtype, self.stage_devices or stages)

    def weight_format(self, info: CheckpointInfo) -> str | None:
        """How the weights of one of the models are held, in every epoch; see CheckpointInfo."""
        model = self.config.model
        wanted = getattr(model, quantization_of(self.name_of(info)))
        return info.weight_format(wanted, model.keep_quantized, self.dtype_of(info))

    def laid_out(self, placement: Placement) -> Deployment:
        workers = placement.workers_by_rank
        return replace(
            self,
            placement=placement,
            layers=placement.layers,
            devices=tuple(map(self.device_of, workers)),
            sizes=tuple(1 + len(self.followers_of(worker)) for worker in workers),
        )

    def without(self, lost: set[str]) -> Placement:
        """The layout over the workers that are left. Raises ConfigError if they are too few."""
        # The members of a group cannot compute without one another.
        unusable = {
            worker
            for worker in (*self.workers, *self.spares)
            if lost & {worker, *self.followers_of(worker)}
        }
        return remaining(self.placement, unusable)

    def assignment(self, placement: Placement | None = None) -> RankAssignment:
        """The assignment of a layout; None: that of the first epoch."""
        placement = placement or self.placement
        workers = placement.workers_by_rank
        followers = tuple(map(self.followers_of, workers))
        return RankAssignment(workers, placement.layers, followers, self.joined)

    def knowing(self, joined: Sequence[Host]) -> Deployment:
        """The same with hosts that have joined in place of all that had before."""
        first = [host for host in self.hosts if host not in self.joined]
        stages = map(self.device_of, self.placement.workers_by_rank[1:])
        return replace(
            self,
            hosts=(*first, *joined),
            joined=tuple(joined),
            stage_devices=self.stage_devices or tuple(stages),
        )

    @property
    def head(self) -> DraftHead | None:
        """What proposes tokens from hidden states of the target; None: nothing does."""
        return None if self.draft is None else self.draft.head

    @property
    def features(self) -> int:
        """Columns of what the last stage returns of a row for the draft head; 0: there is none."""
        return 0 if self.head is None else self.target.hidden_size * max(len(self.head.taps), 1)

    def name_of(self, info: CheckpointInfo) -> str:
        return next(name for name, each in self.models if each is info)

    @property
    def longest(self) -> int:
        """The longest sequence that is allowed, in tokens; pools may have room for `context`."""
        return self.config.model.context or self.target.context

    @property
    def scaled_for(self) -> int | None:
        """The same if the target's frequencies are not the original ones because of it."""
        unscaled = self.target.unscaled
        return None if unscaled is None or self.longest <= unscaled else self.longest

    @property
    def parallel(self) -> ParallelDraft | None:
        """How the draft proposes several tokens per pass; None: it proposes one."""
        draft = self.draft
        if draft is None or draft.mask_token is None:
            return None
        if draft.parallel_tokens == 1:
            return None
        context = min(self.context, draft.context)
        return ParallelDraft(draft.mask_token, draft.parallel_tokens, context)

    @property
    def max_retained(self) -> int:
        """Of how many requests that have ended the text may stay in KV; 0: of none. With running
        states, each of these texts needs one that is kept."""
        scheduler = self.config.scheduler
        if self.target.recurrent is None:
            return scheduler.max_retained
        return min(scheduler.max_retained, self.kept_states)

    @property
    def kept_states(self) -> int:
        """How many running states every stage keeps of texts; 0: none."""
        return self.kept_states_of(self.target, max(self.sizes[1:]))

    def kept_states_of(self, info: CheckpointInfo, members: int) -> int:
        """The same of a model on so many devices; several keep none."""
        scheduler = self.config.scheduler
        if info.recurrent is None or not scheduler.prefix_cache or members > 1:
            return 0
        return KEPT_STATES


@dataclass(frozen=True)
class ControllerAddress:
    """The controller of a cluster, an epoch, and the secret with which its ranks authenticate.
    `local_url` is the shorter way of workers on the launcher's host, past TLS."""

    url: str = field(repr=False)  # it holds a password, as the other one
    namespace: str
    epoch: int = 0
    secret: str = field(default="", repr=False)
    local_url: str = field(default="", repr=False)


def fit_context(deployment: Deployment, prompt_length: int, requests: int) -> Deployment:
    """The deployment with KV pools for so many requests, as long as they can become."""
    config = deployment.config
    reach = prompt_length + config.decode.max_new_tokens
    most = min(config.scheduler.max_num_seqs, requests)
    config = replace(config, scheduler=replace(config.scheduler, max_num_seqs=most))
    return replace(deployment, config=config, context=min(deployment.context, reach))


def own_address(hosts: Sequence[Host]) -> str | None:
    """This machine's address towards the other hosts, if there are any. Raises ConfigError."""
    far = next((host.address for host in hosts if not host.local), None)
    if far is None:
        return None
    try:
        with suppress(OSError):
            return source_address(far, socket.AF_INET)
        return source_address(far)  # the host has addresses of IPv6 alone
    except OSError as error:
        raise ConfigError(
            f"This machine has no route to {far} ({error.strerror}); correct the address."
        ) from error
