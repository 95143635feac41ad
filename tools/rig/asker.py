"""A client whose requests are submitted and read one by one, and clusters of this process that are
asked by it."""

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


class Asker(Client):
    def __init__(self, thread: LoopThread[AsyncClient]):
        super().__init__(thread)
        self._submitted: dict[int, AsyncAnswer] = {}  # each that `events` has not read to its end

    def submit(self, prompt: Sequence[int], sampling: SamplingParams, **asked: Any) -> int:
        """Put a request in the queue; its number. As `AsyncAnswer.submit`."""
        answer = AsyncAnswer(self._client)
        request = self.run(answer.submit(prompt, sampling, **asked))
        self._submitted[request] = answer
        return request

    def events(self, request: int) -> Iterator[Event]:
        """The events of a request, from its first on; Finished is the last. Raises what ends the
        request without an answer."""
        answer = self._submitted.get(request)
        if answer is None:  # it was read before, or submitted by another client
            answer = AsyncAnswer(self._client)
            self.run(answer.add(request))
        while len(answer):
            for _, event in self.run(answer.next()):
                if isinstance(event, Finished):
                    self._submitted.pop(request, None)
                    if failure := failure_of(event.reason):
                        raise failure
                yield event

    def cancel(self, request: int) -> None:
        """End a request of any user."""
        self.run(self._client.log.cancel(request))


class Running(NamedTuple):
    """A cluster that this process runs, and a client of it."""

    cluster: ClusterSession
    client: Asker


@contextmanager
def running(
    deployment: Deployment,
    on_loaded: Callable[[int, int], None] = lambda ranks, of: None,
    on_log: Callable[[str, str], None] | None = None,
) -> Iterator[Running]:
    """Start the cluster of a deployment and ask it; it ends with the block."""
    with session.start_agents(deployment) as agents:
        served = ModelInfo.of(deployment)
        with (
            session.start_cluster(deployment, agents, on_loaded, on_log) as cluster,
            asking(cluster, served) as client,
        ):
            yield Running(cluster, Asker(client.thread))
