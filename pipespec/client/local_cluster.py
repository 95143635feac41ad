"""A client of a cluster that this process starts."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager

from pipespec.client.model_info import ModelInfo
from pipespec.client.registry import Owner, RunningCluster
from pipespec.client.request_settings import group
from pipespec.client.sync_client import Client, attach
from pipespec.cluster.session import ClusterSession


def running_cluster(
    cluster: ClusterSession,
    served: ModelInfo,
    settings: Sequence[str] = (),
    name: str | None = None,
) -> RunningCluster:
    """The registry's entry of a cluster of this process, made by `settings`; without a `name` it is
    called as its keys are."""
    return RunningCluster(
        name=name or cluster.namespace,
        url=cluster.url,
        namespace=cluster.namespace,
        epoch=cluster.epoch,
        owner=Owner.this(),
        host=socket.gethostname(),
        # Those of the controller may hold a password, and `url` says it all.
        overrides=tuple(text for text in settings if group(text) != "controller"),
        served=served,
        num_ranks=cluster.deployment.num_ranks,
        started=time.time(),
    )


def asking(cluster: ClusterSession, served: ModelInfo) -> AbstractContextManager[Client]:
    """A client of a cluster that runs."""
    return attach(running_cluster(cluster, served), own=cluster)
