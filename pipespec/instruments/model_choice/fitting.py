"""Whether a cluster of some settings fits the memory of its hosts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipespec.cluster import memory
from pipespec.cluster.deployment import Deployment, decide
from pipespec.config.compose import compose
from pipespec.config.hosts import LOCAL, HostsFile, load_hosts
from pipespec.engine.checkpoint.quantization import KEPT_FORMATS
from pipespec.errors import ConfigError
from pipespec.instruments.model_choice.host_memory import Memory
from pipespec.placement.measurements import RUNTIME_BYTES, unmeasured
from pipespec.placement.slices import plan_slices

# Of the free memory, what a cluster may use: other programs go on.
USABLE_SHARE = 0.9


@dataclass(frozen=True)
class Fit:
    """A deployment and the memory that it needs.

    Attributes:
        settings: that make it, beside those that were given.
        missing_bytes: how many bytes more the fullest device would need; 0: it fits.
        where: that device, in words.
    """

    deployment: Deployment
    settings: tuple[str, ...]
    missing_bytes: int
    where: str

    @property
    def stage_bytes(self) -> int:
        """The weights of the largest stage."""
        found = self.deployment
        return max(
            memory.held_bytes(found, found.target, layers, members)
            for layers, members in zip(found.layers, found.sizes[1:], strict=True)
        )

    @property
    def draft_bytes(self) -> int:
        """The weights of the draft; 0: there is none."""
        draft = self.deployment.draft
        if draft is None:
            return 0
        return memory.held_bytes(self.deployment, draft, range(draft.num_layers))

    @property
    def weight_bytes(self) -> int:
        """The weights of the target."""
        target = self.deployment.target
        return memory.held_bytes(self.deployment, target, range(target.num_layers))

    @property
    def weight_format(self) -> str:
        """How the weights of the target's layers are held, in words."""
        found = self.deployment
        held = found.weight_format(found.target)
        return found.dtype if held is None else KEPT_FORMATS.get(held, held)

    @property
    def kv_bytes(self) -> int:
        """K and V of one sequence of the longest length, in all stages."""
        found = self.deployment
        return sum(
            found.context * memory.slot_bytes(found, found.target, rank)
            for rank in range(1, found.num_ranks)
        )


def fit(given: Sequence[str], settings: tuple[str, ...], usable: Memory) -> Fit:
    """The deployment that settings make, with other numbers of layers for its stages
    (`cluster.split`) where even ones do not fit and those do.

    Raises ConfigError if the settings make none, whatever the memory.
    """
    deployment = decide(compose([*given, *settings]), ask_hosts=False)
    found = _measured(deployment, settings, usable)
    if found.missing_bytes and deployment.config.cluster.split is None:
        split = _split(deployment, usable)
        if split is not None:
            setting = f"cluster.split=[{','.join(map(str, split))}]"
            other = decide(compose([*given, *settings, setting]), ask_hosts=False)
            found = min(
                found,
                _measured(other, (*settings, setting), usable),
                key=lambda each: each.missing_bytes,
            )
    return found


def usable_bytes(free: int) -> int:
    """Of so many free bytes, those that a cluster may use."""
    return int(free * USABLE_SHARE)


def _measured(deployment: Deployment, settings: tuple[str, ...], usable: Memory) -> Fit:
    lacking = {
        place: needed - usable_bytes(usable[place[0]][place[1]])
        for place, needed in _needed(deployment).items()
    }
    host, device = max(lacking, key=lambda place: lacking[place])
    where = device if host == LOCAL else f"{device} of {host}"
    return Fit(deployment, settings, max(lacking[host, device], 0), where)


def _needed(deployment: Deployment) -> Counter[tuple[str, str]]:
    """Bytes by host and device."""
    found: Counter[tuple[str, str]] = Counter()
    host_of = {worker: host.name for host in deployment.hosts for worker in host.workers}
    for rank, worker in enumerate(deployment.workers):
        for member in (worker, *deployment.followers_of(worker)):
            place = host_of[member], deployment.device_of(member)
            found[place] += memory.resident_bytes(deployment, rank) + RUNTIME_BYTES
    if deployment.mid is not None:
        place = host_of[deployment.workers[0]], deployment.mid_device
        found[place] += memory.resident_bytes(deployment, 0, mid=True)
    return found


def _split(deployment: Deployment, usable: Memory) -> tuple[int, ...] | None:
    """Layers of each stage, so that as many as possible take no longer than the others within
    memory; None: there is no such division."""
    config = deployment.config
    if config.cluster.hosts is not None:
        hosts_file = load_hosts(config.cluster.hosts)
    else:
        hosts_file = HostsFile(LOCAL, deployment.hosts, spares=config.cluster.spares)
    hosts_file = replace(hosts_file, draft=deployment.workers[0])
    target, draft, mid = deployment.target, deployment.draft, deployment.mid
    problem = unmeasured(hosts_file, config, target, draft, mid, deployment.context)
    stages: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for worker in deployment.workers[1:]:
        place = hosts_file.host_of(worker).name, hosts_file.device_of(worker)
        stages[place].append(worker)
    head = deployment.workers[0]
    head_place = hosts_file.host_of(head).name, hosts_file.device_of(head)
    room = {head: float(problem.needs.head_rank_bytes)}
    for place, workers in stages.items():
        left = usable_bytes(usable[place[0]][place[1]])
        left -= problem.needs.head_rank_bytes if place == head_place else 0
        for worker in workers:
            room[worker] = left / len(workers) * len(hosts_file.members_of(worker))
    known = [
        replace(each, memory_bytes=room.get(each.name, each.memory_bytes))
        for each in problem.workers
    ]
    try:
        placement = plan_slices(replace(problem, workers=tuple(known)))
    except ConfigError:
        return None
    return tuple(map(len, placement.layers))
