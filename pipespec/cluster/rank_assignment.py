"""Who does what in one epoch of a cluster. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass(frozen=True)
class RankAssignment:
    """The plan of an epoch, which travels as JSON.

    Attributes:
        members: who holds each rank, the head's first.
        layers: of each stage, from rank 1 on.
        address: of the head's box, where the ranks meet.
    """

    members: tuple[str, ...]
    layers: tuple[range, ...]
    address: str

    def rank_of(self, member: str) -> int | None:
        """The rank that a member holds; None: it is a spare."""
        return self.members.index(member) if member in self.members else None

    def encode(self) -> str:
        return json.dumps(
            {
                "members": self.members,
                "layers": [[part.start, part.stop] for part in self.layers],
                "address": self.address,
            }
        )

    @classmethod
    def decode(cls, text: str) -> RankAssignment:
        """The inverse of `encode`."""
        found = json.loads(text)
        layers = tuple(range(start, stop) for start, stop in found["layers"])
        return cls(tuple(found["members"]), layers, found["address"])
