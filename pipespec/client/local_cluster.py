"""A client of a cluster that this process starts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import NamedTuple

from pipespec.client.model_info import ModelInfo
from pipespec.client.registry import Owner, RunningCluster
from pipespec.client.request_settings import group
from pipespec.client.sync_client import Client, attach
from pipespec.cluster import session
from pipespec.cluster.deployment.deployment import Deployment
from pipespec.cluster.session import ClusterSession
from pipespec.config.hosts import own_name


class Running(NamedTuple):
    """A cluster that this process runs, and a client of it."""

    cluster: ClusterSession
    client: Client


def running_cluster(
    name: str, cluster: ClusterSession, served: ModelInfo, settings: Sequence[str] = ()
) -> RunningCluster:
    """The registry's entry of a cluster of this process, made by `settings`."""
    return RunningCluster(
        name=name,
        url=cluster.redis.worker_url,
        namespace=cluster.namespace,
        epoch=cluster.epoch,
        owner=Owner.this(),
        host=own_name(),
        # Those of the controller may hold a password, and `url` says it all.
        overrides=tuple(text for text in settings if group(text) != "controller"),
        served=served,
        num_ranks=cluster.deployment.num_ranks,
        started=time.time(),
    )


def own_entry(
    cluster: ClusterSession, served: ModelInfo, settings: Sequence[str] = ()
) -> RunningCluster:
    namespace = cluster.deployment.config.controller.namespace
    return replace(running_cluster(namespace, cluster, served, settings), url=cluster.url)


def asking(cluster: ClusterSession, served: ModelInfo) -> AbstractContextManager[Client]:
    """A client of a cluster that runs. What it has not read to the end may stay open."""
    return attach(own_entry(cluster, served), own=cluster)


@contextmanager
def running(
    deployment: Deployment,
    on_log: Callable[[str, str], None] | None = None,
) -> Iterator[Running]:
    """Start the cluster of a deployment and ask it; it ends with the block."""
    with session.start_agents(deployment) as agents:
        served = ModelInfo.of(deployment)
        with (
            session.start_cluster(deployment, agents, on_log=on_log) as cluster,
            asking(cluster, served) as client,
        ):
            yield Running(cluster, client)
