"""Limits on the requests that this process has accepted and that have no token yet."""

from __future__ import annotations

from http import HTTPStatus

from pipespec.server.api_errors import ApiError


class AdmissionQueue:
    """Counts answers that have not started, and the tokens of their prompts.

    A request that would exceed a limit is refused. An empty queue admits one request of any size.
    """

    def __init__(self, max_requests: int, max_tokens: int):
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.requests = 0
        self.tokens = 0

    def admit(self, requests: int) -> QueueEntry:
        """Admit so many answers, before their prompts are tokenized. Raises ApiError."""
        if self.requests and self.requests + requests > self.max_requests:
            raise _full(f"{self.requests} requests wait and {self.max_requests} may")
        self.requests += requests
        return QueueEntry(self, requests)


class QueueEntry:
    """The part of the queue that one HTTP request holds, until its answers start or it is released.

    As a context manager it is released at the end of the block, unless it was transferred.
    """

    def __init__(self, queue: AdmissionQueue, requests: int, tokens: int = 0):
        self._queue = queue
        self._requests = requests
        self._tokens = tokens

    def __enter__(self) -> QueueEntry:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def transfer(self) -> QueueEntry:
        """Move what this entry holds to a new one, which its owner releases."""
        entry = QueueEntry(self._queue, self._requests, self._tokens)
        self._requests = self._tokens = 0
        return entry

    def reserve_tokens(self, tokens: int) -> None:
        """Count the tokens of all prompts. Raises ApiError if the queue has no room for them."""
        queue = self._queue
        if queue.tokens and queue.tokens + tokens > queue.max_tokens:
            raise _full(f"prompts of {queue.tokens} tokens wait and {queue.max_tokens} may")
        self._tokens = tokens
        queue.tokens += tokens

    def started(self, tokens: int) -> None:
        """Remove one answer, whose prompt has so many tokens, as it has started."""
        self._free(1, tokens)

    def release(self) -> None:
        """Remove what is left."""
        self._free(self._requests, self._tokens)

    def _free(self, requests: int, tokens: int) -> None:
        self._requests -= requests
        self._tokens -= tokens
        self._queue.requests -= requests
        self._queue.tokens -= tokens


def _full(why: str) -> ApiError:
    return ApiError(
        HTTPStatus.TOO_MANY_REQUESTS,
        f"The queue is full: {why}; try again in a moment.",
        code="queue_full",
    )
