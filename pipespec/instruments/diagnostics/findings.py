"""The results of `pipespec doctor`: reports on hosts and links, and findings."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipespec.instruments.diagnostics.inventory import Inventory
from pipespec.instruments.diagnostics.probe import (
    LinkSpeed,
    Listening,
    Reachability,
    TensorParallelGain,
)


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem: a sentence with its remedy, and the hosts that it concerns.

    An *error* keeps the hosts from working together, or from generating the same text everywhere;
    other findings are warnings.
    """

    error: bool
    hosts: tuple[str, ...]
    sentence: str


@dataclass(frozen=True, slots=True)
class Offset:
    """How far a host's clock is ahead of ours, give or take half a round trip; seconds."""

    offset_s: float
    margin_s: float


@dataclass(slots=True)
class HostReport:
    """What is known of a host. `failure` has ended its examination, if it is not None.

    `gains` are those of its tensor-parallel groups, by the worker that leads each.
    """

    inventory: Inventory | None = None
    listening: Listening | None = None
    clock: Offset | None = None
    failure: str | None = None
    gains: dict[str, TensorParallelGain] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LinkReport:
    """What is known of the link from one host to another."""

    source: str
    to: str
    reach: Reachability
    measured: LinkSpeed | None
