"""Runs the HTTP server until a signal ends it."""

from __future__ import annotations

import asyncio
import math
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from types import FrameType

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from pipespec.client.async_client import attach
from pipespec.client.registry import RunningCluster
from pipespec.errors import PipespecError, print_error
from pipespec.server.app import make_app, make_loading_app
from pipespec.server.http_protocol import protocol_factory
from pipespec.server.listener import connection_capacity
from pipespec.server.middleware import RequestIds
from pipespec.server.openai_serving import OpenAIServing
from pipespec.server.options import ServerOptions
from pipespec.server.preparation import PreparationPool
from pipespec.system.end_signals import first_signal, say_ending
from pipespec.system.exit_codes import OutputClosedError

# How long clients may take to read the error that ends their requests at shutdown.
SHUTDOWN_NOTICE_S = 2.0
# Signals that end the server; after the second one it does not wait.
END_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# How long the event loop waits at most for a thread that runs Python.
SWITCH_S = 0.001
# How often the server checks whether the cluster is ready, and whether its launcher lives.
WATCH_S = 0.1
# Finds the cluster that a server serves: None while it loads. The server ends with a PipespecError
# from here.
ClusterWatch = Callable[[], RunningCluster | None]


async def run_api_server(
    watch: ClusterWatch,
    options: ServerOptions,
    listener: socket.socket,
    on_ready: Callable[[RunningCluster], None],
) -> int | None:
    """Answer requests until SIGINT or SIGTERM; then finish open requests within
    `options.shutdown_timeout`. Requests get 503 while the cluster loads.

    Returns the signal if it came before `on_ready` was called, else None. Raises what
    `watch` raises.
    """
    capacity, backlog = connection_capacity(options.max_connections)
    listener.listen(backlog)  # from now on clients wait instead of being refused
    sys.setswitchinterval(SWITCH_S)
    pool = PreparationPool(options.preparation_threads, options.preparation_timeout)
    with closing(pool):
        current: ASGIApp = make_loading_app(options)

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await current(scope, receive, send)

        config = uvicorn.Config(
            RequestIds(app, print_error if options.access_log else None),
            log_level="warning",
            access_log=False,  # its lines have clients' addresses and queries
            lifespan="off",
            http=protocol_factory(options, capacity),  # type: ignore[arg-type]
            ws="none",
            backlog=backlog,
            server_header=False,
            timeout_graceful_shutdown=math.ceil(options.shutdown_timeout + SHUTDOWN_NOTICE_S),
        )
        server = _UvicornServer(config)
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        problem: Exception | None = None
        try:
            running = await _await_end(watch, serving, until_ready=True)
            if running is None:
                return server.ended_by
            async with attach(running, options.patience) as client:
                server.service = OpenAIServing(client, options, pool)
                current = make_app(server.service)
                history = asyncio.ensure_future(server.service.keep_history())
                try:
                    on_ready(running)
                    await _await_end(watch, serving)
                except (PipespecError, OutputClosedError) as error:
                    problem = error  # raised once the server has ended
                    server.service.fail_open_requests()  # no cluster answers them
                finally:
                    history.cancel()
                server.should_exit = True
                await serving
        finally:
            server.should_exit = True
            await serving
    if problem is not None:
        raise problem
    return None


async def _await_end(
    watch: ClusterWatch, serving: asyncio.Future[None], *, until_ready: bool = False
) -> RunningCluster | None:
    """Watch the cluster until the server ends, which returns None, or until it is ready."""
    while not serving.done():
        running = watch()
        if running and until_ready:
            return running
        await asyncio.wait([serving], timeout=WATCH_S)
    return None


class _UvicornServer(uvicorn.Server):
    service: OpenAIServing | None = None  # set by `run_api_server` once the cluster is ready
    ended_by: int | None = None  # the last of `END_SIGNALS` that arrived
    _at_once = False  # whether open requests are not waited for

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn raises the signals again once it has ended; these have had their effect by then.
        self._loop = asyncio.get_running_loop()
        before = {number: signal.signal(number, self.handle_exit) for number in END_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.ended_by = sig
        if first_signal(sig):
            if sig == signal.SIGINT:
                say_ending(f"ending: {self.waits_for}; Ctrl-C again ends it at once")
        elif self.service is not None:
            # uvicorn would cancel their tasks in the middle, with tracebacks.
            self._at_once = True  # also if it has not begun to wait
            self._loop.call_soon_threadsafe(self.service.fail_open_requests)
            return
        super().handle_exit(sig, frame)

    @property
    def waits_for(self) -> str:
        if self.service is None:
            return "the cluster that loads is ended"
        most = self.service.options.shutdown_timeout
        return f"open requests: {len(self.service.open)}, answered for {most:g} s at most"

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.service is None:
            await super().shutdown(sockets)
            return
        self.service.ending = True
        timeout = 0.0 if self._at_once else self.service.options.shutdown_timeout
        failing = self._loop.call_later(timeout, self.service.fail_open_requests)
        try:
            await super().shutdown(sockets)
        finally:
            failing.cancel()
