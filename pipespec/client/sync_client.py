"""`AsyncClient` for callers that block: each call runs its counterpart of the asynchronous client
on an event loop in another thread (`LoopThread`). `Client.follow` is for several requests
whose events are read together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pipespec.client import async_client
from pipespec.client.async_client import AsyncAnswer, AsyncClient, OwnCluster
from pipespec.client.loop_thread import LoopThread
from pipespec.client.model_info import ModelInfo
from pipespec.client.registry import RunningCluster
from pipespec.controller.log_records import Event, Finished, failure_of
from pipespec.core import SamplingParams
from pipespec.errors import Unreachable
from pipespec.timing.stats import Report

# How long a user waits for a Redis that is away.
PATIENCE_S = 30.0


class Client:
    """`run` has a coroutine of what `follow` yields done; it returns or raises what that does."""

    def __init__(self, thread: LoopThread[AsyncClient]):
        self.run = thread.run
        self._client = thread.resource
        self.served: ModelInfo = self._client.served
        self._submitted: dict[int, AsyncAnswer] = {}  # each that `events` has not read to its end

    def submit(self, prompt: Sequence[int], sampling: SamplingParams, **asked: Any) -> int:
        """Put a request in the queue; its number. As `AsyncAnswer.submit`."""
        answer = AsyncAnswer(self._client)
        try:
            request = self.run(answer.submit(prompt, sampling, **asked))
            self._submitted[request] = answer
        except KeyboardInterrupt:  # it may be in the queue already, and its number unknown
            self._leave(answer)
            raise
        return request

    def events(self, request: int) -> Iterator[Event]:
        """The events of a request, from its first on; Finished is the last. Raises RankFailed if
        the cluster ends before the request does, or the request was given up, and GrammarError."""
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

    @contextmanager
    def follow(self) -> Iterator[AsyncAnswer]:
        """Requests that are followed together; what has not finished at the end is cancelled."""
        answer = AsyncAnswer(self._client)
        try:
            yield answer
        finally:
            self._leave(answer)

    def cancel(self, request: int) -> None:
        """End a request of any user. Raises Unreachable, UnknownRequest."""
        self.run(self._client.log.cancel(request))

    def reports(self, request: int) -> list[Report]:
        return self.run(self._client.reports(request))

    def leave(self) -> None:
        """Cancel what was submitted and not read to its end."""
        self._leave(*self._submitted.values())
        self._submitted.clear()

    def _leave(self, *answers: AsyncAnswer) -> None:
        async def leaving() -> None:
            for answer in answers:
                answer.leave()

        self.run(leaving())


@contextmanager
def attach(
    running: RunningCluster, patience: float = PATIENCE_S, own: OwnCluster | None = None
) -> Iterator[Client]:
    """Connect to a running cluster, whose ranks are loaded; `patience` and `own` are as for
    `AsyncClient`. Raises Unreachable without answer. What was submitted and not read to its end
    stays open."""
    thread = LoopThread(
        lambda: async_client.attach(running, patience, follows_restarts=False, own=own)
    )
    try:
        try:
            thread.run(thread.resource.log.look())
        except Unreachable as error:
            raise Unreachable(
                f"The cluster {running.name!r} on {running.host} does not answer: {error}"
            ) from error
        yield Client(thread)
    finally:
        thread.close()
