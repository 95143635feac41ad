"""Assigns the ranks of a deployment to workers, in the first epoch and after workers were lost."""

from __future__ import annotations

from pipespec.cluster.deployment.deployment import Deployment
from pipespec.cluster.deployment.rank_assignment import RankAssignment
from pipespec.errors import ConfigError
from pipespec.placement.slices import Placement, remaining


class WeightsPending(Exception):
    """The hosts of a new assignment get their weights first; ask for it again."""


def first_assignment(deployment: Deployment) -> RankAssignment:
    """The assignment of the first epoch."""
    return assignment_of(deployment, deployment.placement)


def placement_without(deployment: Deployment, lost: set[str]) -> Placement:
    """The layout over the workers that are left. Raises ConfigError if they are too few."""
    # The members of a tensor-parallel group cannot compute without one another.
    unusable = {
        worker
        for worker in (*deployment.workers, *deployment.spares)
        if lost & {worker, *deployment.followers_of(worker)}
    }
    found = remaining(deployment.placement, unusable)
    fewer = len(found.layers) != len(deployment.layers)
    if deployment.config.cluster.groups is not None and fewer:
        raise ConfigError("fewer stages do not fit cluster.groups; set spares aside.")
    return found


def assignment_without(deployment: Deployment, lost: set[str]) -> RankAssignment:
    """The assignment to the workers that are left. Raises ConfigError if they are too few."""
    return assignment_of(deployment, placement_without(deployment, lost))


def assignment_of(deployment: Deployment, placement: Placement) -> RankAssignment:
    """The assignment of a layout."""
    workers = placement.workers_by_rank
    followers = tuple(map(deployment.followers_of, workers))
    joined = deployment.joined
    return RankAssignment(workers, placement.layers, followers, joined, deployment.changes)
