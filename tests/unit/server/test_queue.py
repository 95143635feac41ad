"""How much may wait in one server."""

from __future__ import annotations

import pytest

from pipespec.server.errors import ApiError
from pipespec.server.queueing import Queue


def test_what_exceeds_a_limit_is_refused_until_others_have_begun() -> None:
    queue = Queue(max_requests=3, max_tokens=100)
    first = queue.take(2)
    first.hold(60)
    with pytest.raises(ApiError, match="2 requests wait and 3 may") as refused:
        queue.take(2)
    assert refused.value.status == 429
    with queue.take(1) as second, pytest.raises(ApiError, match="prompts of 60 tokens wait"):
        second.hold(41)
    assert (queue.requests, queue.tokens) == (2, 60)
    first.begun(30)
    with queue.take(2) as third:
        third.hold(70)
        assert (queue.requests, queue.tokens) == (3, 100)
    first.leave()
    first.leave()
    assert (queue.requests, queue.tokens) == (0, 0)


def test_an_empty_queue_takes_one_request_whatever_it_holds() -> None:
    queue = Queue(max_requests=1, max_tokens=10)
    with queue.take(5) as place:
        place.hold(1000)
        later = place.handed_on()
    assert (queue.requests, queue.tokens) == (5, 1000)
    with pytest.raises(ApiError):
        queue.take(1)
    later.leave()
    assert (queue.requests, queue.tokens) == (0, 0)
