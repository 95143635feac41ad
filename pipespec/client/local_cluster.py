"""A client of a cluster that this process starts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from pipespec.client.model_info import ModelInfo
from pipespec.client.registry import Owner, RunningCluster
from pipespec.client.request_settings import group
from pipespec.client.sync_client import Client, attach
from pipespec.cluster.session import ClusterSession
from pipespec.config.hosts import own_name


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
    """A client of a cluster that runs."""
    return attach(own_entry(cluster, served), own=cluster)
