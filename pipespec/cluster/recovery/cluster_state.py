"""The state of a cluster as other threads than the recovery's see it, and what they ask of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pipespec.cluster.deployment.rank_assignment import RankAssignment
from pipespec.cluster.processes.fault_stats import Fault


@dataclass(frozen=True)
class ClusterState:
    """The state of a cluster that other threads than the recovery's may read."""

    epoch: int  # the newest
    assignment: RankAssignment  # of that epoch
    faults: tuple[Fault, ...] = ()  # which ended earlier epochs, or will end this one
    failure: str | None = None  # why the cluster was given up
    complete: bool = False  # whether all ranks have joined that epoch
    away: frozenset[str] = frozenset()  # workers that others have replaced


@dataclass(frozen=True)
class LayoutChange:
    """Another assignment, which is no consequence of a fault: a host joins or leaves. `reason` is a
    clause for the log; the recovery's thread calls `on_begun` when the epoch begins."""

    assignment: RankAssignment
    reason: str
    on_begun: Callable[[], None]
