"""How many ranks there are, and where they run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipespec.errors import ConfigError
from pipespec.limits import A_DEVICE, DEVICE, MAX_SECONDS, MAX_STAGES, check_whole
from pipespec.settings import check_settings, setting

AUTO = "auto"
MAX_THREADS = 4096
SYNCS = ("lockstep", "free")


@dataclass(frozen=True)
class ClusterConfig:
    """How many stages there are, where they run, and how long a lost host is waited for."""

    stages: int = setting(
        4,
        "Pipeline stages into which the target's layers are divided; the head is one rank more.",
        "stages",
        limits=(1, MAX_STAGES),
    )
    groups: Any = setting(
        None,
        "Consecutive stages that form one step of the pipeline (PipeDec's groups, §4.1): their "
        "sizes, as in [2,2], or one size for all; null makes every stage a step.",
        "stages",
        kind=int | list[int] | None,
        experimental=True,
    )
    sync: str = setting(
        "lockstep",
        "lockstep sends a batch when the verdict of its step is known; free does not wait for it.",
        choices=SYNCS,
        experimental=True,
    )
    devices: list[str] = setting(
        ["auto"],
        "One device for all ranks, or one for each rank with the head's first: auto, cpu, cuda or "
        "cuda:N.",
    )
    hosts: str | None = setting(
        None, "Hosts file of a cluster of several hosts; cluster=FILE.yaml sets it as well."
    )
    tensor_parallel: int = setting(
        1,
        "Devices that compute the layers of each stage together.",
        "devices",
        limits=(1, MAX_STAGES),
    )
    draft_tensor_parallel: int = setting(
        1, "Devices that compute the draft model together.", "devices", limits=(1, MAX_STAGES)
    )
    threads: Any = setting(
        AUTO,
        "Threads of each rank that computes on a CPU; auto divides the cores of a host among its "
        "stages, and leaves the head some of its own where each stage has two, unless "
        "OMP_NUM_THREADS is set.",
        "threads",
        kind=int | str,
        experimental=True,
    )
    spares: int = setting(
        0,
        "More worker processes on this host, each of which can replace one that is lost.",
        "workers",
        limits=(0, MAX_STAGES),
        experimental=True,
    )
    patience_s: float = setting(
        30.0,
        "How long the cluster waits for a lost host before it goes on without it, and for your "
        "Redis before it ends.",
        "s",
        limits=(0, MAX_SECONDS),
        above=True,
        experimental=True,
    )

    def __post_init__(self) -> None:
        check_settings("cluster", self)
        if self.threads != AUTO:
            check_whole("cluster.threads", self.threads, 1, MAX_THREADS, f", or {AUTO}")
        for name in ("tensor_parallel", "draft_tensor_parallel"):
            size = getattr(self, name)
            if size > 1 and self.hosts is not None:
                raise ConfigError(
                    f"cluster.{name} is {size}, but a hosts file says itself what computes "
                    "together, as in `devices: [[cuda:0, cuda:1], cuda:2]`; leave one of them out."
                )
        for name, default in (("devices", ["auto"]), ("spares", 0)):
            if self.hosts is not None and getattr(self, name) != default:
                raise ConfigError(
                    f"cluster.{name} is {getattr(self, name)}, but a hosts file has {name} of its "
                    "own; write it there and leave this out."
                )
        sizes = self.group_sizes
        if sizes is not None and (min(sizes, default=0) < 1 or sum(sizes) != self.stages):
            raise ConfigError(
                f"cluster.groups is {self.groups}, but must be positive sizes that add up to "
                f"cluster.stages={self.stages}, or one size that divides it."
            )
        for device in self.devices:
            if not DEVICE.fullmatch(device):
                raise ConfigError(f"cluster.devices holds {device!r}, but {A_DEVICE}.")
        workers = self.draft_tensor_parallel + self.stages * self.tensor_parallel
        if len(self.devices) not in (1, workers):
            each = ""
            if workers > 1 + self.stages:
                each = f", of {self.draft_tensor_parallel} and {self.tensor_parallel} devices each"
            raise ConfigError(
                f"cluster.devices names {len(self.devices)} devices, but must name 1 (for every "
                f"rank) or {workers} (the head, then {self.stages} stages{each})."
            )

    @property
    def group_sizes(self) -> tuple[int, ...] | None:
        """How many stages each group has, in order; None: no groups."""
        if isinstance(self.groups, int):
            return (self.groups,) * (self.stages // max(self.groups, 1))
        return None if self.groups is None else tuple(self.groups)
