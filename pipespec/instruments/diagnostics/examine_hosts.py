"""`pipespec doctor`: examines all hosts of a hosts file, and the link between each two of them.

A probe (`probe`) is started on each host over SSH. It takes the host's inventory, listens for the
other probes and measures the links to them; `diagnosis` makes findings of that.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from pipespec.config.hosts import HostsFile
from pipespec.engine.checkpoint.fingerprint import Fingerprint
from pipespec.engine.checkpoint.model_path import can_be_fetched
from pipespec.engine.model_settings import ModelConfig
from pipespec.errors import HostFailed
from pipespec.instruments.diagnostics.diagnosis import diagnose, required_models
from pipespec.instruments.diagnostics.findings import Finding, HostReport, LinkReport, Offset
from pipespec.instruments.diagnostics.inventory import Inventory
from pipespec.instruments.diagnostics.probe import (
    PROTOCOL,
    LinkSpeed,
    Listening,
    Reachability,
    TensorParallelGain,
)
from pipespec.instruments.diagnostics.probe_process import ProbeProcess
from pipespec.system.validation import Unreadable, from_fields, home_expanded

HELLO_TIMEOUT_S = 15.0
INVENTORY_TIMEOUT_S = 60.0  # torch may have to be imported
NUM_CLOCK_READINGS = 9
TOKEN_BYTES = 32


@dataclass(frozen=True, slots=True)
class Report:
    """The reports on every examined host and every ordered pair of them, and the findings.

    `unchecked` are the hosts that are started by hand.
    """

    hosts: Mapping[str, HostReport]
    links: Sequence[LinkReport]
    findings: Sequence[Finding]
    unchecked: Sequence[str] = ()

    @property
    def ok(self) -> bool:
        """Whether there is no error; warnings may remain."""
        return not any(finding.error for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """The same as plain values."""
        return {
            "ok": self.ok,
            "findings": [asdict(finding) for finding in self.findings],
            "unchecked": list(self.unchecked),
            "hosts": {name: asdict(seen) for name, seen in self.hosts.items()},
            "links": [asdict(link) for link in self.links],
        }


def examine_hosts(hosts_file: HostsFile, model: ModelConfig) -> Report:
    """Examine all hosts but those that are started by hand. If one fails, the others are examined
    all the same.

    `model` has the paths of the models on hosts whose entry does not name them.
    """
    names = [host.name for host in hosts_file.hosts if not host.by_hand]
    named = {"target": model.target, "draft": model.draft, "mid": model.mid}
    with (
        ThreadPoolExecutor(max(len(names), 1)) as pool,
        _Examination(hosts_file, named) as examination,
    ):

        def together(step: Callable[..., None], items: Iterable[tuple[str, ...]]) -> None:
            for _ in pool.map(lambda names: examination.attempt(step, *names), items):
                pass

        together(examination.start_probe, zip(names, strict=True))
        together(examination.take_inventory, zip(names, strict=True))
        together(examination.read_clock, zip(names, strict=True))
        together(examination.reach_peers, zip(names, strict=True))
        together(examination.measure_tensor_parallel, zip(names, strict=True))
        for pairs in rounds(names):
            together(examination.measure, pairs)
            together(examination.measure, [(b, a) for a, b in pairs])
        links = [link for pair, link in sorted(examination.links.items())]
        fetchable = [
            part
            for part, name in named.items()
            if name and (can_be_fetched(name) or examination.comes_from_another_host(part, name))
        ]
        findings = diagnose(hosts_file, examination.seen, links, fetchable)
        return Report(examination.seen, links, findings, hosts_file.by_hand)


def measure_links(hosts_file: HostsFile, name: str) -> list[LinkReport]:
    """Round trip and rate between a host and each of the others, in both directions. Raises
    HostFailed."""
    with _Examination(hosts_file, {}) as examination:
        for host in hosts_file.hosts:
            examination.start_probe(host.name)
        for each, seen in examination.seen.items():
            if seen.listening is not None and seen.listening.problem is not None:
                address = hosts_file.host(each).address
                raise HostFailed(f"no interface of {each} has its address {address}; correct it")
        for host in hosts_file.hosts:
            examination.reach_peers(host.name)
        for other in hosts_file.hosts:
            if other.name != name:
                examination.measure(name, other.name)
                examination.measure(other.name, name)
        found = [link for pair, link in examination.links.items() if name in pair]
    for link in found:
        if link.reach.problem is not None:
            raise HostFailed(
                f"{link.source} cannot reach {link.to} ({link.reach.problem}); check its address "
                "and that no firewall stops the ports"
            )
    return found


def rounds(names: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Every pair once, in rounds in which no name occurs twice (a round-robin tournament)."""
    ring: list[str | None] = [*names, *([None] if len(names) % 2 else [])]
    half = len(ring) // 2
    out = []
    for _ in range(len(ring) - 1):
        facing = zip(ring[:half], reversed(ring[half:]), strict=True)
        out.append([(a, b) for a, b in facing if a is not None and b is not None])
        ring.insert(1, ring.pop())
    return out


class _Examination:
    """The hosts under examination: the probe of each, and the reports so far.

    Steps of different hosts may run at once, each in a thread of its own.
    """

    def __init__(self, hosts_file: HostsFile, models: Mapping[str, str | None]):
        self.seen = {host.name: HostReport() for host in hosts_file.hosts if not host.by_hand}
        self.links: dict[tuple[str, str], LinkReport] = {}
        self._hosts = hosts_file
        self._models = models
        self._token = secrets.token_hex(TOKEN_BYTES)
        self._channels: dict[str, ProbeProcess] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        channels = list(self._channels.values())
        for channel in channels:
            channel.close_input()
        for channel in channels:
            channel.close()

    def attempt(self, step: Callable[..., None], name: str, *others: str) -> None:
        """Run a step for a host, unless this host or another one of the step has failed."""
        if any(self.seen[each].failure is not None for each in (name, *others)):
            return
        try:
            step(name, *others)
        except Unreadable as error:
            self.seen[name].failure = f"{name}: its answer cannot be read ({error})."
        except HostFailed as error:
            self.seen[name].failure = f"{str(error).rstrip('.')}."

    def comes_from_another_host(self, part: str, name: str) -> bool:
        """Whether this machine lacks a model that one of the hosts has whole."""
        inventories = [seen.inventory for seen in self.seen.values() if seen.inventory is not None]
        found = [each.models[part] for each in inventories if part in each.models]
        whole = any(each.problem is None and not each.absent for each in found)
        return whole and not os.path.lexists(home_expanded(name))

    def start_probe(self, name: str) -> None:
        """Start the probe and have it listen."""
        host, seen = self._hosts.host(name), self.seen[name]
        channel = self._channels[name] = ProbeProcess(host)
        if channel.ask("hello", HELLO_TIMEOUT_S) != PROTOCOL:
            raise HostFailed(
                f"{name}: its pipespec is another version than this one; install the same there"
            )
        listen = {"name": name, "address": host.address, "interface": host.interface}
        answer = channel.ask("listen", token=self._token, **listen)
        seen.listening = from_fields(Listening, answer)

    def take_inventory(self, name: str) -> None:
        """Ask what the host has."""
        host = self._hosts.host(name)
        own = {"target": host.target, "draft": host.draft, "mid": host.mid}
        folders = {
            part: own[part] or self._models[part] for part in required_models(self._hosts, host)
        }
        models = {part: folder for part, folder in folders.items() if folder is not None}
        answer = self._channels[name].ask(
            "inventory", INVENTORY_TIMEOUT_S, models=models, devices=host.devices
        )
        self.seen[name].inventory = from_fields(Inventory, answer)

    def read_clock(self, name: str) -> None:
        """How far the host's clock is ahead, as NTP does: the quickest of some readings."""
        readings = []
        for _ in range(NUM_CLOCK_READINGS):
            start = time.time()
            there = self._channels[name].ask("clock")
            end = time.time()
            readings.append(Offset(there - (start + end) / 2, (end - start) / 2))
        self.seen[name].clock = min(readings, key=lambda reading: reading.margin_s)

    def reach_peers(self, name: str) -> None:
        """Test which of the others the host reaches."""
        peers = {
            other: [asdict(place) for place in seen.listening.places]
            for other, seen in self.seen.items()
            if other != name and seen.listening is not None and seen.listening.places
        }
        answer = self._channels[name].ask("reach", token=self._token, peers=peers)
        for other, reach in answer.items():
            found = from_fields(Reachability, reach)
            self.links[name, other] = LinkReport(name, other, found, None)

    def measure_tensor_parallel(self, name: str) -> None:
        """Measure what the host's tensor-parallel groups gain."""
        host, seen = self._hosts.host(name), self.seen[name]
        assert seen.inventory is not None
        for leader, group in host.members.items():
            part = "draft" if leader == self._hosts.draft else "target"
            model = seen.inventory.models.get(part)
            devices = [host.devices[host.workers.index(worker)] for worker in group]
            if len(group) > 1 and model is not None and _usable(model, devices, seen.inventory):
                answer = self._channels[name].ask(
                    "tensor_parallel", INVENTORY_TIMEOUT_S, model=model.folder, devices=devices
                )
                seen.gains[leader] = from_fields(TensorParallelGain, answer)

    def measure(self, name: str, other: str) -> None:
        """Round trip and rate from one host to another, if it is reached."""
        link, listening = self.links.get((name, other)), self.seen[other].listening
        if link is None or listening is None or link.reach.problem is not None:
            return
        answer = self._channels[name].ask(
            "measure", token=self._token, name=other, place=asdict(listening.places[-1])
        )
        if "problem" in answer:
            reach = replace(from_fields(Reachability, answer), interface=link.reach.interface)
            self.links[name, other] = replace(link, reach=reach)
        else:
            self.links[name, other] = replace(link, measured=from_fields(LinkSpeed, answer))


def _usable(model: Fingerprint, devices: Sequence[str], inventory: Inventory) -> bool:
    """Whether the model and the devices exist; a missing one is a finding of its own."""
    known = len(inventory.cuda or ())
    indices = [int(each.partition(":")[2] or 0) for each in devices if each.startswith("cuda")]
    return model.problem is None and all(index < known for index in indices)
