"""Clusters of this process, and requests that are submitted and read one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from pipespec.client.async_client import AsyncAnswer, AsyncClient
from pipespec.client.local_cluster import asking
from pipespec.client.model_info import ModelInfo
from pipespec.client.sync_client import Client, LoopThread
from pipespec.cluster import session
from pipespec.cluster.deployment.deployment import Deployment
from pipespec.cluster.session import ClusterSession
from pipespec.controller.log_records import Event, Finished, failure_of
from pipespec.core import SamplingParams


class RequestClient(Client):
    """A client of which each request is followed by itself."""

    def __init__(self, thread: LoopThread[AsyncClient]):
        super().__init__(thread)
        self._submitted: dict[int, AsyncAnswer] = {}  # each that `events` has not read to its end

    def submit(self, prompt: Sequence[int], sampling: SamplingParams, **fields: Any) -> int:
        """Put a request in the queue; its number. As `AsyncAnswer.submit`."""
        answer = AsyncAnswer(self.thread.resource)
        request = self.run(answer.submit(prompt, sampling, **fields))
        self._submitted[request] = answer
        return request

    def events(self, request: int) -> Iterator[Event]:
        """The events of a request, from its first on; Finished is the last. Raises RankFailed if
        the cluster ends before the request does, or the request was given up, and GrammarError."""
        answer = self._submitted.get(request)
        if answer is None:  # it was read before, or submitted by another client
            answer = AsyncAnswer(self.thread.resource)
            self.run(answer.add(request))
        while len(answer):
            for _, event in self.run(answer.next()):
                if isinstance(event, Finished):
                    self._submitted.pop(request, None)
                    if failure := failure_of(event.reason):
                        raise failure
                yield event

    def cancel(self, request: int) -> None:
        """End a request of any client. Raises Unreachable, UnknownRequest."""
        self.run(self.thread.resource.log.cancel(request))


class Running(NamedTuple):
    """A cluster that this process runs, and a client of it."""

    cluster: ClusterSession
    client: RequestClient


@contextmanager
def running(
    deployment: Deployment,
    on_log: Callable[[str, str], None] | None = None,
) -> Iterator[Running]:
    """Start the cluster of a deployment and ask it; it ends with the block."""
    with session.start_agents(deployment) as agents:
        served = ModelInfo.of(deployment)
        with (
            session.start_cluster(deployment, agents, on_log=on_log) as cluster,
            asking(cluster, served) as client,
        ):
            yield Running(cluster, RequestClient(client.thread))
