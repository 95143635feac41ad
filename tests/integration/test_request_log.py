"""The request log: queue, accepted tokens, readers and reports."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

import pytest

from pipespec.controller import records, requests
from pipespec.controller.client import Controller
from pipespec.controller.graph import compute
from pipespec.controller.records import CANCELLED, Accepted, Finished
from pipespec.controller.requests import RequestLog
from pipespec.controller.server import EmbeddedRedis
from pipespec.core import Request, TokenLogprobs
from pipespec.core import Sampling as Asked
from pipespec.errors import ControllerError, StaleEpoch

names = count()
ASKED = {"prompt": (5, 6, 7), "max_new_tokens": 9, "eos": (2,), "stop": ("\n\n", "é")}


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
def head(server: EmbeddedRedis) -> Iterator[Controller]:
    with rank(server, f"log-{next(names)}") as controller:
        yield controller


def rank(server: EmbeddedRedis, namespace: str) -> Controller:
    epoch = Controller.new_epoch(server.url, namespace)
    return Controller.connect(server.url, namespace=namespace, epoch=epoch, rank=0)


def test_requests_are_taken_in_the_order_in_which_they_came(head: Controller) -> None:
    ids = [head.enqueue(**{**ASKED, "max_new_tokens": n}) for n in (1, 2, 3)]
    taken = [head.next_request(timeout=5) for _ in ids]
    assert taken == [Request(id=i, **{**ASKED, "max_new_tokens": n + 1}) for n, i in enumerate(ids)]
    assert head.request(ids[1]) == taken[1]
    assert head.next_request(timeout=0.01) is None


def test_a_head_that_waits_is_woken_by_a_request(server: EmbeddedRedis, head: Controller) -> None:
    found: list[Request | None] = []
    waiter = threading.Thread(target=lambda: found.append(head.next_request(timeout=20)))
    waiter.start()
    with RequestLog(server.url, namespace=head._keys.namespace, epoch=1) as user:
        request = user.enqueue(**ASKED)
        waiter.join(20)
    assert found == [Request(id=request, **ASKED)]


def test_a_reader_sees_tokens_as_they_are_accepted_and_then_the_reason(
    head: Controller,
) -> None:
    request = head.enqueue(**ASKED)
    events = head.stream(request, heartbeat=0.01)
    assert next(events) is None
    head.accept(request, 3, [10])
    assert next(event for event in events if event) == Accepted(3, (10,))
    head.accept(request, 4, [11, 12])
    assert next(event for event in events if event) == Accepted(4, (11, 12))
    head.finish(request, "length")
    assert [event for event in events if event] == [Finished("length")]
    assert head.tokens(request) == (10, 11, 12)


def test_a_reader_may_come_late_or_again(head: Controller) -> None:
    request = head.enqueue(**ASKED)
    head.accept(request, 3, [10, 11])
    head.accept(request, 5, [12, 13])
    head.finish(request, "stop")
    head.tokens(request)
    end = Finished("stop")
    assert list(head.stream(request)) == [Accepted(3, (10, 11)), Accepted(5, (12, 13)), end]
    assert list(head.stream(request, base=4)) == [Accepted(4, (11,)), Accepted(5, (12, 13)), end]
    assert list(head.stream(request, base=5)) == [Accepted(5, (12, 13)), end]
    assert list(head.stream(request, base=7)) == [end]


def test_log_probabilities_stay_with_their_tokens(head: Controller) -> None:
    request = head.enqueue(**ASKED)
    told = [TokenLogprobs(-0.1 * i, ((i, -1e-17), (9, -2.5))) for i in range(1, 4)]
    head.accept(request, 3, [10, 11], told[:2])
    head.accept(request, 4, [11, 12], told[1:])  # one of them told before
    head.finish(request, "stop")
    head.tokens(request)
    assert list(head.stream(request)) == [
        Accepted(3, (10, 11), tuple(told[:2])),
        Accepted(5, (12,), (told[2],)),
        Finished("stop"),
    ]
    assert next(iter(head.stream(request, base=4))) == Accepted(4, (11,), (told[1],))


def test_sampling_parameters_travel_exactly(head: Controller) -> None:
    sampling = Asked(
        temperature=0.1 + 0.2, logit_bias=((3, -1.5), (4, 1e-3)), seed=2**63 - 1, logprobs=0
    )
    request = head.enqueue(**ASKED, sampling=sampling)
    assert head.next_request(timeout=5) == Request(id=request, **ASKED, sampling=sampling)


def test_a_verdict_told_twice_is_accepted_once(head: Controller) -> None:
    request = head.enqueue(**ASKED)
    head.accept(request, 3, [10, 11])
    head.accept(request, 3, [10, 11])
    head.accept(request, 3, [10])
    head.accept(request, 4, [11, 12])  # drawn in other portions after a failure
    head.accept(request, 6, [])
    assert head.tokens(request) == (10, 11, 12)
    head.finish(request, "stop")
    head.accept(request, 4, [11])
    head.finish(request, "length")
    assert list(head.stream(request))[-1] == Finished("stop")


def perform(head: Controller, write: Callable[[], object]) -> None:
    """Writes and waits until Redis has done it; raises what it refused."""
    write()
    head._pipe.call("PING")


def test_tokens_that_cannot_follow_are_refused(head: Controller) -> None:
    request = head.enqueue(**ASKED)
    with pytest.raises(ControllerError, match="has 3 tokens, and none can be accepted at 5"):
        perform(head, lambda: head.accept(request, 5, [1]))
    head.finish(request, "stop")
    with pytest.raises(ControllerError, match=r"finished \(stop\)"):
        perform(head, lambda: head.accept(request, 3, [1]))
    assert head.tokens(request) == ()


def test_a_request_that_is_not_in_the_log_is_named(head: Controller) -> None:
    for call in (
        lambda: head.request(99),
        lambda: next(head.stream(99)),
        lambda: head.accept(99, 0, [1]),
        lambda: head.finish(99, "stop"),
        lambda: head.report(99, {}),
    ):
        with pytest.raises(ControllerError, match="equest 99 is not in the log"):
            perform(head, call)


def test_what_a_stale_epoch_writes_is_refused(server: EmbeddedRedis, head: Controller) -> None:
    request = head.enqueue(**ASKED)
    Controller.new_epoch(server.url, head._keys.namespace)
    for write in (
        lambda: head.accept(request, 3, [1]),
        lambda: head.finish(request, "stop"),
        lambda: head.report(request, {}),
        lambda: head.next_request(timeout=1),
        lambda: head.close_queue(),
    ):
        with pytest.raises(StaleEpoch):
            perform(head, write)
    assert head.tokens(request) == ()


def test_a_closed_queue_ends_when_it_is_empty(server: EmbeddedRedis, head: Controller) -> None:
    request = head.enqueue(**ASKED)
    head.close_queue()
    taken = head.next_request(timeout=5)
    assert taken is not None
    assert taken.id == request
    assert head.next_request() is None  # at once: nothing will come
    with rank(server, head._keys.namespace) as successor:
        again = successor.next_request(timeout=5)
        assert again is not None
        assert again.id == request
        assert successor.next_request(timeout=0) is None
        successor.enqueue(**ASKED)
        assert successor.next_request(timeout=5) is not None


def test_a_new_epoch_takes_up_unfinished_requests_where_they_stood(
    server: EmbeddedRedis, head: Controller
) -> None:
    first, second, third, fourth = (head.enqueue(**ASKED) for _ in range(4))
    for _ in range(3):
        head.next_request(timeout=5)
    head.accept(second, 3, [10, 11])
    head.finish(first, "stop")
    head.tokens(second)
    with rank(server, head._keys.namespace) as successor:
        order = [successor.next_request(timeout=5) for _ in range(3)]
        assert [request.id for request in order if request] == [second, third, fourth]
        assert successor.tokens(second) == (10, 11)
        successor.accept(second, 5, [12])
        assert successor.tokens(second) == (10, 11, 12)


def test_a_request_finished_in_the_queue_is_not_taken(head: Controller) -> None:
    first, second = head.enqueue(**ASKED), head.enqueue(**ASKED)
    head.finish(first, "cancelled")
    taken = head.next_request(timeout=5)
    assert taken is not None
    assert taken.id == second


def test_a_request_cancelled_in_the_queue_ends_at_once(head: Controller) -> None:
    first, second = head.enqueue(**ASKED), head.enqueue(**ASKED)
    head.cancel(first)
    assert [*head.stream(first)] == [Finished("cancelled")]
    taken = head.next_request(timeout=5)
    assert taken is not None
    assert taken.id == second
    head.finish(second, "stop")
    head.cancel(second)  # too late
    assert [*head.stream(second)] == [Finished("stop")]


def test_the_head_hears_of_a_request_that_is_cancelled(
    server: EmbeddedRedis, head: Controller
) -> None:
    first, second = head.enqueue(**ASKED), head.enqueue(**ASKED)
    head.next_request(timeout=5)
    with RequestLog(server.url, namespace=head._keys.namespace, epoch=1) as user:
        user.cancel(first)
    while not head.cancelled(first):
        assert head.poll(compute(0, 0), timeout=0.01) is None
    assert not head.cancelled(second)
    head.accept(first, 3, [10])  # what was on its way is accepted still
    head.finish(first, CANCELLED)
    assert [*head.stream(first)] == [Accepted(3, (10,)), Finished("cancelled")]


def test_an_epoch_that_begins_meanwhile_does_not_take_up_what_was_cancelled(
    server: EmbeddedRedis, head: Controller
) -> None:
    first, second, third = (head.enqueue(**ASKED) for _ in range(3))
    for _ in range(2):
        head.next_request(timeout=5)
    head.accept(first, 3, [10, 11])
    head.tokens(first)
    with RequestLog(server.url, namespace=head._keys.namespace, epoch=1) as user:
        user.cancel(first)
        with rank(server, head._keys.namespace) as successor:
            user.cancel(second)  # is back in the queue
            taken = successor.next_request(timeout=5)
            assert taken is not None
            assert taken.id == third
            assert [*user.stream(first)] == [Accepted(3, (10, 11)), Finished("cancelled")]
            assert [*user.stream(second)] == [Finished("cancelled")]
            assert not successor.cancelled(third)


def test_a_finished_request_does_not_stay_forever(head: Controller) -> None:
    request = head.enqueue(**ASKED)
    head.accept(request, 3, [1])
    head.report(request, {})
    keys = head._keys
    names = (keys.request(request), keys.events(request), keys.reports(request))
    assert [head._pipe.call("TTL", key) for key in names[:2]] == [-1, -1]
    head.finish(request, "stop")
    assert all(0 < head._pipe.call("TTL", key) <= requests.KEEP_FINISHED_S for key in names)


def test_every_rank_reports(server: EmbeddedRedis, head: Controller) -> None:
    request = head.enqueue(**ASKED)
    with Controller.connect(
        server.url, namespace=head._keys.namespace, epoch=head._epoch, rank=1
    ) as stage:
        stage.report(request, {"busy": 0.5})
        head.report(request, {"steps": 7, "tbt": [1.5, 2]})
        assert head.reports(request, count=2, timeout=5) == {
            0: {"steps": 7, "tbt": [1.5, 2]},
            1: {"busy": 0.5},
        }
    with pytest.raises(ControllerError, match=r"2 of 3 ranks \(\[0, 1\]\)"):
        head.reports(request, count=3, timeout=0.01)


def test_fields_added_to_a_request_travel(
    head: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request of a later release, with sampling parameters."""
    monkeypatch.setattr(requests, "Request", Later)
    monkeypatch.setattr(records, "Request", Later)
    sampling = Sampling(temperature=0.7, penalties=(1.0, 2.0))
    request = head.enqueue(prompt=(1,), sampling=sampling)
    assert head.next_request(timeout=5) == Later(request, (1,), sampling, None)


@dataclass(frozen=True)
class Sampling:
    temperature: float
    penalties: tuple[float, ...]


@dataclass(frozen=True)
class Later:
    id: int
    prompt: tuple[int, ...]
    sampling: Sampling | None = None
    seed: int | None = None
