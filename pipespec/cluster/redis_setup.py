"""The Redis of a cluster: a private one, or one that the user names."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from pipespec.cluster.deployment.deployment import Deployment, own_address
from pipespec.controller import epoch_control
from pipespec.controller.controller_settings import AUTO
from pipespec.controller.data_folder import KeptModel, check_model, write_model
from pipespec.controller.embedded_redis import EmbeddedRedis
from pipespec.controller.redis_connection import check_server


def require_same_model(
    deployment: Deployment, remedy: str = "remove that folder, or name another controller.data"
) -> None:
    """Raise ConfigError, which ends with `remedy`, if `controller.data` is of another model."""
    data = deployment.config.controller.data
    if data is not None:
        check_model(Path(data), kept_model(deployment), remedy)


def kept_model(deployment: Deployment) -> KeptModel:
    """The properties of the target that determine the texts of requests, and its context."""
    target, scaled_for = deployment.target, deployment.scaled_for
    held = deployment.weight_format(target)
    quantized = "" if held is None else f" quantised to {held}"
    scaled = "" if scaled_for is None else f", positions scaled for {scaled_for} tokens"
    return KeptModel(
        f"{target.path} ({target.kind}{quantized}, {deployment.dtype}{scaled})",
        # Of a cluster for one request the pools hold less; the next may hold more.
        deployment.longest,
    )


class ClusterRedis(NamedTuple):
    """The Redis of one cluster: its URLs for this process and for the workers, both with the
    password, the prefix of the cluster's keys, and the private server; None: the user's."""

    url: str
    worker_url: str
    namespace: str
    server: EmbeddedRedis | None


@contextmanager
def cluster_redis(deployment: Deployment) -> Iterator[ClusterRedis]:
    """The Redis that the user names, once it has answered, or a private one that ends with the
    block. In a Redis that others use too, the keys of this cluster have a namespace of their own,
    which is deleted after it. Raises ConfigError, ControllerError."""
    address = deployment.open_to or own_address(deployment.hosts)
    config = deployment.config.controller
    if config.url is None:
        data = None if config.data is None else Path(config.data)
        with EmbeddedRedis(
            addresses=() if address is None else (address,),
            port=None if address is None else config.port,
            data=data,
            tls=config.tls == AUTO,
        ) as server:
            if data is not None:
                write_model(data, kept_model(deployment))
            worker_url = server.url if address is None else server.url_at(address)
            yield ClusterRedis(server.url, worker_url, config.namespace, server)
        return
    check_server(config.url, namespace=config.namespace)
    namespace = f"{config.namespace}:{secrets.token_hex(4)}"
    try:
        yield ClusterRedis(config.url, config.url, namespace, None)
    finally:
        epoch_control.delete_namespace(config.url, namespace)
