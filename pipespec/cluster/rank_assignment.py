"""Who does what in one epoch of a cluster. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass(frozen=True)
class RankAssignment:
    """Who holds which rank in an epoch; it travels as JSON.

    Attributes:
        workers: who holds each rank, the head's first.
        layers: of each stage, from rank 1 on.
        address: of the head's host, where the ranks meet.
        followers: of each rank, the workers that compute it with the one that holds it; none for
            any: every rank is one worker.
    """

    workers: tuple[str, ...]
    layers: tuple[range, ...]
    address: str
    followers: tuple[tuple[str, ...], ...] = ()

    @property
    def everyone(self) -> tuple[str, ...]:
        """All workers that compute, those that hold ranks first."""
        return (*self.workers, *(worker for each in self.followers for worker in each))

    def members(self, rank: int) -> tuple[str, ...]:
        """The workers that compute a rank, the one that holds it first."""
        return (self.workers[rank], *(self.followers[rank] if self.followers else ()))

    def place_of(self, worker: str) -> tuple[int, int] | None:
        """The rank that a worker computes and which of its members it is, 0 for the one that holds
        it; None: it is a spare."""
        for rank in range(len(self.workers)):
            if worker in (members := self.members(rank)):
                return rank, members.index(worker)
        return None

    def encode(self) -> str:
        return json.dumps(
            {
                "workers": self.workers,
                "layers": [[part.start, part.stop] for part in self.layers],
                "address": self.address,
                "followers": self.followers,
            }
        )

    @classmethod
    def decode(cls, text: str) -> RankAssignment:
        """The inverse of `encode`."""
        found = json.loads(text)
        layers = tuple(range(start, stop) for start, stop in found["layers"])
        followers = tuple(tuple(each) for each in found["followers"])
        return cls(tuple(found["workers"]), layers, found["address"], followers)
