"""`hosts.yaml`: the hosts of a cluster, and how each is reached.

A *host* is a machine. A *worker* is one process of a host that computes: one per device of the
host, called "host/0", "host/1", ... Devices in brackets of their own, as in `[[cuda:0, cuda:1],
cuda:2]`, compute the layers of a stage together; the first worker of such a *group* can hold a
rank, and so can every worker that is in none. A *spare* is one that can and has no rank until it is
needed.

    name: lab                      # the file's stem
    defaults: {user: ubuntu, port: 22}   # for every host that does not say otherwise
    hosts:
      - name: alpha                # the address
        address: 10.0.0.1          # where the other hosts reach it, and SSH if `ssh` is not given
        ssh: alpha.lan             # another SSH destination; `local` is this machine, without SSH;
                                   # `none`: its workers are started by hand
        user: me
        port: 22
        identity: ~/.ssh/key
        interface: eth0            # what carries batches: the interface that has the address
        devices: [cuda:0, cuda:1]
        python: python3
        env: {OMP_NUM_THREADS: 8}
        target: /models/llama      # where the models lie on this host: as model.target, model.draft
        draft: /models/small       # and model.mid: mid
        memory_gib: 22             # what each of its devices may use: all that is free
    draft: alpha/0                 # the worker that is the head: the planner chooses
    order: [beta, alpha]           # of the hosts along the pipeline: the planner chooses
    split: [12, 10, 10]            # layers per stage: the planner chooses
    spares: 0                      # so many workers, the last ones, hold no layers at first

Only `hosts` with `address` and `devices` of each are needed (`doctor` does without devices);
after # stands what a missing one means.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import accumulate
from pathlib import Path
from typing import Any

from pipespec.config import entries
from pipespec.config.entries import Wrong
from pipespec.errors import ConfigError
from pipespec.limits import MAX_COUNT, MAX_STAGES, suggest
from pipespec.system.interfaces import LOOPBACK
from pipespec.system.reading import Unreadable, read_text, shown

LOCAL = "local"
BY_HAND = "none"


@dataclass(frozen=True)
class Host:
    """A machine. `target`, `draft`, `mid`: where the models lie there, if not where the run says.

    `memory_gib` is what each of its devices may use, None: all that is free. `groups` are the sizes
    of its groups of devices, in order, 1 for a device by itself; nothing: all are.
    """

    name: str
    address: str
    ssh: str | None
    user: str | None
    port: int
    identity: str | None
    interface: str | None
    devices: tuple[str, ...]
    python: str
    env: Mapping[str, str]
    target: str | None
    draft: str | None
    memory_gib: float | None
    mid: str | None = None
    groups: tuple[int, ...] = ()

    @property
    def local(self) -> bool:
        """Whether it is this machine, to be used without SSH."""
        return self.ssh == LOCAL

    @property
    def by_hand(self) -> bool:
        """Whether its workers are started by others (`launch/torchrun.sh`)."""
        return self.ssh == BY_HAND

    @property
    def workers(self) -> tuple[str, ...]:
        """The names of its workers, one per device."""
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
    """All hosts, as the file lists them, and what it says about their parts.

    None where the planner is to choose. Without planner: the first worker is the head, and the
    hosts stand in the file's order.
    """

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

    def host(self, name: str) -> Host:
        """The host of that name."""
        return next(host for host in self.hosts if host.name == name)

    def host_of(self, worker: str) -> Host:
        """The host of a worker."""
        return self.host(worker.rpartition("/")[0])

    def require_devices(self) -> None:
        """Raise ConfigError unless every worker has a particular device."""
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
        """The device of a worker."""
        return self.host_of(worker).devices[int(worker.rpartition("/")[2])]


def this_machine(devices: Sequence[str], groups: Sequence[int] = ()) -> Host:
    """The only host of a cluster that needs no hosts file."""
    return Host(
        name=LOCAL,
        address=LOOPBACK,
        ssh=LOCAL,
        user=None,
        port=22,
        identity=None,
        interface=None,
        devices=tuple(devices),
        python="python3",
        env={},
        target=None,
        draft=None,
        memory_gib=None,
        groups=tuple(groups),
    )


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
        # Refuses a key that stands twice, which plain YAML readers let pass.
        return OmegaConf.to_container(OmegaConf.load(StringIO(read_text(path))), resolve=False)
    except Unreadable as error:
        raise Wrong(f"it cannot be read: {error}.") from error
    except RecursionError as error:
        raise Wrong("it is nested too deeply.") from error
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or "it cannot be read"
        raise Wrong(f"it is not YAML{where}: {' '.join(problem.split())}.") from error
    except OmegaConfBaseException as error:
        first = str(error).splitlines()[0].rstrip(".")
        raise Wrong(f"it cannot be read: {first}.") from error
    except (OSError, ValueError) as error:  # OmegaConf's word for a text, and YAML's for numbers
        raise Wrong("it must be a list of settings.") from error


# --- the file ---------------------------------------------------------------------------------

HOST: dict[str, entries.Kind] = {
    "name": entries.host_name,
    "address": entries.argument,
    "ssh": entries.argument,
    "user": entries.argument,
    "port": entries.port,
    "identity": entries.path,
    "interface": entries.argument,
    "devices": entries.devices,
    "python": entries.path,
    "env": entries.env,
    "target": entries.path,
    "draft": entries.path,
    "mid": entries.path,
    "memory_gib": entries.gib,
}
DEFAULTS = {key: kind for key, kind in HOST.items() if key not in ("name", "address")}
STANDARD = {"port": 22, "devices": (("auto",),), "python": "python3"}
FILE = ("name", "defaults", "hosts", "draft", "order", "split", "spares")


def _hosts(values: Any, stem: str) -> HostsFile:
    given = entries.known("the file", values, FILE)
    defaults = _checked("defaults", given.get("defaults", {}), DEFAULTS)
    if not given.get("hosts"):
        raise Wrong("it has no hosts; list at least one under `hosts:`, with its address.")
    listed = entries.filled_list("hosts", given["hosts"])
    hosts = tuple(_host(f"hosts[{index}]", entry, defaults) for index, entry in enumerate(listed))
    names = [host.name for host in hosts]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise Wrong(f"two hosts are called {twice!r}; give each another name.")
    _refuse_one_machine_twice(hosts)
    name = entries.host_name("name", given.get("name", re.sub(r"[^A-Za-z0-9_.:-]", "_", stem)))
    hosts_file = HostsFile(
        name=name,
        hosts=hosts,
        draft=_draft(given.get("draft"), hosts),
        order=_order(given.get("order"), names),
        split=_split(given.get("split")),
        spares=entries.whole("spares", given.get("spares", 0), 0, MAX_STAGES),
    )
    num_workers = len(hosts_file.workers)
    if not hosts_file.heads:
        raise Wrong(
            "all its devices are in groups, and it names no head; say with `draft` which group "
            "computes the draft, as in `draft: alpha/0`, or leave a device by itself."
        )
    if num_workers < 2:
        raise Wrong(
            f"its devices make {num_workers} worker, but a cluster needs 2 or more, the head and "
            "a stage; name another device (cpu may stand several times)."
        )
    if hosts_file.num_stages < 1:
        raise Wrong(
            f"spares is {hosts_file.spares}, but of {num_workers} workers the head and one stage "
            f"are needed; use at most {num_workers - 2}."
        )
    if hosts_file.split is not None and len(hosts_file.split) != hosts_file.num_stages:
        raise Wrong(
            f"split has {len(hosts_file.split)} entries, but there are {hosts_file.num_stages} "
            f"stages ({num_workers} workers, less the head and {hosts_file.spares} spares); give "
            "one number of layers per stage."
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


def _checked(where: str, values: Any, kinds: Mapping[str, entries.Kind]) -> dict[str, Any]:
    given = entries.known(where, values, tuple(kinds))
    return {key: kinds[key](f"{where}.{key}", value) for key, value in given.items()}


def _host(where: str, values: Any, defaults: Mapping[str, Any]) -> Host:
    own = _checked(where, values, HOST)
    if "address" not in own:
        raise Wrong(f"{where} has no address; say where the other hosts reach it.")
    env = {**defaults.get("env", {}), **own.get("env", {})}
    merged = {**dict.fromkeys(HOST), **STANDARD, **defaults, **own, "env": env}
    if merged["name"] is None:
        merged["name"] = entries.host_name(f"{where}.address", merged["address"])
    groups = merged.pop("devices")
    merged["devices"] = tuple(device for group in groups for device in group)
    sizes = tuple(map(len, groups))
    return Host(**merged, groups=sizes if max(sizes) > 1 else ())


def _draft(value: Any, hosts: Sequence[Host]) -> str | None:
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
    return value


def _order(value: Any, names: Sequence[str]) -> tuple[str, ...] | None:
    if value is None:
        return None
    order = entries.filled_list("order", value)
    for name in order:
        if name not in names:
            raise Wrong(
                f"order holds {shown(name)}, which is no host; {suggest(shown(name), names)}."
            )
    if len(order) != len(names) or set(order) != set(names):
        raise Wrong(f"order is {shown(order)}, but must name each of {', '.join(names)} once.")
    return tuple(order)


def _split(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    return tuple(
        entries.whole("split", layers, 1, MAX_COUNT)
        for layers in entries.filled_list("split", value)
    )
