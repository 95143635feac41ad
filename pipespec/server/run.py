"""Runs a server until a signal asks for its end."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Callable

import uvicorn

from pipespec.client.aio import attach
from pipespec.client.registry import RunningCluster
from pipespec.errors import ConfigError
from pipespec.server.app import make_app
from pipespec.server.options import ServerOptions
from pipespec.server.service import Service

# Connections that wait to be taken.
BACKLOG = 2048


def bound(host: str, port: int) -> socket.socket:
    """The socket on which requests come. Raises ConfigError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"Nothing can listen at {host!r}, port {port} ({error.strerror}); choose another "
            "--host or --port."
        ) from None
    return listener


async def serve(
    running: RunningCluster,
    options: ServerOptions,
    listener: socket.socket,
    on_ready: Callable[[], None],
) -> None:
    """Answer requests until SIGINT or SIGTERM; then finish what runs, within
    `options.shutdown_timeout`."""
    async with attach(running, options.patience) as client:
        app = make_app(Service(client, options))
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,  # a prompt has no business in a log, nor has who asks
            lifespan="off",
            backlog=BACKLOG,
            server_header=False,
            timeout_graceful_shutdown=math.ceil(options.shutdown_timeout),
        )
        server = _Server(config, on_ready)
        try:
            await server.serve(sockets=[listener])
        except KeyboardInterrupt:
            # uvicorn hands the signal on once it has ended.
            return


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]):
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()


def run(
    running: RunningCluster,
    options: ServerOptions,
    listener: socket.socket,
    on_ready: Callable[[], None],
) -> None:
    """`serve`, in an event loop of its own."""
    asyncio.run(serve(running, options, listener, on_ready))
