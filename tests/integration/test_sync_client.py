"""The client for callers that block: many requests are followed over one connection."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from pipespec.client.sync_client import Answers, Client
from pipespec.controller.embedded_redis import EmbeddedRedis
from pipespec.controller.log_records import Accepted, Event, Finished
from pipespec.controller.rank_controller import Controller
from pipespec.controller.redis_connection import RedisConnection
from pipespec.errors import RankFailed
from tests.helpers.log import accept, head_of
from tools.rig.log import client_of

ASKED = {"prompt": (5, 6, 7), "max_new_tokens": 9}
LONG_S = 30.0


@pytest.fixture
def client(server: EmbeddedRedis, namespace: str) -> Iterator[Client]:
    with client_of(server.url, namespace) as client:
        yield client


@pytest.fixture
def answers(client: Client) -> Iterator[Answers]:
    with client.follow() as answers:
        yield answers


def received(answers: Answers, count: int) -> list[tuple[int, Event]]:
    """The next so many events."""
    found: list[tuple[int, Event]] = []
    while len(found) < count:
        new = answers.next(LONG_S)
        assert new, f"only {found} came"
        found += new
    return found


def test_events_of_all_requests_arrive_as_they_happen(head: Controller, answers: Answers) -> None:
    first, second = (head.enqueue(**ASKED) for _ in range(2))
    answers.add(first)
    assert answers.next(0.01) == []
    answers.add(second)
    accept(head, second, 3, [20])
    assert answers.next(LONG_S) == [(second, Accepted(3, (20,)))]
    accept(head, first, 3, [10])
    assert answers.next(LONG_S) == [(first, Accepted(3, (10,)))]
    accept(head, first, 4, [11])
    head.finish(second, "stop")
    accept(head, first, 5, [12])
    head.tokens(first)
    found = received(answers, 3)
    assert [event for number, event in found if number == first] == [
        Accepted(4, (11,)),
        Accepted(5, (12,)),
    ]
    assert (second, Finished("stop")) in found


def test_a_request_that_has_finished_is_followed_no_more(
    head: Controller, answers: Answers
) -> None:
    ids = [head.enqueue(**ASKED) for _ in range(3)]
    for request in ids:
        answers.add(request)
    head.finish(ids[1], "stop")
    assert answers.next() == [(ids[1], Finished("stop"))]
    assert len(answers) == 2
    for request in (ids[0], ids[2]):
        head.finish(request, "length")
    ended = []
    while len(answers):
        ended += answers.next()
    assert ended == [(ids[0], Finished("length")), (ids[2], Finished("length"))]


def test_the_whole_timeout_is_waited_also_for_no_request(
    head: Controller, answers: Answers
) -> None:
    for _ in range(2):
        began = time.monotonic()
        assert answers.next(0.05) == []
        assert 0.05 <= time.monotonic() - began < 2
        answers.add(head.enqueue(**ASKED))


def test_a_request_that_is_not_in_the_log_does_not_hold_the_others_up(
    head: Controller, client: Client, answers: Answers
) -> None:
    known = head.enqueue(**ASKED)
    head.finish(known, "stop")
    with client.follow() as unknown:
        unknown.add(99)
        answers.add(known)
        with pytest.raises(RankFailed, match="ended before the request was finished"):
            unknown.next(LONG_S)
    assert answers.next(LONG_S) == [(known, Finished("stop"))]


def test_following_continues_after_a_restart_and_no_event_comes_twice(namespace: str) -> None:
    with EmbeddedRedis(port=0) as server:
        with head_of(server, namespace) as head:
            ids = [head.enqueue(**ASKED) for _ in range(3)]
            for request in ids:
                accept(head, request, 3, [request])
            head.tokens(ids[0])
        with client_of(server.url, namespace) as client, client.follow() as answers:
            for request in ids:
                answers.add(request)
            assert sorted(received(answers, 3)) == [
                (request, Accepted(3, (request,))) for request in ids
            ]
            server.restart()
            with head_of(server, namespace) as head:
                accept(head, ids[1], 3, [ids[1], 8, 9])  # decoded again
                for request in ids:
                    head.finish(request, "length")
            found = received(answers, 4)
            assert len(answers) == 0
            assert [event for request, event in found if request == ids[1]] == [
                Accepted(4, (8, 9)),
                Finished("length"),
            ]
            RedisConnection(server.url).call("FLUSHALL")
            answers.add(ids[0])
            with pytest.raises(RankFailed, match="ended before the request was finished"):
                answers.next(LONG_S)
