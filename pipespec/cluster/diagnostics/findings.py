"""The results of `pipespec doctor`: reports on hosts and links, and findings."""

from __future__ import annotations

from dataclasses import dataclass

from pipespec.cluster.diagnostics.inventory import Inventory
from pipespec.cluster.diagnostics.probe import Link, Listening


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem: a sentence with its remedy, and the hosts that it concerns.

    An *error* keeps the hosts from working together, or from generating the same text everywhere;
    other findings are warnings.
    """

    error: bool
    hosts: tuple[str, ...]
    sentence: str


@dataclass(slots=True)
class HostReport:
    """What is known of a host. `failure` has ended its examination, if it is not None."""

    inventory: Inventory | None = None
    listening: Listening | None = None
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class LinkReport(Link):
    """What is known of the link from one host to another."""

    source: str
    to: str
