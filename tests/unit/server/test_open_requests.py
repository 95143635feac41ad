"""What a server says of where its requests come from."""

from __future__ import annotations

from typing import Any, cast

from starlette.requests import Request

from pipespec.server.open_requests import MAX_AGENT, OpenRequests, RequestOrigin
from pipespec.server.response_stream import ResponseStream


class Stream:
    """A reply with answers of these numbers."""

    def __init__(self, *numbers: int):
        self.numbers = numbers


def stream(*numbers: int) -> ResponseStream:
    return cast(ResponseStream, Stream(*numbers))


def origin(agent: str = "", digest: bytes = b"", **scope: Any) -> RequestOrigin:
    headers = [(b"user-agent", agent.encode())] if agent else []
    state = {"api_key_digest": digest}
    request = Request({"type": "http", "headers": headers, "state": state} | scope)
    return RequestOrigin.of(request, "Hello")


def test_origin_is_shown_to_the_key_of_its_request_alone() -> None:
    requests = OpenRequests()
    mine, others = stream(1, 2), stream(3)
    requests.add(mine, origin("tool/1", b"a", client=("10.0.0.7", 50000)))
    requests.add(others, origin(digest=b"b"))
    assert {number: each.shown for number, each in requests.origins(b"a").items()} == {
        number: {"client": "10.0.0.7", "agent": "tool/1", "preview": "Hello"} for number in (1, 2)
    }
    assert [*requests.origins(b"b")] == [3]
    assert requests.origins(b"") == {}
    watched = [requests.may_watch(number, key) for key in (b"a", b"") for number in (1, 3, 4)]
    assert watched == [True, False, False, True, True, True]
    requests.discard(mine)
    requests.discard(mine)
    assert requests.origins(b"a") == {} and not requests.may_watch(1, b"a")
    assert [*requests] == [others]


def test_name_of_a_client_is_cut() -> None:
    assert len(origin(agent="x" * 10_000).agent) == MAX_AGENT
    assert origin(client=None).client == ""
