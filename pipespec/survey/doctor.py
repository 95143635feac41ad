"""`pipespec doctor`: asks every host of a hosts file, and every host about every other.

A probe (`probe`) is started on each host over SSH. It says what the host has, listens for the other
probes and measures the way to them; `diagnosis` says what is wrong.
"""

from __future__ import annotations

import itertools
import json
import queue
import secrets
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from pipespec.cluster import ssh
from pipespec.config.hosts import Host, HostsFile
from pipespec.config.model import ModelConfig
from pipespec.errors import HostFailed
from pipespec.survey.diagnosis import diagnose, wanted
from pipespec.survey.findings import Finding, Link, Offset, Seen
from pipespec.survey.inventory import Fingerprint, Inventory
from pipespec.survey.linkcheck import Place
from pipespec.survey.probe import PROTOCOL, Gain, Listening, Measured, Reach
from pipespec.system.interfaces import Interface
from pipespec.system.reading import Unreadable, parse_json

MODULE = "pipespec.survey.probe"
HELLO_TIMEOUT_S = 15.0
STOCK_TIMEOUT_S = 60.0  # torch may have to be imported
ANSWER_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 3.0
NUM_CLOCK_READINGS = 9
TOKEN_BYTES = 32
MAX_STDERR_LINES = 20


@dataclass(frozen=True, slots=True)
class Report:
    """What was learned of every host and every ordered pair of hosts, and what is wrong."""

    hosts: Mapping[str, Seen]
    links: Sequence[Link]
    findings: Sequence[Finding]

    @property
    def ok(self) -> bool:
        """Whether there is no error; warnings may remain."""
        return not any(finding.error for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """The same as plain values."""
        return {
            "ok": self.ok,
            "findings": [finding.as_json() for finding in self.findings],
            "boxes": {name: asdict(seen) for name, seen in self.hosts.items()},
            "links": [asdict(link) for link in self.links],
        }


def examine(hosts_file: HostsFile, model: ModelConfig) -> Report:
    """Look at all hosts. One that fails is reported; the others are looked at all the same.

    `model` says where the models lie on hosts that do not say so themselves.
    """
    names = [host.name for host in hosts_file.hosts]
    with ThreadPoolExecutor(len(names)) as pool, _Ward(hosts_file, model) as ward:

        def together(step: Callable[..., None], items: Iterable[tuple[str, ...]]) -> None:
            for _ in pool.map(lambda names: ward.attempt(step, *names), items):
                pass

        together(ward.admit, zip(names, strict=True))
        together(ward.read_clock, zip(names, strict=True))
        together(ward.knock, zip(names, strict=True))
        together(ward.share, zip(names, strict=True))
        for pairs in rounds(names):
            together(ward.measure, pairs)
            together(ward.measure, [(b, a) for a, b in pairs])
        links = [link for pair, link in sorted(ward.links.items())]
        return Report(ward.seen, links, diagnose(hosts_file, ward.seen, links))


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


class _Ward:
    """The hosts under examination: a channel to each, and what is known so far.

    Steps of different hosts may run at once, each in a thread of its own.
    """

    def __init__(self, hosts_file: HostsFile, model: ModelConfig):
        self.seen = {host.name: Seen() for host in hosts_file.hosts}
        self.links: dict[tuple[str, str], Link] = {}
        self._hosts = hosts_file
        self._models = {"target": model.target, "draft": model.draft, "mid": model.mid}
        self._token = secrets.token_hex(TOKEN_BYTES)
        self._channels: dict[str, Channel] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        channels = list(self._channels.values())
        for channel in channels:
            channel.hang_up()
        for channel in channels:
            channel.close()

    def attempt(self, step: Callable[..., None], name: str, *others: str) -> None:
        """Do a step of a host, unless it or another that it concerns has failed before."""
        if any(self.seen[each].failure is not None for each in (name, *others)):
            return
        try:
            step(name, *others)
        except HostFailed as error:
            self.seen[name].failure = f"{str(error).rstrip('.')}."

    def admit(self, name: str) -> None:
        """Start the probe; ask what the host has, and have it listen."""
        host, seen = self._hosts.host(name), self.seen[name]
        channel = self._channels[name] = Channel(host)
        if channel.ask("hello", HELLO_TIMEOUT_S) != PROTOCOL:
            raise HostFailed(
                f"{name}: its pipespec is another version than this one; install the same there"
            )
        own = {"target": host.target, "draft": host.draft, "mid": host.mid}
        folders = {part: own[part] or self._models[part] for part in wanted(self._hosts, host)}
        models = {part: folder for part, folder in folders.items() if folder is not None}
        seen.inventory = _inventory(
            channel.ask("stock", STOCK_TIMEOUT_S, models=models, devices=host.devices)
        )
        seen.listening = _listening(
            channel.ask(
                "listen",
                name=name,
                token=self._token,
                address=host.address,
                interface=host.interface,
            )
        )

    def read_clock(self, name: str) -> None:
        """How far the host's clock is ahead, as NTP does: the quickest of some readings."""
        readings = []
        for _ in range(NUM_CLOCK_READINGS):
            start = time.time()
            there = self._channels[name].ask("clock")
            end = time.time()
            readings.append(Offset(there - (start + end) / 2, (end - start) / 2))
        self.seen[name].clock = min(readings, key=lambda reading: reading.margin_s)

    def knock(self, name: str) -> None:
        """Which of the others the host reaches."""
        peers = {
            other: [asdict(place) for place in seen.listening.places]
            for other, seen in self.seen.items()
            if other != name and seen.listening is not None and seen.listening.places
        }
        for other, reach in (
            self._channels[name].ask("reach", token=self._token, peers=peers).items()
        ):
            self.links[name, other] = Link(name, other, _reach(reach), None)

    def share(self, name: str) -> None:
        """What the host's groups of devices gain by computing together."""
        host, seen = self._hosts.host(name), self.seen[name]
        assert seen.inventory is not None
        for leader, group in host.members.items():
            part = "draft" if leader == self._hosts.draft else "target"
            model = seen.inventory.models.get(part)
            devices = [host.devices[host.workers.index(worker)] for worker in group]
            if len(group) > 1 and model is not None and _usable(model, devices, seen.inventory):
                answer = self._channels[name].ask(
                    "share", STOCK_TIMEOUT_S, model=model.folder, devices=devices
                )
                seen.gains[leader] = Gain(**answer)

    def measure(self, name: str, other: str) -> None:
        """Round trip and rate from one host to another, if it is reached."""
        link, listening = self.links.get((name, other)), self.seen[other].listening
        if link is None or listening is None or link.reach.problem is not None:
            return
        answer = self._channels[name].ask(
            "measure", token=self._token, name=other, place=asdict(listening.places[-1])
        )
        if "problem" in answer:
            reach = replace(_reach(answer), interface=link.reach.interface)
            self.links[name, other] = replace(link, reach=reach)
        else:
            self.links[name, other] = replace(link, measured=Measured(**answer))


class Channel:
    """A probe on a host: questions go to its standard input, answers come from its output."""

    def __init__(self, host: Host):
        """Raises HostFailed if the probe cannot even be started."""
        self._host = host
        pipe = subprocess.PIPE
        self._process = ssh.popen(host, MODULE, stdin=pipe, stdout=pipe, stderr=pipe)
        self._numbers = itertools.count(1)
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._said: deque[bytes] = deque(maxlen=MAX_STDERR_LINES)
        self._readers = [
            threading.Thread(target=read, daemon=True) for read in (self._listen, self._overhear)
        ]
        for reader in self._readers:
            reader.start()

    def ask(self, request: str, timeout: float = ANSWER_TIMEOUT_S, /, **fields: Any) -> Any:
        """The answer to a request. Raises HostFailed when none comes."""
        number = next(self._numbers)
        line = json.dumps({"id": number, "do": request, **fields})
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
            answer = self._answers.get(timeout=timeout)
        except queue.Empty:
            self._process.kill()
            raise HostFailed(
                f"{self._host.name}: the probe did not answer within {timeout:g} s; check the load "
                "of the host and the link to it"
            ) from None
        except OSError:
            answer = None  # it has ended
        if answer is None:
            raise self._failure()
        assert answer["id"] == number, "one question at a time"
        return answer["value"]

    def hang_up(self) -> None:
        """Let the probe end: its standard input does."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except OSError:
            return  # it has ended already

    def close(self) -> None:
        """Wait for the probe's end, which must not take long."""
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for reader in self._readers:
            reader.join(STOP_TIMEOUT_S)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                answer = _object(line)
                if answer is not None:  # a login script may have printed something
                    self._answers.put(answer)
        self._answers.put(None)

    def _overhear(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            self._said.extend(lines)

    def _failure(self) -> HostFailed:
        self.hang_up()
        self.close()
        return ssh.failure(self._host, MODULE, self._process.returncode, b"".join(self._said))


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        answer = parse_json(line)
    except Unreadable:
        return None
    return answer if isinstance(answer, dict) and answer.keys() == {"id", "value"} else None


def _usable(model: Fingerprint, devices: Sequence[str], inventory: Inventory) -> bool:
    """Whether the model and the devices are there; what is not is a finding of its own."""
    known = len(inventory.cuda or ())
    indices = [int(each.partition(":")[2] or 0) for each in devices if each.startswith("cuda")]
    return model.problem is None and all(index < known for index in indices)


# --- from JSON --------------------------------------------------------------------------------


def _inventory(value: dict[str, Any]) -> Inventory:
    models = {part: Fingerprint(**found) for part, found in value["models"].items()}
    return Inventory(**{**value, "models": models})


def _listening(value: dict[str, Any]) -> Listening:
    places = tuple(Place(**place) for place in value["places"])
    found = tuple(
        Interface(**{**interface, "addresses": tuple(interface["addresses"])})
        for interface in value["interfaces"]
    )
    return Listening(**{**value, "places": places, "interfaces": found})


def _reach(value: dict[str, Any]) -> Reach:
    place = value["place"]
    return Reach(**{**value, "place": None if place is None else Place(**place)})
