"""Decides which host gets which pieces of weight files from where. Pure.

Every piece that no host has comes from the hub once, and every other one from the hosts that have
it; a host that gets a piece passes it on to others once it is there. Of those that can send it, the
host that sends least so far does, so one host does not send the same bytes to several if others
can.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from pipespec.errors import ModelError

# A piece: model, file, start and stop.
Key = tuple[str, str, int, int]
# Among the names of sources, of which hosts' have no blanks.
HUB = "the hub"
# Of neighbours that the same hosts lack and have, which are sent together.
RUN_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Transfer:
    """Pieces of one model that a host gets from a source.

    Attributes:
        depth: how many hosts on their way get them in this plan too: 0 if the source has them now.
    """

    to: str
    source: str
    kind: str
    depth: int
    keys: list[Key] = field(default_factory=list)


def plan_transfers(
    lacks: Mapping[str, Collection[Key]],
    holders: Mapping[str, Collection[Key]],
    on_hub: Collection[str],
) -> list[Transfer]:
    """The transfers after which all hosts have what they lack, by depth.

    Args:
        lacks: by host, in the order in which hosts are asked to fetch from the hub.
        holders: the pieces that hosts have.
        on_hub: the models of which the hub has every piece.

    Raises ModelError if no host has a piece, and the hub cannot be asked for it.
    """
    having, needed = _by_key(holders), _by_key(lacks)
    runs: list[list[Key]] = []
    for key in sorted(needed):
        run = runs[-1] if runs else [("", "", 0, 0)]
        alike = all(by.get(key) == by.get(run[0]) for by in (having, needed))
        if alike and key[:2] == run[0][:2] and _num_bytes(run) < RUN_BYTES:
            run.append(key)
        else:
            runs.append([key])
    sent = Counter[str]()
    found: dict[tuple[str, str, str, int], Transfer] = {}
    # What can be sent by one host alone comes first; the others' work is divided accordingly.
    for run in sorted(
        runs, key=lambda run: sum(len(by.get(run[0], ())) for by in (needed, having))
    ):
        (kind, file, *_), needers = run[0], needed[run[0]]
        ready = {host: 0 for host in having.get(run[0], ()) if host not in needers}
        if not ready and kind not in on_hub:
            raise ModelError(
                f"{needers[0]} needs bytes of {file} of the {kind} that no host has; copy {file} "
                "to one of them"
            )
        for host in sorted(needers, key=lambda each: sent[each]):
            source = min(ready, key=lambda each: (sent[each], ready[each]), default=HUB)
            depth = ready.get(source, 0)
            sent[source] += _num_bytes(run)
            ready[host] = depth + 1
            place = host, source, kind, depth
            found.setdefault(place, Transfer(*place)).keys.extend(run)
    return sorted(found.values(), key=lambda each: each.depth)


def by_file(keys: Collection[Key]) -> dict[str, list[tuple[int, int]]]:
    """The pieces, by file."""
    found: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for _, file, start, stop in keys:
        found[file].append((start, stop))
    return found


def _by_key(keys: Mapping[str, Collection[Key]]) -> dict[Key, list[str]]:
    """The hosts of each piece."""
    found: defaultdict[Key, list[str]] = defaultdict(list)
    for host, each in keys.items():
        for key in each:
            found[key].append(host)
    return dict(found)


def _num_bytes(keys: Collection[Key]) -> int:
    return sum(stop - start for *_, start, stop in keys)
