"""The Redis of a cluster: a private one, or one that the user names."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipespec.config.schema import ControllerConfig
from pipespec.controller.client import Controller
from pipespec.controller.connection import check_server
from pipespec.controller.listen import TlsFiles
from pipespec.controller.server import EmbeddedRedis


@contextmanager
def store(
    config: ControllerConfig, address: str | None
) -> Iterator[tuple[str, str, str, EmbeddedRedis | None]]:
    """URL here and for the workers, namespace, server: the user's Redis, once it has answered,
    or a private one, which other hosts reach at `address`.

    In a Redis that others use too, this run's keys have a namespace of their own, and are gone
    after it.
    """
    if config.url is None:
        with EmbeddedRedis(
            addresses=() if address is None else (address,),
            port=None if address is None else config.port,
            data=None if config.data is None else Path(config.data),
            tls=None if config.tls is None else TlsFiles.of(Path(config.tls)),
        ) as server:
            elsewhere = server.url if address is None else server.url_at(address)
            yield server.url, elsewhere, config.namespace, server
        return
    check_server(config.url, namespace=config.namespace)
    namespace = f"{config.namespace}:{secrets.token_hex(4)}"
    try:
        yield config.url, config.url, namespace, None
    finally:
        Controller.forget(config.url, namespace)
