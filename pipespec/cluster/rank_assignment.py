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
    """

    workers: tuple[str, ...]
    layers: tuple[range, ...]
    address: str

    def rank_of(self, worker: str) -> int | None:
        """The rank that a worker holds; None: it is a spare."""
        return self.workers.index(worker) if worker in self.workers else None

    def encode(self) -> str:
        return json.dumps(
            {
                "workers": self.workers,
                "layers": [[part.start, part.stop] for part in self.layers],
                "address": self.address,
            }
        )

    @classmethod
    def decode(cls, text: str) -> RankAssignment:
        """The inverse of `encode`."""
        found = json.loads(text)
        layers = tuple(range(start, stop) for start, stop in found["layers"])
        return cls(tuple(found["workers"]), layers, found["address"])
