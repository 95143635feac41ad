"""`AsyncClient` for callers that block: each call runs its counterpart of the asynchronous client
on an event loop in another thread (`LoopThread`). With several requests `Client.follow` yields the
events of all of them as they come."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from pipespec.client import async_client
from pipespec.client.async_answer import AsyncAnswer
from pipespec.client.async_client import AsyncClient, OwnCluster
from pipespec.client.loop_thread import LoopThread
from pipespec.client.model_info import ModelInfo
from pipespec.client.registry import RunningCluster
from pipespec.controller.log_records import Event, Finished, failure_of
from pipespec.core import SamplingParams
from pipespec.errors import Unreachable
from pipespec.timing.stats import Report

R = TypeVar("R")
# How long a user waits for a Redis that is away.
PATIENCE_S = 30.0


class Client:
    def __init__(self, thread: LoopThread[AsyncClient]):
        self._thread = thread
        self._client = thread.resource
        self._submitted: dict[int, Answers] = {}  # each request that `events` has not read yet

    @property
    def served(self) -> ModelInfo:
        return self._client.served

    def submit(self, prompt: Sequence[int], sampling: SamplingParams, **asked: Any) -> int:
        """Put a request in the queue; its number. As `AsyncAnswer.submit`."""
        answers = self._answers()
        try:
            request = answers.submit(prompt, sampling, **asked)
            self._submitted[request] = answers
        except KeyboardInterrupt:  # it may be in the queue already, and its number unknown
            answers.leave()
            raise
        return request

    def events(self, request: int) -> Iterator[Event]:
        """The events of a request, from its first on; Finished is the last. Raises RankFailed if
        the cluster ends before the request does, or the request was given up, and GrammarError."""
        answers = self._submitted.get(request)
        if answers is None:  # it was read before, or submitted by another client
            answers = self._answers()
            answers.add(request)
        while len(answers):
            for _, event in answers.next():
                if isinstance(event, Finished):
                    self._submitted.pop(request, None)
                    if failure := failure_of(event.reason):
                        raise failure
                yield event

    @contextmanager
    def follow(self) -> Iterator[Answers]:
        """Requests that are followed together; what has not finished at the end is cancelled."""
        answers = self._answers()
        try:
            yield answers
        finally:
            answers.leave()

    def cancel(self, request: int) -> None:
        """End a request of any user. Raises Unreachable, UnknownRequest."""
        self._thread.run(self._client.log.cancel(request))

    def reports(self, request: int) -> list[Report]:
        return self._thread.run(self._client.reports(request))

    def leave(self) -> None:
        """Cancel what was submitted and not read to its end."""
        for answers in self._submitted.values():
            answers.leave()
        self._submitted.clear()

    def _answers(self) -> Answers:
        return Answers(self._thread, self._thread.run(_on_loop(AsyncAnswer, self._client)))


class Answers:
    def __init__(self, thread: LoopThread[AsyncClient], answer: AsyncAnswer):
        self._thread = thread
        self._answer = answer

    def __len__(self) -> int:
        return len(self._answer)

    def submit(self, prompt: Sequence[int], sampling: SamplingParams, **asked: Any) -> int:
        return self._thread.run(self._answer.submit(prompt, sampling, **asked))

    def add(self, request: int) -> None:
        self._thread.run(self._answer.add(request))

    def next(self, timeout: float | None = None) -> list[tuple[int, Event]]:
        return self._thread.run(self._answer.next(timeout))

    def leave(self) -> None:
        self._thread.run(_on_loop(self._answer.leave))


@contextmanager
def attach(running: RunningCluster) -> Iterator[Client]:
    """Connect to a running cluster, whose ranks are loaded. Raises Unreachable without answer. What
    was submitted and has not finished at the end of the block is cancelled."""
    with connected(running, PATIENCE_S) as client:
        try:
            yield client
        finally:
            client.leave()


@contextmanager
def connected(
    running: RunningCluster, patience: float, own: OwnCluster | None = None
) -> Iterator[Client]:
    """A client that leaves open what it has not read to the end; `own`: as for `AsyncClient`."""
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


async def _on_loop(function: Callable[..., R], *arguments: Any) -> R:
    return function(*arguments)
