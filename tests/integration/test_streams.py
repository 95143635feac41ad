"""Following many requests over one connection."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from pipespec.controller.client import Controller
from pipespec.controller.connection import Pipe
from pipespec.controller.records import Accepted, Finished
from pipespec.controller.server import EmbeddedRedis
from pipespec.controller.streams import Streams
from pipespec.errors import ControllerError, Unreachable
from tests.helpers.log import accept, head_of

ASKED = {"prompt": (5, 6, 7), "max_new_tokens": 9}


@pytest.fixture
def streams(server: EmbeddedRedis, namespace: str) -> Iterator[Streams]:
    with Streams(server.url, namespace=namespace, patience=30.0) as streams:
        yield streams


def test_events_of_all_come_as_they_happen(head: Controller, streams: Streams) -> None:
    first, second = (head.enqueue(**ASKED) for _ in range(2))
    streams.add(first)
    assert streams.next(0.01) == []
    streams.add(second)
    accept(head, second, 3, [20])
    assert streams.next(5) == [(second, Accepted(3, (20,)))]
    accept(head, first, 3, [10])
    assert streams.next(5) == [(first, Accepted(3, (10,)))]
    accept(head, first, 4, [11])
    head.finish(second, "stop")
    accept(head, first, 5, [12])
    head.tokens(first)
    assert streams.next(5) == [
        (first, Accepted(4, (11,))),
        (first, Accepted(5, (12,))),
        (second, Finished("stop")),
    ]


def test_who_has_finished_is_forgotten(head: Controller, streams: Streams) -> None:
    ids = [head.enqueue(**ASKED) for _ in range(3)]
    for request in ids:
        streams.add(request)
    head.finish(ids[1], "stop")
    assert streams.next() == [(ids[1], Finished("stop"))]
    assert len(streams) == 2
    for request in (ids[0], ids[2]):
        head.finish(request, "length")
    ended = []
    while len(streams):
        ended += streams.next()
    assert ended == [(ids[0], Finished("length")), (ids[2], Finished("length"))]


def test_who_comes_late_is_told_from_where_he_is(head: Controller, streams: Streams) -> None:
    ids = [head.enqueue(**ASKED) for _ in range(2)]
    for request in ids:
        accept(head, request, 3, [10, 11])
        head.finish(request, "stop")
    head.tokens(ids[0])
    streams.add(ids[0])
    streams.add(ids[1], base=4)
    assert streams.next() == [
        (ids[0], Accepted(3, (10, 11))),
        (ids[0], Finished("stop")),
        (ids[1], Accepted(4, (11,))),
        (ids[1], Finished("stop")),
    ]


def test_the_whole_timeout_is_waited_also_for_nobody(head: Controller, streams: Streams) -> None:
    for _ in range(2):
        began = time.monotonic()
        assert streams.next(0.05) == []
        assert 0.05 <= time.monotonic() - began < 2
        streams.add(head.enqueue(**ASKED))


def test_a_request_that_is_not_in_the_log_does_not_hold_the_others_up(
    head: Controller, streams: Streams
) -> None:
    known = head.enqueue(**ASKED)
    head.finish(known, "stop")
    streams.add(99)
    streams.add(known)
    with pytest.raises(ControllerError, match="Request 99 is not in the log"):
        streams.next(1)
    assert streams.next(5) == [(known, Finished("stop"))]


def test_all_go_on_after_a_restart_and_each_event_is_told_once(namespace: str) -> None:
    with EmbeddedRedis(port=0) as server:
        with head_of(server, namespace) as head:
            ids = [head.enqueue(**ASKED) for _ in range(3)]
            for request in ids:
                accept(head, request, 3, [request])
            head.tokens(ids[0])
        with Streams(server.url, namespace=namespace, patience=30.0) as streams:
            for request in ids:
                streams.add(request)
            assert streams.next() == [(request, Accepted(3, (request,))) for request in ids]
            server.restart()
            with head_of(server, namespace) as head:
                accept(head, ids[1], 3, [ids[1], 8, 9])  # decoded again
                for request in ids:
                    head.finish(request, "length")
            found = []
            while len(streams):
                found += streams.next()
            assert [event for request, event in found if request == ids[1]] == [
                Accepted(4, (8, 9)),
                Finished("length"),
            ]
            assert len(found) == 4
            Pipe(server.url).call("FLUSHALL")
            streams.add(ids[0])
            with pytest.raises(ControllerError, match="is not in the log"):
                streams.next()


def test_a_redis_that_stays_away_is_given_up(namespace: str) -> None:
    with EmbeddedRedis() as server:
        with head_of(server, namespace) as head:
            request = head.enqueue(**ASKED)
        streams = Streams(server.url, namespace=namespace, patience=0.2)
        streams.add(request)
        assert streams.next(0.01) == []

    def listen() -> None:
        while True:
            assert streams.next(0.01) == []

    began = time.monotonic()
    with pytest.raises(Unreachable):
        listen()
    assert 0.2 <= time.monotonic() - began < 5
