"""A client of a cluster that this process starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from pipespec.client.client import Client
from pipespec.client.served import ServedModel
from pipespec.cluster import session
from pipespec.cluster.deployment import Deployment
from pipespec.cluster.session import ClusterSession


class Running(NamedTuple):
    """A cluster that this process runs, and a client of it."""

    cluster: ClusterSession
    client: Client


@contextmanager
def asking(cluster: ClusterSession, served: ServedModel) -> Iterator[Client]:
    """A client of a cluster that runs. What it has not read to the end may stay open."""
    with cluster.open_log() as log:
        yield Client(cluster, served, log)


@contextmanager
def running(
    deployment: Deployment,
    on_loaded: Callable[[int, int], None] = lambda ranks, of: None,
    on_log: Callable[[str, str], None] | None = None,
) -> Iterator[Running]:
    """Start the cluster of a deployment and ask it; it ends with the block.

    Raises what `session.prepare`, `session.start` and `ServedModel.of` do.
    """
    with session.prepare(deployment) as agents:
        served = ServedModel.of(deployment)
        with (
            session.start(deployment, agents, on_loaded, on_log) as cluster,
            asking(cluster, served) as client,
        ):
            yield Running(cluster, client)
