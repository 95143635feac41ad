"""What `pipespec doctor` knows of the hosts and the links between them, and what it finds wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pipespec.survey.inventory import Inventory
from pipespec.survey.probe import Gain, Listening, Measured, Reach


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as it should be: a sentence with the remedy, and whom it concerns.

    An *error* keeps the hosts from working together, or from giving the same text everywhere;
    anything else is worth knowing.
    """

    error: bool
    hosts: tuple[str, ...]
    sentence: str

    def as_json(self) -> dict[str, Any]:
        """The same as plain values; `boxes` is the JSON's name of the hosts."""
        return {"error": self.error, "boxes": self.hosts, "sentence": self.sentence}


@dataclass(frozen=True, slots=True)
class Offset:
    """How far a host's clock is ahead of ours, give or take half a round trip; seconds."""

    offset_s: float
    margin_s: float


@dataclass(slots=True)
class Seen:
    """What was learned of a host before `failure`, if there was one, ended that.

    `gains` are those of its groups of devices, by the worker that leads each.
    """

    inventory: Inventory | None = None
    listening: Listening | None = None
    clock: Offset | None = None
    failure: str | None = None
    gains: dict[str, Gain] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Link:
    """What was learned of the way from a host to another."""

    source: str
    to: str
    reach: Reach
    measured: Measured | None
