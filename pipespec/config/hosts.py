"""`hosts.yaml`: the boxes of a cluster, and how each is reached.

A *box* is a machine. A *member* is one process of a box that can hold a rank: one per entry of
the box's `devices`, called "box/0", "box/1", ... A *spare* is a member without a rank until one
is needed.

    name: lab                      # the file's stem
    defaults: {user: ubuntu, port: 22}   # for every box that does not say otherwise
    hosts:
      - name: alpha                # the address
        address: 10.0.0.1          # where the other boxes reach it, and SSH if `ssh` is not given
        ssh: alpha.lan             # another SSH destination; `local` is this machine, without SSH;
                                   # `none`: its members are started by hand
        user: me
        port: 22
        identity: ~/.ssh/key
        interface: eth0            # what carries batches: the interface that has the address
        devices: [cuda:0, cuda:1]
        python: python3
        env: {OMP_NUM_THREADS: 8}
        target: /models/llama      # where the models lie on this box: as model.target, model.draft
        draft: /models/small
        memory_gib: 22             # what each of its devices may use: all that is free
    draft: alpha/0                 # the member that is the head: the planner chooses
    order: [beta, alpha]           # of the boxes along the pipeline: the planner chooses
    split: [12, 10, 10]            # layers per stage: the planner chooses
    spares: 0                      # so many members, the last ones, hold no layers at first

Only `hosts` with `address` and `devices` of each are needed (`doctor` does without devices);
after # stands what a missing one means.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
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
class Box:
    """A machine. `target`, `draft`: where the models lie there, if not where the run says.

    `memory_gib` is what each of its devices may use, None: all that is free.
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

    @property
    def local(self) -> bool:
        """Whether it is this machine, to be used without SSH."""
        return self.ssh == LOCAL

    @property
    def by_hand(self) -> bool:
        """Whether its members are started by others (`launch/torchrun.sh`)."""
        return self.ssh == BY_HAND

    @property
    def members(self) -> tuple[str, ...]:
        """The names of its members, one per device."""
        return tuple(f"{self.name}/{index}" for index in range(len(self.devices)))


@dataclass(frozen=True)
class Hosts:
    """All boxes, as the file lists them, and what it says about their parts.

    None where the planner is to choose. Without planner: the first member is the head, and the
    boxes stand in the file's order.
    """

    name: str
    boxes: tuple[Box, ...]
    draft: str | None = None
    order: tuple[str, ...] | None = None
    split: tuple[int, ...] | None = None
    spares: int = 0

    @property
    def members(self) -> tuple[str, ...]:
        """Every member, box after box in `order`, or in the file's."""
        boxes = self.boxes if self.order is None else map(self.box, self.order)
        return tuple(member for box in boxes for member in box.members)

    @property
    def spare_members(self) -> tuple[str, ...]:
        """The members that hold no layers until one is needed: the last that are not the head."""
        stages = [member for member in self.members if member != self.draft]
        return tuple(stages[len(stages) - self.spares :])

    @property
    def num_stages(self) -> int:
        """How many members hold layers: all but the head and the spares."""
        return len(self.members) - 1 - self.spares

    def box(self, name: str) -> Box:
        """The box of that name."""
        return next(box for box in self.boxes if box.name == name)

    def box_of(self, member: str) -> Box:
        """The box of a member."""
        return self.box(member.rpartition("/")[0])

    def require_devices(self) -> None:
        """Raise ConfigError unless every member has a particular device."""
        for box in self.boxes:
            if "auto" in box.devices:
                raise ConfigError(
                    f"Box {box.name} has the device auto; name its devices, such as [cpu] or "
                    "[cuda:0, cuda:1]."
                )

    def device_of(self, member: str) -> str:
        """The device of a member."""
        return self.box_of(member).devices[int(member.rpartition("/")[2])]


def this_machine(devices: Sequence[str]) -> Box:
    """The only box of a cluster that needs no hosts file."""
    return Box(
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
    )


def load_hosts(path: str | Path) -> Hosts:
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

BOX: dict[str, entries.Kind] = {
    "name": entries.box_name,
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
    "memory_gib": entries.gib,
}
DEFAULTS = {key: kind for key, kind in BOX.items() if key not in ("name", "address")}
STANDARD = {"port": 22, "devices": ("auto",), "python": "python3"}
FILE = ("name", "defaults", "hosts", "draft", "order", "split", "spares")


def _hosts(values: Any, stem: str) -> Hosts:
    given = entries.known("the file", values, FILE)
    defaults = _checked("defaults", given.get("defaults", {}), DEFAULTS)
    if not given.get("hosts"):
        raise Wrong("it has no hosts; list at least one under `hosts:`, with its address.")
    listed = entries.filled_list("hosts", given["hosts"])
    boxes = tuple(_box(f"hosts[{index}]", entry, defaults) for index, entry in enumerate(listed))
    names = [box.name for box in boxes]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise Wrong(f"two hosts are called {twice!r}; give each another name.")
    _refuse_one_machine_twice(boxes)
    name = entries.box_name("name", given.get("name", re.sub(r"[^A-Za-z0-9_.:-]", "_", stem)))
    hosts = Hosts(
        name=name,
        boxes=boxes,
        draft=_draft(given.get("draft"), boxes),
        order=_order(given.get("order"), names),
        split=_split(given.get("split")),
        spares=entries.whole("spares", given.get("spares", 0), 0, MAX_STAGES),
    )
    num_members = len(hosts.members)
    if num_members < 2:
        raise Wrong(
            f"its devices make {num_members} member, but a cluster needs 2 or more, the head and "
            "a stage; name another device (cpu may stand several times)."
        )
    if hosts.num_stages < 1:
        raise Wrong(
            f"spares is {hosts.spares}, but of {num_members} members the head and one stage are "
            f"needed; use at most {num_members - 2}."
        )
    if hosts.split is not None and len(hosts.split) != hosts.num_stages:
        raise Wrong(
            f"split has {len(hosts.split)} entries, but there are {hosts.num_stages} stages "
            f"({num_members} members, less the head and {hosts.spares} spares); give one number "
            "of layers per stage."
        )
    return hosts


def _refuse_one_machine_twice(boxes: Sequence[Box]) -> None:
    """Raise Wrong if two boxes are reached as one; members that others start may share theirs."""
    found: dict[tuple[object, ...], str] = {}
    for box in boxes:
        way = (box.address, box.ssh or box.address, box.user, box.port)
        if not box.by_hand and found.setdefault(way, box.name) != box.name:
            raise Wrong(
                f"{found[way]!r} and {box.name!r} are one machine (address {box.address!r}); "
                "list its devices under one of them, or correct an address."
            )


def _checked(where: str, values: Any, kinds: Mapping[str, entries.Kind]) -> dict[str, Any]:
    given = entries.known(where, values, tuple(kinds))
    return {key: kinds[key](f"{where}.{key}", value) for key, value in given.items()}


def _box(where: str, values: Any, defaults: Mapping[str, Any]) -> Box:
    own = _checked(where, values, BOX)
    if "address" not in own:
        raise Wrong(f"{where} has no address; say where the other boxes reach it.")
    env = {**defaults.get("env", {}), **own.get("env", {})}
    merged = {**dict.fromkeys(BOX), **STANDARD, **defaults, **own, "env": env}
    if merged["name"] is None:
        merged["name"] = entries.box_name(f"{where}.address", merged["address"])
    return Box(**merged)


def _draft(value: Any, boxes: Sequence[Box]) -> str | None:
    members = [member for box in boxes for member in box.members]
    if value is not None and value not in members:
        raise Wrong(
            f"draft is {shown(value)}, which is no member; {suggest(shown(value), members)}."
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
