"""What `pipespec doctor` knows of the boxes and the links between them, and what it finds wrong."""

from __future__ import annotations

from dataclasses import dataclass

from pipespec.survey.inventory import Inventory
from pipespec.survey.probe import Listening, Measured, Reach


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as it should be: a sentence with the remedy, and whom it concerns.

    An *error* keeps the boxes from working together, or from giving the same text everywhere;
    anything else is worth knowing.
    """

    error: bool
    boxes: tuple[str, ...]
    sentence: str


@dataclass(frozen=True, slots=True)
class Offset:
    """How far a box's clock is ahead of ours, give or take half a round trip; seconds."""

    offset_s: float
    margin_s: float


@dataclass(slots=True)
class Seen:
    """What was learned of a box before `failure`, if there was one, ended that."""

    inventory: Inventory | None = None
    listening: Listening | None = None
    clock: Offset | None = None
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Link:
    """What was learned of the way from a box to another."""

    source: str
    to: str
    reach: Reach
    measured: Measured | None
