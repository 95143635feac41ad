"""Limits on the requests that this process has accepted and that have no token yet."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus

from pipespec.server.api_errors import ApiError


class AdmissionQueue:
    """Counts answers that have not started, and the tokens of their prompts. A request that would
    exceed a limit is refused. An empty queue admits one request of any size."""

    def __init__(self, max_requests: int, max_tokens: int):
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.requests = 0
        self.tokens = 0

    def admit(self, requests: int, tokens: int = 0) -> QueueEntry:
        """Admit so many answers to prompts of so many tokens in all; 0: the prompts are not
        tokenized yet. Raises ApiError."""
        if self.requests and self.requests + requests > self.max_requests:
            raise _full(f"{self.requests} requests wait and {self.max_requests} may")
        if self.tokens and self.tokens + tokens > self.max_tokens:
            raise _full(f"prompts of {self.tokens} tokens wait and {self.max_tokens} may")
        self.requests += requests
        self.tokens += tokens
        return QueueEntry(self, requests, tokens)


@dataclass
class QueueEntry:
    """The part of the queue that one HTTP request holds until its answers start, or to its end."""

    queue: AdmissionQueue
    requests: int
    tokens: int

    def started(self, tokens: int) -> None:
        self._free(1, tokens)

    def close(self) -> None:
        self._free(self.requests, self.tokens)

    def _free(self, requests: int, tokens: int) -> None:
        self.requests -= requests
        self.tokens -= tokens
        self.queue.requests -= requests
        self.queue.tokens -= tokens


def _full(why: str) -> ApiError:
    return ApiError(
        HTTPStatus.TOO_MANY_REQUESTS,
        f"The queue is full: {why}; try again in a moment.",
        code="queue_full",
    )
