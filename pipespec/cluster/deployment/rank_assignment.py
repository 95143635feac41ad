"""Maps workers to ranks and layers for one epoch. Pure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from itertools import pairwise

from pipespec.config.hosts import Host
from pipespec.engine.attention.select import AUTO
from pipespec.transport.transport import LinkKind
from pipespec.transport.transport_settings import YES


@dataclass(frozen=True)
class RankAssignment:
    """The worker of each rank in an epoch, the head's first, and the layers of each stage, from
    rank 1 on; sent as JSON. `followers` are those that compute each rank with it; empty: none has
    any. `joined` are hosts that came after the cluster began, which older workers do not know.
    `others`: the workers without a rank then, for who looks at the cluster."""

    workers: tuple[str, ...]
    layers: tuple[range, ...]
    followers: tuple[tuple[str, ...], ...] = ()
    joined: tuple[Host, ...] = ()
    others: tuple[str, ...] = field(default=(), compare=False)

    @property
    def ranks(self) -> tuple[object, ...]:
        """What an epoch is of: who computes which layers."""
        return self.workers, self.layers, self.followers

    @property
    def everyone(self) -> tuple[str, ...]:
        """All workers of the epoch, those that hold ranks first."""
        return (*self.workers, *(worker for each in self.followers for worker in each))

    def members(self, rank: int) -> tuple[str, ...]:
        return (self.workers[rank], *(self.followers[rank] if self.followers else ()))

    def place_of(self, worker: str) -> tuple[int, int] | None:
        """The rank of a worker and its index among the members of the rank; None: it is a spare."""
        for rank in range(len(self.workers)):
            if worker in (members := self.members(rank)):
                return rank, members.index(worker)
        return None

    def links(self, seal: str) -> tuple[LinkKind, ...]:
        """How each rank but the last is linked to the next one, where `transport.seal` is `seal`.
        This is the only rule, so both ends of a link agree."""
        return tuple(_link(*ends, seal) for ends in pairwise(self.workers))

    def return_link(self, seal: str) -> LinkKind:
        """How the last rank is linked back to the head, where it returns features to it."""
        return _link(self.workers[-1], self.workers[0], seal)

    def encode(self) -> str:
        return json.dumps(
            {
                "workers": self.workers,
                "layers": [[part.start, part.stop] for part in self.layers],
                "followers": self.followers,
                "joined": [asdict(host) for host in self.joined],
                "others": self.others,
            }
        )

    @classmethod
    def decode(cls, text: str) -> RankAssignment:
        found = json.loads(text)
        layers = tuple(range(start, stop) for start, stop in found["layers"])
        followers = tuple(tuple(each) for each in found["followers"])
        joined = tuple(
            Host(**{**each, "devices": tuple(each["devices"]), "groups": tuple(each["groups"])})
            for each in found["joined"]
        )
        others = tuple(found.get("others", ()))
        return cls(tuple(found["workers"]), layers, followers, joined, others)


class WeightsPending(Exception):
    """The hosts of a new assignment get their weights first; ask for it again."""


def _link(sender: str, receiver: str, seal: str) -> LinkKind:
    local = sender.rpartition("/")[0] == receiver.rpartition("/")[0]
    return LinkKind(local, seal == YES or (seal == AUTO and not local))
