"""Runs a server until a signal asks for its end."""

from __future__ import annotations

import asyncio
import math
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from pipespec.client.aio import attach
from pipespec.client.registry import RunningCluster
from pipespec.errors import ConfigError, PipespecError
from pipespec.server.app import make_app, make_loading_app
from pipespec.server.options import ServerOptions
from pipespec.server.service import Service
from pipespec.system.outcome import OutputClosedError

# Connections that wait to be taken.
BACKLOG = 2048
# How long clients may take to hear that there will be no more.
TOLD_S = 2.0
# Signals that ask for the end; the second one does not wait.
ENDING = (signal.SIGINT, signal.SIGTERM)
# How often it is looked whether the cluster is ready, and whether its launcher lives.
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
    find: Callable[[], RunningCluster | None],
    options: ServerOptions,
    listener: socket.socket,
    on_ready: Callable[[RunningCluster], None],
) -> int | None:
    """Answer requests until SIGINT or SIGTERM; then finish what runs, within
    `options.shutdown_timeout`.

    `find` is called again and again: the cluster, or None as long as it loads, while everything
    is refused. The server ends with the PipespecError that it raises. `on_ready` is called once,
    when there is a cluster.

    Returns the signal if it came before that, else None.
    """
    listener.listen(BACKLOG)  # who asks from now on waits and is not refused
    door = _Door(make_loading_app(options))
    config = uvicorn.Config(
        door,
        log_level="warning",
        access_log=False,  # a prompt has no business in a log, nor has who asks
        lifespan="off",
        backlog=BACKLOG,
        server_header=False,
        timeout_graceful_shutdown=math.ceil(options.shutdown_timeout + TOLD_S),
    )
    server = _Server(config)
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    problem: Exception | None = None
    try:
        running = await _found(find, serving)
        if running is None:
            return server.ended_by
        async with attach(running, options.patience) as client:
            server.service = Service(client, options)
            door.app = make_app(server.service)
            try:
                on_ready(running)
                await _watched(find, serving)
            except (PipespecError, OutputClosedError) as error:
                problem = error  # which the client's tasks would wrap
            server.should_exit = True
            await serving
    finally:
        server.should_exit = True
        await serving
    if problem is not None:
        raise problem
    return None


async def _found(
    find: Callable[[], RunningCluster | None], serving: asyncio.Future[None]
) -> RunningCluster | None:
    """The cluster, once there is one; None: the server has ended before."""
    while not serving.done():
        if running := find():
            return running
        await asyncio.wait([serving], timeout=WATCH_S)
    return None


async def _watched(
    find: Callable[[], RunningCluster | None], serving: asyncio.Future[None]
) -> None:
    """Look after the cluster until the server has ended."""
    while not serving.done():
        find()
        await asyncio.wait([serving], timeout=WATCH_S)


class _Door:
    """Whoever answers now."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


class _Server(uvicorn.Server):
    service: Service | None = None  # once there is a cluster
    ended_by: int | None = None  # the last signal that asked for the end

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn hands signals on once it has ended; ours have then done what they should.
        before = {number: signal.signal(number, self.handle_exit) for number in ENDING}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.ended_by = sig
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.service is None:
            await super().shutdown(sockets)
            return
        self.service.drain()
        timeout = self.service.options.shutdown_timeout
        ending = asyncio.get_running_loop().call_later(timeout, self.service.end)
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()
