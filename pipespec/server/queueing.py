"""How much may wait: requests that this process has taken and that have no token yet."""

from __future__ import annotations

from http import HTTPStatus

from pipespec.server.errors import ApiError


class Queue:
    """Counts answers that were asked for and have not begun, and the tokens of their prompts.

    What would exceed a limit is refused; an empty queue takes one request whatever it holds.
    """

    def __init__(self, max_requests: int, max_tokens: int):
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.requests = 0
        self.tokens = 0

    def take(self, requests: int) -> Place:
        """A place for so many answers, before anything is tokenized. Raises ApiError."""
        if self.requests and self.requests + requests > self.max_requests:
            raise _full(f"{self.requests} requests wait and {self.max_requests} may")
        self.requests += requests
        return Place(self, requests)


class Place:
    """What one HTTP request has of the queue, until each of its answers has begun or it leaves.

    As a context it is left at the end, unless it was handed on to who leaves it later.
    """

    def __init__(self, queue: Queue, requests: int):
        self._queue = queue
        self._requests = requests
        self._tokens = 0

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def handed_on(self) -> Place:
        """What is held here, for somebody else to leave."""
        place = Place(self._queue, self._requests)
        place._tokens = self._tokens
        self._requests = self._tokens = 0
        return place

    def hold(self, tokens: int) -> None:
        """The prompts of its answers have so many tokens in all. Raises ApiError."""
        queue = self._queue
        if queue.tokens and queue.tokens + tokens > queue.max_tokens:
            raise _full(f"prompts of {queue.tokens} tokens wait and {queue.max_tokens} may")
        self._tokens = tokens
        queue.tokens += tokens

    def begun(self, tokens: int) -> None:
        """An answer to a prompt of so many tokens has begun."""
        self._free(1, tokens)

    def leave(self) -> None:
        """Nobody waits here any more."""
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
