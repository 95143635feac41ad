"""Decides which host gets which tensors from where. Pure.

Every tensor that no host has comes from the hub once, and every other one from the hosts that have
it; a host that gets a tensor passes it on to others while it arrives. Of those that can send
tensors, the host that sends least so far does, so one host does not send the same bytes to several
if others can.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pipespec.engine.checkpoint_parts.ranges import PIECE_BYTES

# A tensor: model, file, name in the file.
Key = tuple[str, str, str]
# Among the names of sources, of which hosts' have no blanks.
HUB = "the hub"


@dataclass(frozen=True)
class Transfer:
    """Tensors of one model that a host gets from a source.

    Attributes:
        depth: how many hosts on their way get them in this plan too: 0 if the source has them now.
    """

    to: str
    source: str
    kind: str
    depth: int
    keys: list[Key] = field(default_factory=list)


class NoSource(Exception):
    """No host has a tensor, and the hub cannot be asked for it."""

    def __init__(self, host: str, key: Key) -> None:
        super().__init__(host, key)
        self.host, self.key = host, key


def plan_transfers(
    lacks: Mapping[str, Collection[Key]],
    holders: Mapping[str, Collection[Key]],
    num_bytes: Callable[[Key], int],
    on_hub: Collection[str],
) -> list[Transfer]:
    """The transfers after which all hosts have what they lack, by depth. Raises NoSource.

    Args:
        lacks: by host, in the order in which hosts are asked to fetch from the hub.
        holders: the tensors that hosts have.
        num_bytes: the size of a tensor.
        on_hub: the models of which the hub has every tensor.
    """
    having: defaultdict[Key, list[str]] = defaultdict(list)
    for host, keys in holders.items():
        for key in keys:
            having[key].append(host)
    needed: defaultdict[Key, list[str]] = defaultdict(list)
    for host, keys in lacks.items():
        for key in keys:
            needed[key].append(host)
    sent = Counter[str]()
    found: dict[tuple[str, str, str, int], Transfer] = {}
    runs = [
        (keys, needed[keys[0]], having[keys[0]])
        for keys in _runs(sorted(needed), lambda key: (needed[key], having[key]), num_bytes)
    ]
    # What can be sent by one host alone comes first; the others' work is divided accordingly.
    for keys, needers, senders in sorted(runs, key=lambda run: len(run[1]) + len(run[2])):
        size = sum(map(num_bytes, keys))
        ready = {host: 0 for host in senders if host not in needers}
        if not ready and keys[0][0] not in on_hub:
            raise NoSource(needers[0], keys[0])
        for host in sorted(needers, key=lambda each: sent[each]):
            source = min(ready, key=lambda each: (sent[each], ready[each]), default=HUB)
            depth = ready.get(source, 0)
            sent[source] += size
            ready[host] = depth + 1
            place = host, source, keys[0][0], depth
            found.setdefault(place, Transfer(*place)).keys.extend(keys)
    return sorted(found.values(), key=lambda each: each.depth)


def _runs(
    keys: Sequence[Key], hosts: Callable[[Key], object], num_bytes: Callable[[Key], int]
) -> Iterator[list[Key]]:
    """Neighbours that the same hosts lack and have, of about a piece of a file."""
    run: list[Key] = []
    size = 0
    for key in keys:
        if run and (size >= PIECE_BYTES or key[:2] != run[0][:2] or hosts(key) != hosts(run[0])):
            yield run
            run, size = [], 0
        run.append(key)
        size += num_bytes(key)
    if run:
        yield run


def by_file(keys: Collection[Key]) -> dict[str, list[str]]:
    """Their names, by file."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for _, file, name in keys:
        found[file].append(name)
    return found
