"""`hosts.yaml`: the hosts of a cluster, and how each is reached. docs/several-hosts.md lists every
entry, and what a missing one means.

A *host* is a machine. A *worker* is one process of a host that computes: one per device of the
host, called "host/0", "host/1", ... Devices in brackets of their own, as in `[[cuda:0, cuda:1],
cuda:2]`, compute the layers of a stage together; the first worker of such a *group* can hold a
rank, and so can every worker that is in none. A *spare* is one that can and has no rank until it is
needed.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass
from io import StringIO
from itertools import accumulate
from pathlib import Path
from typing import Any

from pipespec.config import entries
from pipespec.config.entries import Wrong, entry
from pipespec.errors import ConfigError
from pipespec.limits import MAX_COUNT, MAX_STAGES, suggest
from pipespec.system.network_interfaces import LOOPBACK
from pipespec.system.validation import Unreadable, read_text, reason, shown

LOCAL = "local"
PYTHON = "python3"  # on a host
BY_HAND = "none"
# Before the name of the connection that a host has made which has joined a running cluster.
JOINED = "joined:"
MOST_BYTES = 2**20  # of a hosts file


@dataclass(frozen=True)
class Host:
    """A machine. `target`, `draft`: where the models lie there, if not where the run says.
    `memory_gib` is what each of its devices may use, None: all that is free. `groups` are the sizes
    of its groups of devices, in order, 1 for a device by itself; nothing: all are."""

    name: str = entry(entries.host_name, MISSING)
    address: str = entry(entries.argument, MISSING)
    ssh: str | None = entry(entries.argument)
    user: str | None = entry(entries.argument)
    port: int = entry(entries.port, 22)
    identity: str | None = entry(entries.path)
    interface: str | None = entry(entries.argument)
    devices: tuple[str, ...] = entry(entries.devices, ("auto",))
    python: str = entry(entries.path, PYTHON)
    env: Mapping[str, str] = entry(entries.env, {})
    target: str | None = entry(entries.path)
    draft: str | None = entry(entries.path)
    memory_gib: float | None = entry(entries.gib)
    groups: tuple[int, ...] = ()

    @property
    def local(self) -> bool:
        """Whether it is this machine, to be used without SSH."""
        return self.ssh == LOCAL

    @property
    def shares_caches(self) -> bool:
        """Whether it is this machine, with the folders of this process."""
        return self.local and not self.env

    @property
    def by_hand(self) -> bool:
        """Whether its workers are started by others (`launch/torchrun.sh`)."""
        return self.ssh == BY_HAND

    @property
    def has_joined(self) -> bool:
        """Whether it has joined a running cluster (`pipespec.cluster.host_link`)."""
        return self.ssh is not None and self.ssh.startswith(JOINED)

    @property
    def workers(self) -> tuple[str, ...]:
        return tuple(f"{self.name}/{index}" for index in range(len(self.devices)))

    @property
    def members(self) -> dict[str, tuple[str, ...]]:
        """The workers that can hold a rank, each with all that compute it, itself first."""
        sizes = self.groups or (1,) * len(self.devices)
        ends = list(accumulate(sizes))
        found = [self.workers[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        return {group[0]: group for group in found}


@dataclass(frozen=True)
class HostsFile:
    """All hosts, as the file lists them, and what it says about their parts; None where the planner
    is to choose. Without one, the first worker is the head, and hosts have the file's order."""

    name: str
    hosts: tuple[Host, ...]
    draft: str | None = None
    order: tuple[str, ...] | None = None
    split: tuple[int, ...] | None = None
    spares: int = 0

    @property
    def workers(self) -> tuple[str, ...]:
        """Every worker that can hold a rank, host after host in `order`, or in the file's."""
        hosts = self.hosts if self.order is None else map(self.host, self.order)
        return tuple(worker for host in hosts for worker in host.members)

    @property
    def heads(self) -> tuple[str, ...]:
        """The workers that can be the head, in the same order: the one that is named, or all of no
        group."""
        if self.draft is not None:
            return (self.draft,)
        return tuple(worker for worker in self.workers if len(self.members_of(worker)) == 1)

    @property
    def spare_workers(self) -> tuple[str, ...]:
        """The workers that hold no layers until one is needed: the last that are not the head."""
        stages = [worker for worker in self.workers if worker != self.draft]
        return tuple(stages[len(stages) - self.spares :])

    @property
    def num_stages(self) -> int:
        """How many workers hold layers: all but the head and the spares."""
        return len(self.workers) - 1 - self.spares

    @property
    def by_hand(self) -> tuple[str, ...]:
        return tuple(host.name for host in self.hosts if host.by_hand)

    def host(self, name: str) -> Host:
        return next(host for host in self.hosts if host.name == name)

    def host_of(self, worker: str) -> Host:
        return self.host(worker.rpartition("/")[0])

    def require_devices(self) -> None:
        for host in self.hosts:
            if "auto" in host.devices:
                raise ConfigError(
                    f"Host {host.name} has the device auto; name its devices, such as [cpu] or "
                    "[cuda:0, cuda:1]."
                )

    def members_of(self, worker: str) -> tuple[str, ...]:
        """All that compute the rank of a worker that can hold one, itself first."""
        return self.host_of(worker).members[worker]

    def device_of(self, worker: str) -> str:
        return self.host_of(worker).devices[int(worker.rpartition("/")[2])]


def own_name() -> str:
    """What this machine is called where no file and no option names it: its host name."""
    return re.sub(r"[^\w.-]", "_", socket.gethostname().partition(".")[0], flags=re.ASCII) or "host"


def this_machine(devices: Sequence[str], groups: Sequence[int] = ()) -> Host:
    return Host(own_name(), LOOPBACK, LOCAL, devices=tuple(devices), groups=tuple(groups))


def load_hosts(path: str | Path) -> HostsFile:
    """Read and check a hosts file. Raises ConfigError: one sentence, with the file's name."""
    path = Path(path)
    try:
        return _hosts(_read(path), path.stem)
    except Wrong as error:
        raise ConfigError(f"{path}: {error}") from error


def _read(path: Path) -> Any:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError  # type: ignore[import-untyped]

    try:
        # Refuses a key that occurs twice, which plain YAML readers let pass.
        loaded = OmegaConf.load(StringIO(read_text(path, most=MOST_BYTES)))
        return OmegaConf.to_container(loaded, resolve=False)
    except (Unreadable, YAMLError, OmegaConfBaseException, RecursionError) as error:
        raise Wrong(f"it cannot be read: {reason(error, named=False)}.") from error
    except (OSError, ValueError) as error:  # OmegaConf's of a text, and YAML's of numbers
        raise Wrong("it must be a list of settings.") from error


HOST = entries.kinds(Host)
DEFAULTS = {key: kind for key, kind in HOST.items() if key not in ("name", "address")}
FILE: dict[str, entries.Kind] = {
    "name": entries.host_name,
    "defaults": entries.anything,
    "hosts": entries.anything,
    "draft": entries.anything,
    "order": entries.list_of(entries.anything),
    "split": entries.list_of(entries.number(1, MAX_COUNT)),
    "spares": entries.number(0, MAX_STAGES),
}


def _hosts(values: Any, stem: str) -> HostsFile:
    given = entries.read("the file", values, FILE)
    defaults = entries.read("defaults", given.pop("defaults", {}), DEFAULTS, "defaults.")
    if not given.get("hosts"):
        raise Wrong("it has no hosts; list at least one under `hosts:`, with its address.")
    listed = entries.list_of(entries.anything)("hosts", given.pop("hosts"))
    hosts = tuple(_host(f"hosts[{index}]", each, defaults) for index, each in enumerate(listed))
    names = [host.name for host in hosts]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise Wrong(f"two hosts are called {twice!r}; give each another name.")
    _refuse_one_machine_twice(hosts)
    if "name" not in given:
        given["name"] = entries.host_name("name", re.sub(r"[^A-Za-z0-9_.:-]", "_", stem))
    _check_draft(given.get("draft"), hosts)
    if "order" in given:
        _check_order(given["order"], names)
    given.update({key: tuple(given[key]) for key in ("order", "split") if key in given})
    hosts_file = HostsFile(hosts=hosts, **given)
    num_workers = len(hosts_file.workers)
    if not hosts_file.heads:
        raise Wrong(
            "all its devices are in groups, and it names no head; say with `draft` which group "
            "computes the draft, as in `draft: alpha/0`, or leave a device by itself."
        )
    if num_workers < 2:
        raise Wrong(
            f"its devices make {num_workers} worker, but a cluster needs 2 or more, the head and "
            "a stage; name another device (cpu may be named several times)."
        )
    if hosts_file.num_stages < 1:
        raise Wrong(
            f"spares is {hosts_file.spares}, but of {num_workers} workers the head and one stage "
            f"are needed; use at most {num_workers - 2}."
        )
    return hosts_file


def _refuse_one_machine_twice(hosts: Sequence[Host]) -> None:
    """Raise Wrong if two hosts are reached as one; workers that others start may share theirs."""
    found: dict[tuple[object, ...], str] = {}
    for host in hosts:
        way = (host.address, host.ssh or host.address, host.user, host.port)
        if not host.by_hand and found.setdefault(way, host.name) != host.name:
            raise Wrong(
                f"{found[way]!r} and {host.name!r} are one machine (address {host.address!r}); "
                "list its devices under one of them, or correct an address."
            )


def _host(where: str, values: Any, defaults: Mapping[str, Any]) -> Host:
    own = entries.read(where, values, HOST, f"{where}.")
    if "address" not in own:
        raise Wrong(f"{where} has no address; say where the other hosts reach it.")
    if "name" not in own:
        own["name"] = entries.host_name(f"{where}.address", own["address"])
    merged = {**defaults, **own, "env": {**defaults.get("env", {}), **own.get("env", {})}}
    groups = merged.pop("devices", (("auto",),))
    sizes = tuple(map(len, groups))
    devices = tuple(device for group in groups for device in group)
    return Host(**merged, devices=devices, groups=sizes if max(sizes) > 1 else ())


def _check_draft(value: Any, hosts: Sequence[Host]) -> None:
    groups = [group for host in hosts for group in host.members.values()]
    workers = [worker for group in groups for worker in group]
    if value is not None and value not in workers:
        raise Wrong(
            f"draft is {shown(value)}, which is no worker; {suggest(shown(value), workers)}."
        )
    for group in groups:
        if value in group[1:]:
            raise Wrong(
                f"draft is {shown(value)}, which computes with others; name the first of them, "
                f"{group[0]}."
            )


def _check_order(order: Any, names: Sequence[str]) -> None:
    for name in order:
        if name not in names:
            raise Wrong(
                f"order holds {shown(name)}, which is no host; {suggest(shown(name), names)}."
            )
    if len(order) != len(names) or set(order) != set(names):
        raise Wrong(f"order is {shown(order)}, but must name each of {', '.join(names)} once.")
