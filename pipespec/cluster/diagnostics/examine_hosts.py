"""`pipespec doctor`: examines all hosts of a hosts file, and the link between each two of them. A
`probe` runs on each host: it takes the inventory, listens for the other probes and measures the
links to them; `diagnosis` makes findings of that."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from pipespec.cluster.diagnostics.diagnosis import (
    Finding,
    HostReport,
    LinkReport,
    diagnose,
    required_models,
)
from pipespec.cluster.diagnostics.inventory import Inventory
from pipespec.cluster.diagnostics.probe import MEASURE_S, Link, Listening
from pipespec.cluster.host_link.programs import Conversation
from pipespec.config.hosts import HostsFile
from pipespec.engine.checkpoint.model_path import can_be_fetched
from pipespec.engine.model_settings import ModelConfig
from pipespec.errors import HostFailed
from pipespec.placement.host_figures import HostFigures
from pipespec.system.validation import Unreadable, from_fields, home_expanded, typed

MODULE = "pipespec.cluster.diagnostics.probe"
HELLO_TIMEOUT_S, ANSWER_TIMEOUT_S, STOP_TIMEOUT_S = 15.0, 30.0, 3.0
INVENTORY_TIMEOUT_S = 60.0  # torch may have to be imported
TOKEN_BYTES = 32


@dataclass(frozen=True, slots=True)
class Report:
    """The reports on every examined host and every ordered pair of them, and the findings;
    `unchecked` are the hosts that are started by hand."""

    findings: Sequence[Finding]
    unchecked: Sequence[str]
    hosts: Mapping[str, HostReport]
    links: Sequence[LinkReport]

    @property
    def ok(self) -> bool:
        return not any(finding.error for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}


def examine_hosts(hosts_file: HostsFile, model: ModelConfig) -> Report:
    """Examine all hosts but those that are started by hand. If one fails, the others are examined
    all the same. `model` has the paths of the models on hosts whose entry does not name them."""
    names = [host.name for host in hosts_file.hosts if not host.by_hand]
    named = {"target": model.target, "draft": model.draft}
    with (
        ThreadPoolExecutor(max(len(names), 1)) as pool,
        Examination(hosts_file, named) as examination,
    ):

        def together(step: Callable[..., None], items: Iterable[tuple[str, ...]]) -> None:
            for _ in pool.map(lambda names: examination.attempt(step, *names), items):
                pass

        for step in (examination.start, examination.listen, examination.take_inventory):
            together(step, zip(names, strict=True))
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
        return Report(findings, hosts_file.by_hand, examination.seen, links)


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


class _Probe(Conversation):
    def ask(self, request: str, timeout: float = ANSWER_TIMEOUT_S, /, **fields: Any) -> Any:
        """The answer to a request. Raises HostFailed when none comes, or that it cannot."""
        late = threading.Timer(timeout, self.end)
        began = time.monotonic()
        late.start()
        try:
            return self.call(request, **fields)
        except HostFailed as error:
            if time.monotonic() - began < timeout:
                raise
            raise HostFailed(
                f"{self.host.name}: the probe did not answer within {timeout:g} s; check the load "
                "of the host and the link to it"
            ) from error
        finally:
            late.cancel()


class Examination(ExitStack):
    """The hosts under examination: the probe of each, and the reports so far. Steps of different
    hosts may run at once, each in a thread of its own; they raise HostFailed and Unreadable.
    `models` are the paths of models on hosts whose entry does not name them."""

    def __init__(
        self, hosts_file: HostsFile, models: Mapping[str, str | None] = MappingProxyType({})
    ):
        super().__init__()
        self.seen = {host.name: HostReport() for host in hosts_file.hosts if not host.by_hand}
        self.links: dict[tuple[str, str], LinkReport] = {}
        self._hosts = hosts_file
        self._models = models
        self._token = secrets.token_hex(TOKEN_BYTES)
        self._probes: dict[str, _Probe] = {}
        self._starting = threading.Lock()
        self._over = False

    def __exit__(self, *details: Any) -> bool | None:
        with self._starting:
            self._over = True
        end = _Probe.close_input if details[0] is None else _Probe.end  # nobody wants its answer
        for probe in self._probes.values():  # so that all end at the same time
            end(probe)
        return super().__exit__(*details)

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
        """Whether this machine lacks a model that one of the hosts has."""
        inventories = [seen.inventory for seen in self.seen.values() if seen.inventory is not None]
        found = [each.models[part] for each in inventories if part in each.models]
        there = any(each.problem is None for each in found)
        return there and not os.path.lexists(home_expanded(name))

    def start(self, name: str) -> None:
        with self._starting:
            if self._over:  # nobody would end it
                raise HostFailed(f"{name}: the examination has ended")
            probe = self.enter_context(_Probe(self._hosts.host(name), MODULE, STOP_TIMEOUT_S))
            self._probes[name] = probe
        probe.ask("hello", HELLO_TIMEOUT_S)

    def end(self, name: str) -> None:
        """End a probe now, and with it what it has in memory."""
        self._probes[name].end()
        self._probes[name].failure(STOP_TIMEOUT_S)

    def measure_devices(self, name: str, request: Mapping[str, Any]) -> HostFigures:
        """What the devices of a host do; `request`: the fields of a MeasureRequest."""
        answer = self._probes[name].ask("measure", MEASURE_S, request=request)
        try:
            return typed("its answer", answer, HostFigures)
        except Unreadable as error:
            raise HostFailed(
                f"{name}: its answer cannot be read ({error}); install the same pipespec there as "
                "here."
            ) from error

    def listen(self, name: str) -> None:
        host = self._hosts.host(name)
        where = {"name": name, "address": host.address, "interface": host.interface}
        answer = self._probes[name].ask("listen", token=self._token, **where)
        self.seen[name].listening = from_fields(Listening, answer)

    def take_inventory(self, name: str) -> None:
        host = self._hosts.host(name)
        own = {"target": host.target, "draft": host.draft}
        folders = {
            part: own[part] or self._models[part] for part in required_models(self._hosts, host)
        }
        models = {part: folder for part, folder in folders.items() if folder is not None}
        answer = self._probes[name].ask(
            "inventory", INVENTORY_TIMEOUT_S, models=models, devices=host.devices
        )
        self.seen[name].inventory = from_fields(Inventory, answer)

    def measure(self, name: str, other: str) -> None:
        """Whether a host reaches another one, and how fast the link is."""
        listening = self.seen[other].listening
        if listening is None or listening.place is None:
            return
        place = asdict(listening.place)
        answer = self._probes[name].ask("link", token=self._token, name=other, place=place)
        found = from_fields(Link, answer)
        self.links[name, other] = LinkReport(found.reach, found.measured, name, other)

    def links_of(self, name: str) -> list[LinkReport]:
        """Round trip and rate between a host and each of the others, in both directions. Raises
        HostFailed also where there is no way."""
        for each, seen in self.seen.items():
            self.listen(each)
            if seen.listening is not None and seen.listening.problem is not None:
                address = self._hosts.host(each).address
                raise HostFailed(f"no interface of {each} has its address {address}; correct it")
        for other in self.seen:
            if other != name:
                self.measure(name, other)
                self.measure(other, name)
        for link in self.links.values():
            if link.reach.problem is not None:
                raise HostFailed(
                    f"{link.source} cannot reach {link.to} ({link.reach.problem}); check its "
                    "address and that no firewall stops the ports"
                )
        return list(self.links.values())
