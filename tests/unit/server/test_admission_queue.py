"""How much may wait in one server."""

from __future__ import annotations

from contextlib import closing

import pytest

from pipespec.server.api_errors import ApiError
from pipespec.server.response_stream import AdmissionQueue


def test_queue_refuses_requests_beyond_a_limit_until_others_start() -> None:
    queue = AdmissionQueue(max_requests=3, max_tokens=100)
    first = queue.admit(2, 60)
    with pytest.raises(ApiError, match="2 requests wait and 3 may") as refused:
        queue.admit(2)
    assert refused.value.status == 429
    with pytest.raises(ApiError, match="prompts of 60 tokens wait"):
        queue.admit(1, 41)
    assert (queue.requests, queue.tokens) == (2, 60)
    first.started(30)
    with closing(queue.admit(2, 70)):
        assert (queue.requests, queue.tokens) == (3, 100)
    for _ in range(2):
        first.close()
        assert (queue.requests, queue.tokens) == (0, 0)


def test_empty_queue_admits_one_request_of_any_size() -> None:
    queue = AdmissionQueue(max_requests=1, max_tokens=10)
    with closing(queue.admit(5, 1000)):
        assert (queue.requests, queue.tokens) == (5, 1000)
        with pytest.raises(ApiError):
            queue.admit(1)
    assert (queue.requests, queue.tokens) == (0, 0)
