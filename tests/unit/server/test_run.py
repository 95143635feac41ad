"""The server around the routes."""

from __future__ import annotations

import asyncio
import socket
from contextlib import closing

import pytest

from pipespec.client.registry import RunningCluster
from pipespec.errors import ConfigError
from pipespec.server.options import ServerOptions
from pipespec.server.run import bound, serve


def test_who_asks_while_the_cluster_is_sought_is_not_refused() -> None:
    listener = bound("127.0.0.1", 0)

    def find() -> RunningCluster | None:
        with closing(socket.create_connection(listener.getsockname())):
            raise ConfigError("No cluster is up.")

    options = ServerOptions(("demo",), shutdown_timeout=0)
    with closing(listener), pytest.raises(ConfigError, match="No cluster is up"):
        asyncio.run(serve(find, options, listener, lambda running: None))
