"""A server whose cluster has a scripted head: a test decides its tokens."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import httpx2

from pipespec.client.model_info import ModelInfo
from pipespec.client.registry import RunningCluster
from pipespec.controller.embedded_redis import EmbeddedRedis
from pipespec.controller.rank_controller import Controller
from pipespec.server.api_server import ClusterWatch, run_api_server
from pipespec.server.listener import bind_listener
from pipespec.server.options import ServerOptions
from tests.helpers import dialects
from tests.helpers.log import accept, head_of, take

NAMESPACE = "http"
PATIENCE_S = 60.0


@dataclass
class Scene:
    """The head of a cluster, and a client of its server."""

    head: Controller
    http: httpx2.AsyncClient

    async def taken(self) -> tuple[int, int]:
        """The next request that the head takes: its number, and the length of its prompt."""
        while (request := take(self.head, wait=False)) is None:
            await asyncio.sleep(0)
        return request.id, len(request.prompt)

    def say(self, request: int, base: int, *tokens: int) -> None:
        accept(self.head, request, base, tokens)
        self.head.tokens(request)

    def finish(self, request: int, reason: str) -> None:
        self.head.finish(request, reason)
        self.head.tokens(request)


def play(
    redis: EmbeddedRedis,
    served: ModelInfo,
    story: Callable[[Scene], Awaitable[None]],
    **options: Any,
) -> None:
    """Run a server in this process while `story` plays its head and its client."""

    async def script(http: httpx2.AsyncClient) -> None:
        while (await http.get("/health")).status_code == 503:
            pass
        try:
            await story(Scene(head, http))
        finally:
            signal.raise_signal(signal.SIGTERM)

    with head_of(redis, NAMESPACE) as head:
        running = cluster_of(redis, served)
        run_server(lambda: running, script, **options)


def run_server(
    watch: ClusterWatch, script: Callable[[httpx2.AsyncClient], Awaitable[None]], **options: Any
) -> tuple[int | None, list[RunningCluster]]:
    """Run a server in this process until `script`, its client, ends it; what the server returns,
    and the clusters that it announced."""
    announced: list[RunningCluster] = []

    async def run() -> int | None:
        with bind_listener("127.0.0.1", 0) as listener:
            chosen = ServerOptions(("demo",), patience=PATIENCE_S, shutdown_timeout=0, **options)
            server = asyncio.ensure_future(
                run_api_server(watch, chosen, listener, announced.append)
            )
            await asyncio.sleep(0)  # it listens from now on
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            async with httpx2.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
                await asyncio.wait_for(script(http), PATIENCE_S)
            return await server

    return asyncio.run(run()), announced


def cluster_of(redis: EmbeddedRedis, served: ModelInfo) -> RunningCluster:
    """The entry of a cluster with a scripted head."""
    return replace(dialects.entry_of(served), url=redis.url, namespace=NAMESPACE, num_ranks=2)
