"""The Redis of a cluster: a private one, or one that the user names."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipespec.cluster.deployment import Deployment
from pipespec.controller import epochs
from pipespec.controller.connection import check_server
from pipespec.controller.data_folder import KeptModel, check_model, write_model
from pipespec.controller.listen import TlsFiles
from pipespec.controller.server import EmbeddedRedis


def require_same_model(
    deployment: Deployment, remedy: str = "remove that folder, or name another controller.data"
) -> None:
    """Raise ConfigError, which ends with `remedy`, if the data of an earlier cluster is to be
    taken up that was of another model."""
    data = deployment.config.controller.data
    if data is not None:
        check_model(Path(data), kept_model(deployment), remedy)


def kept_model(deployment: Deployment) -> KeptModel:
    """What decides which texts the requests to a cluster get, and how long they may be."""
    target, model = deployment.target, deployment.config.model
    held = deployment.held(target)
    quantized = "" if held is None else f" quantised to {held}"
    return KeptModel(
        f"{target.path} ({target.kind}{quantized}, {deployment.dtype})",
        # Of a cluster for one request the pools hold less; the next may hold more.
        model.context or target.context,
    )


@contextmanager
def store(
    deployment: Deployment, address: str | None
) -> Iterator[tuple[str, str, str, EmbeddedRedis | None]]:
    """URL here and for the workers, namespace, server: the user's Redis, once it has answered,
    or a private one, which other hosts reach at `address`.

    In a Redis that others use too, this run's keys have a namespace of their own, and are gone
    after it.
    """
    config = deployment.config.controller
    if config.url is None:
        data = None if config.data is None else Path(config.data)
        with EmbeddedRedis(
            addresses=() if address is None else (address,),
            port=None if address is None else config.port,
            data=data,
            tls=None if config.tls is None else TlsFiles.of(Path(config.tls)),
        ) as server:
            if data is not None:
                write_model(data, kept_model(deployment))
            elsewhere = server.url if address is None else server.url_at(address)
            yield server.url, elsewhere, config.namespace, server
        return
    check_server(config.url, namespace=config.namespace)
    namespace = f"{config.namespace}:{secrets.token_hex(4)}"
    try:
        yield config.url, config.url, namespace, None
    finally:
        epochs.forget(config.url, namespace)
