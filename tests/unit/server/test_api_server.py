import asyncio
import socket
from contextlib import closing

import pytest

from pipespec.client.registry import RunningCluster
from pipespec.errors import ConfigError
from pipespec.server.api_server import run_api_server
from pipespec.server.listener import bind_listener
from pipespec.server.options import ServerOptions


@pytest.mark.parametrize("host", ["a..b", "a" * 64 + ".example", "not-a-host.invalid"])
def test_a_host_that_no_name_can_be_is_one_sentence(host: str) -> None:
    with pytest.raises(ConfigError, match=r"Nothing can listen at .*; choose another --host"):
        bind_listener(host, 0)


def test_connections_are_accepted_before_the_cluster_is_found() -> None:
    def watch() -> RunningCluster | None:
        """The server looks for its cluster, which is not up."""
        with closing(socket.create_connection(listener.getsockname())):
            raise ConfigError("No cluster is up.")

    options = ServerOptions(("demo",), shutdown_timeout=0)
    listener = bind_listener("127.0.0.1", 0)
    with closing(listener), pytest.raises(ConfigError, match="No cluster is up"):
        asyncio.run(run_api_server(watch, options, listener, lambda running: None))
