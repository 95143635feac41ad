"""`python -m pipespec.survey.probe`: what `pipespec doctor` runs on a host, over SSH.

One JSON object per line: requests on standard input, answers on standard output.

    {"id": 1, "do": "hello"}                                      PROTOCOL
    {"id": 2, "do": "stock", models, devices}                     inventory.Inventory
    {"id": 3, "do": "listen", name, token, address, interface}    Listening
    {"id": 4, "do": "clock"}                                      seconds since 1970
    {"id": 5, "do": "reach", token, peers}                        one Reach per peer
    {"id": 6, "do": "measure", token, name, place}                Measured, or a Reach
    {"id": 7, "do": "share", model, devices}                      Gain

An answer is {"id", "value"}. The token opens the listener to the other hosts' probes and to
nobody else; it comes over SSH alone, and so does everything that a probe acts on.
It ends with its standard input, and at the latest after `LIFETIME_S`: if the link is cut, its
input never ends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any, BinaryIO

from pipespec.errors import ModelError
from pipespec.survey.inventory import Inventory, take
from pipespec.survey.linkcheck import Door, NotReached, Peer, Place
from pipespec.system.interfaces import Interface, holding, interfaces, resolve, towards

PROTOCOL = 2
LIFETIME_S = 300
SUMS_PER_LAYER = 2
ROWS = 64  # of a batch, as speculation feeds them


@dataclass(frozen=True, slots=True)
class Listening:
    """Where a host accepts the others, and its interfaces.

    `number` is its address as a number. `places` are that and, if it is another, the address of
    the interface that carries its batches, which comes last. `carrier` is that interface's name.
    `problem`: "unknown" (its address has no number), "absent" (no interface has it),
    "no interface" (the one that the hosts file names does not exist, is down or has no address of
    the same family), or None.
    """

    number: str | None
    places: tuple[Place, ...]
    carrier: str | None
    interfaces: tuple[Interface, ...]
    problem: str | None


@dataclass(frozen=True, slots=True)
class Reach:
    """Whether a peer answers.

    `interface` leads to the address that carries the peer's batches. `problem`: "refused",
    "silent", "no route", "stranger" (something else answers), or None; `place` is where it
    occurred, `who` the host that answered in the peer's stead.
    """

    interface: str | None
    problem: str | None = None
    place: Place | None = None
    who: str | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """Median round trip, and the rate at which a burst of bytes reached the peer."""

    rtt_ms: float
    gbit_per_s: float


@dataclass(frozen=True, slots=True)
class Gain:
    """What devices that compute together gain and lose in each layer: milliseconds that it is read
    sooner than by one of them, and that their sums take. `problem` says why they cannot."""

    problem: str | None
    sooner_ms: float = 0.0
    sums_ms: float = 0.0


def hello() -> int:
    """Which protocol this is."""
    return PROTOCOL


def clock() -> float:
    """This machine's clock."""
    return time.time()


def stock(models: dict[str, str], devices: list[str]) -> Inventory:
    """What this host has."""
    return take(models, devices)


def listen(name: str, token: str, address: str, interface: str | None) -> Listening:
    """Accept peers that hold the token, until this process ends."""
    here = tuple(interfaces())
    try:
        number = resolve(address)
    except OSError:
        return Listening(None, (), None, here, "unknown")
    carrier = holding(number, here)
    if carrier is None:
        return Listening(number, (), None, here, "absent")
    numbers = [number]
    if interface is not None:
        carrier = next((known for known in here if known.name == interface and known.up), None)
        alike = [a for a in carrier.addresses if (":" in a) == (":" in number)] if carrier else []
        if carrier is None or not alike:
            return Listening(number, (), None, here, "no interface")
        if holding(number, [carrier]) is None:
            numbers.append(alike[0])
    door = Door(name, token)
    places = tuple(door.open(number) for number in numbers)
    return Listening(number, places, carrier.name, here, None)


def reach(token: str, peers: dict[str, list[dict[str, Any]]]) -> dict[str, Reach]:
    """Knock at every place of every peer, at all peers at once."""
    here = interfaces()

    def knock(name: str) -> Reach:
        places = [Place(**place) for place in peers[name]]
        leads = towards(places[-1].address, here)
        interface = None if leads is None else leads.name
        for place in places:
            try:
                Peer(place, name, token).close()
            except NotReached as error:
                return Reach(interface, error.problem, place, error.who)
        return Reach(interface)

    with ThreadPoolExecutor(max(len(peers), 1)) as pool:
        return dict(zip(peers, pool.map(knock, peers), strict=True))


def measure(token: str, name: str, place: dict[str, Any]) -> Measured | Reach:
    """Round trip and rate to a place of a peer; a Reach if the peer does not answer."""
    try:
        with Peer(Place(**place), name, token) as peer:
            round_trip = peer.round_trip()
            return Measured(1e3 * round_trip, peer.burst(round_trip))
    except NotReached as error:
        return Reach(None, error.problem, Place(**place), error.who)


def share(model: str, devices: list[str]) -> Gain:
    """What devices of this host gain by computing a model's layers together."""
    # Torch and Transformers, for which no other request waits.
    import torch

    from pipespec.engine.checkpoint import inspect
    from pipespec.survey.sums import adding_up_ms, read_bytes_per_ms

    size = len(devices)
    try:
        info = inspect(model)
        info.check_shared(size, None)
    except ModelError as error:
        return Gain(str(error))
    plain = "bfloat16" if devices[0].startswith("cuda") else "float32"
    dtype = getattr(torch, info.computes_in(plain))
    layer_bytes = max(info.loaded(plain, None).layers)
    sum_ms = adding_up_ms(devices, ROWS, info.hidden_size, dtype)
    sooner_ms = layer_bytes / read_bytes_per_ms(devices[0]) * (1 - 1 / size)
    return Gain(None, sooner_ms, SUMS_PER_LAYER * sum_ms)


REQUESTS: dict[str, Callable[..., Any]] = {
    request.__name__: request for request in (hello, clock, stock, listen, reach, measure, share)
}


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer one request after another until there are no more."""
    for line in requests:
        request = json.loads(line)
        number, wish = request.pop("id"), request.pop("do")
        value = REQUESTS[wish](**request)
        answer = json.dumps({"id": number, "value": value}, default=_plain)
        answers.write(answer.encode() + b"\n")
        answers.flush()


def _plain(value: Any) -> Any:
    assert is_dataclass(value) and not isinstance(value, type)
    return asdict(value)


def main() -> None:
    """Serve on standard output; what anything else prints goes to standard error."""
    signal.alarm(LIFETIME_S)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
