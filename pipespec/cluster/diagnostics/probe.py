"""`python -m pipespec.cluster.diagnostics.probe`: runs on a host that is examined or measured.

One JSON object per line: requests on standard input, answers on standard output.

    {"do": "hello"}                                     PROTOCOL
    {"do": "inventory", models, devices}                inventory.Inventory
    {"do": "prepare"}                                   nothing; it imports what measures
    {"do": "measure", request}                          HostFigures
    {"do": "listen", name, token, address, interface}   Listening
    {"do": "link", token, name, places}                 Link

An answer is {"value"}, or {"error": sentence}. The listener accepts only the other hosts' probes,
which send the token; token and requests arrive over SSH alone. A probe ends with its standard
input, and LIFETIME_S seconds after its start, or after what it measures, which may take MEASURE_S,
at the latest, as its input does not end if the link is cut."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, is_dataclass
from importlib import import_module
from typing import Any

from pipespec.cluster.diagnostics import link_probe
from pipespec.cluster.diagnostics.inventory import take_inventory
from pipespec.cluster.diagnostics.link_probe import Endpoint, NotReached
from pipespec.errors import PipespecError
from pipespec.system import network_interfaces
from pipespec.system.network_interfaces import Interface, interface_with, interfaces
from pipespec.system.validation import from_fields

PROTOCOL = 6
# Loading some layers and the whole draft takes minutes where the disk is slow.
LIFETIME_S, MEASURE_S = 300, 900
MEASURING = "pipespec.cluster.diagnostics.measure_devices"  # it imports torch


@dataclass(frozen=True, slots=True)
class Listening:
    """The endpoints at which a host accepts probes of the others, and its interfaces. `places` are
    at its address (`number`) and, last, at that of the interface that carries its batches
    (`carrier`) if it is another. `problem`: "unknown" (the address cannot be resolved), "absent"
    (no interface has it), "no interface" (none of that name is up with an address of the same
    family), or None."""

    number: str | None
    places: tuple[Endpoint, ...]
    carrier: str | None
    interfaces: tuple[Interface, ...]
    problem: str | None


@dataclass(frozen=True, slots=True)
class Reachability:
    """Whether a peer answers; `interface` leads to the address that carries its batches. `problem`:
    "refused", "silent", "no route", "stranger" (something else answers: the host `who`), or None.
    """

    interface: str | None
    problem: str | None = None
    place: Endpoint | None = None
    who: str | None = None


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """Median round trip, and the rate at which a burst of bytes reached the peer."""

    rtt_ms: float
    gbit_per_s: float


@dataclass(frozen=True, slots=True)
class Link:
    reach: Reachability
    measured: LinkSpeed | None


def listen(name: str, token: str, address: str, interface: str | None) -> Listening:
    """Accept peers that hold the token, until this process ends."""
    here = tuple(interfaces())
    try:
        number = network_interfaces.resolve(address)
    except OSError:
        return Listening(None, (), None, here, "unknown")
    carrier = interface_with(number, here)
    if carrier is None:
        return Listening(number, (), None, here, "absent")
    numbers = [number]
    if interface is not None:
        carrier = next((known for known in here if known.name == interface and known.up), None)
        alike = [a for a in carrier.addresses if (":" in a) == (":" in number)] if carrier else []
        if carrier is None or not alike:
            return Listening(number, (), None, here, "no interface")
        if interface_with(number, [carrier]) is None:
            numbers.append(alike[0])
    door = link_probe.ProbeListener(name, token)
    places = tuple(door.open(number) for number in numbers)
    return Listening(number, places, carrier.name, here, None)


def link(token: str, name: str, places: list[dict[str, Any]]) -> Link:
    """Connect to every endpoint of a peer, and measure round trip and rate to the last."""
    *others, last = [Endpoint(**place) for place in places]
    leads = network_interfaces.interface_towards(last.address, interfaces())
    interface = None if leads is None else leads.name
    for place in (*others, last):
        try:
            with closing(link_probe.PeerConnection(place, name, token)) as peer:
                if place is last:
                    round_trip = peer.round_trip()
                    speed = LinkSpeed(1e3 * round_trip, peer.burst(round_trip))
        except NotReached as error:
            return Link(Reachability(interface, error.problem, place, error.who), None)
    return Link(Reachability(interface), speed)


def measure(request: dict[str, Any]) -> Any:
    """What `measure_devices.measure` returns. Raises PipespecError."""
    signal.alarm(MEASURE_S)
    measuring = import_module(MEASURING)
    found = measuring.measure(from_fields(measuring.MeasureRequest, request))
    signal.alarm(LIFETIME_S)
    return found


REQUESTS: dict[str, Callable[..., Any]] = {
    "hello": lambda: PROTOCOL,
    "inventory": take_inventory,
    "measure": measure,
    "listen": listen,
    "link": link,
}


def _plain(value: Any) -> Any:
    assert is_dataclass(value) and not isinstance(value, type)
    return asdict(value)


def main() -> None:
    """Answer on standard output; anything else that is printed goes to standard error."""
    signal.alarm(LIFETIME_S)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin.buffer:
        request = json.loads(line)
        if (do := request.pop("do")) == "prepare":
            signal.alarm(0)  # a host that has joined ends its programs when its connection breaks
            import_module(MEASURING)
            continue
        try:
            answer = {"value": REQUESTS[do](**request)}
        except PipespecError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer, default=_plain), file=answers, flush=True)


if __name__ == "__main__":
    main()
