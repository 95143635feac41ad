"""Who holds which rank when workers are lost, and where the ranks then meet."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

from pipespec.cluster.deployment import Deployment
from pipespec.cluster.rank_assignment import RankAssignment
from pipespec.config.hosts import Host
from pipespec.errors import ConfigError
from pipespec.planning.partition import remaining
from pipespec.system.interfaces import source_address


def own_address(hosts: Sequence[Host]) -> str | None:
    """This machine's address towards the hosts; None: it is all the cluster."""
    far = next((host.address for host in hosts if not host.local), None)
    if far is None:
        return None
    try:
        return source_address(far, socket.AF_INET)
    except OSError as error:
        raise ConfigError(
            f"This machine has no route to {far} ({error.strerror}); correct the address."
        ) from error


def address_of(deployment: Deployment, worker: str, own: str | None) -> str:
    """The address of a worker's host, `own` being this machine's."""
    host = next(host for host in deployment.hosts if worker in host.workers)
    return own if own is not None and host.local else host.address


def replanner(deployment: Deployment, own: str | None) -> Callable[[set[str]], RankAssignment]:
    """What makes an assignment without the workers that are lost."""

    def replan(lost: set[str]) -> RankAssignment:
        # Who computes a stage with others is of no use without them.
        found = remaining(
            deployment.placement,
            {
                worker
                for worker in (*deployment.workers, *deployment.spares)
                if lost & {worker, *deployment.followers_of(worker)}
            },
        )
        if deployment.config.cluster.groups is not None and len(found.layers) != len(
            deployment.layers
        ):
            raise ConfigError("fewer stages do not fit cluster.groups; set spares aside.")
        head = found.workers_by_rank[0]
        return RankAssignment(
            found.workers_by_rank,
            found.layers,
            address_of(deployment, head, own),
            tuple(map(deployment.followers_of, found.workers_by_rank)),
        )

    return replan
