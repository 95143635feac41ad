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
    assert (queue.requests.total(), queue.tokens.total()) == (2, 60)
    first.started(30)
    with closing(queue.admit(2, 70)):
        assert (queue.requests.total(), queue.tokens.total()) == (3, 100)
    for _ in range(2):
        first.close()
        assert (queue.requests.total(), queue.tokens.total()) == (0, 0)


def test_empty_queue_admits_one_request_of_any_size() -> None:
    queue = AdmissionQueue(max_requests=1, max_tokens=10)
    with closing(queue.admit(5, 1000)):
        assert (queue.requests.total(), queue.tokens.total()) == (5, 1000)
        with pytest.raises(ApiError):
            queue.admit(1)
    assert (queue.requests.total(), queue.tokens.total()) == (0, 0)


def test_tenant_that_fills_the_queue_leaves_others_their_share() -> None:
    queue = AdmissionQueue(max_requests=12, max_tokens=1200)
    for _ in range(12):
        queue.admit(1, 100, "many")
    with closing(queue.admit(6, 600, "other")):
        for tenant, requests, tokens in (("many", 1, 0), ("other", 1, 0), ("third", 5, 0)):
            with pytest.raises(ApiError, match="18 requests wait and 12 may"):
                queue.admit(requests, tokens, tenant)
        with pytest.raises(ApiError, match="prompts of 1800 tokens wait"):
            queue.admit(1, 401, "third")
        queue.admit(4, 400, "third").close()
    queue.admit(6, 600, "other")  # the share of one of two again
