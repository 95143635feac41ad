"""Runs a server until a signal asks for its end."""

from __future__ import annotations

import asyncio
import math
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import uvicorn

from pipespec.client.aio import attach
from pipespec.client.registry import RunningCluster
from pipespec.errors import ConfigError, PipespecError
from pipespec.server.app import make_app
from pipespec.server.options import ServerOptions
from pipespec.server.service import Service

# Connections that wait to be taken.
BACKLOG = 2048
# How long clients may take to hear that there will be no more.
TOLD_S = 2.0
# Signals that ask for the end; the second one does not wait.
ENDING = (signal.SIGINT, signal.SIGTERM)
# How often it is looked whether the cluster's launcher lives.
WATCH_S = 0.1


def bound(host: str, port: int) -> socket.socket:
    """The socket on which requests come. Raises ConfigError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with ExitStack() as unless_bound:
            listener = unless_bound.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            unless_bound.pop_all()
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
    watch: Callable[[], None] | None = None,
) -> None:
    """Answer requests until SIGINT or SIGTERM; then finish what runs, within
    `options.shutdown_timeout`.

    `watch` is called again and again meanwhile; the server ends with the PipespecError that it
    raises.
    """
    async with attach(running, options.patience) as client:
        service = Service(client, options)
        config = uvicorn.Config(
            make_app(service),
            log_level="warning",
            access_log=False,  # a prompt has no business in a log, nor has who asks
            lifespan="off",
            backlog=BACKLOG,
            server_header=False,
            timeout_graceful_shutdown=math.ceil(options.shutdown_timeout + TOLD_S),
        )
        server = _Server(config, service, on_ready)
        watching = asyncio.ensure_future(_watched(server, watch or (lambda: None)))
        try:
            await server.serve(sockets=[listener])
        finally:
            watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching


async def _watched(server: uvicorn.Server, watch: Callable[[], None]) -> None:
    while True:
        try:
            watch()
        except PipespecError:
            server.should_exit = True
            raise
        await asyncio.sleep(WATCH_S)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, service: Service, on_ready: Callable[[], None]):
        super().__init__(config)
        self._service = service
        self._on_ready = on_ready

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn hands signals on once it has ended; ours have then done what they should.
        before = {number: signal.signal(number, self.handle_exit) for number in ENDING}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        timeout = self._service.options.shutdown_timeout
        ending = asyncio.get_running_loop().call_later(timeout, self._service.end)
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()
