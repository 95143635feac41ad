import asyncio
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipespec.controller import epoch_control, log_records, request_log
from pipespec.controller.async_request_log import AsyncRequestLog
from pipespec.controller.cluster_status import ClusterStatus, read_status
from pipespec.controller.embedded_redis import EmbeddedRedis
from pipespec.controller.epoch_control import MAX_FAILED_CLUSTERS
from pipespec.controller.log_records import FAILED, Accepted, Event, Finished
from pipespec.controller.rank_controller import Controller
from pipespec.controller.redis_connection import RedisConnection
from pipespec.controller.redis_keys import RedisKeys
from pipespec.controller.request_log import RequestLog, enqueuing
from pipespec.core import PromptLogprobs, Request, TokenLogprobs
from pipespec.core import SamplingParams as Asked
from pipespec.errors import ConfigError, ControllerError, LogFull, StaleEpoch, WritesRefused
from pipespec.server.api_errors import api_error_of
from pipespec.timing.batch_times import NO_TIMES
from tests.helpers.log import accept, head_of, take
from tools.rig.log import events_of, reports_of

names = count()
ASKED = {"prompt": (5, 6, 7), "max_new_tokens": 9, "eos": (2,), "stop": ("\n\n", "é")}


@pytest.fixture
def events(server: EmbeddedRedis, namespace: str) -> Callable[[int], list[Event]]:
    """All events of a request, once it has ended."""
    return partial(events_of, server.url, namespace)


class Log:
    """What the request log must do, in a few lines: who waits, and who is taken by this epoch."""

    def __init__(self) -> None:
        self.waiting: list[tuple[int, int]] = []  # priority and number
        self.taken: list[tuple[int, int]] = []

    def take(self, count: int) -> list[int]:
        first = sorted(self.waiting)[:count]
        self.waiting = [each for each in self.waiting if each not in first]
        self.taken += first
        return [number for _, number in first]

    def drop(self, number: int) -> None:
        self.waiting = [each for each in self.waiting if each[1] != number]
        self.taken = [each for each in self.taken if each[1] != number]

    def begin(self) -> None:
        self.waiting, self.taken = self.waiting + self.taken, []


LOG_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(-2, 2)),
        st.tuples(st.just("take"), st.integers(1, 3)),
        st.tuples(st.sampled_from(["finish", "cancel"]), st.integers(0, 20)),
        st.tuples(st.just("epoch"), st.just(0)),
    ),
    max_size=30,
)


@given(LOG_STEPS)
def test_no_request_is_lost_or_doubled_and_all_are_taken_by_their_places(server, told):
    namespace, log, ids = f"log-{next(names)}", Log(), []
    head, ended = head_of(server, namespace), set()
    for what, number in told:
        if what == "ask":
            ids.append(head.enqueue(**ASKED, priority=number))
            log.waiting.append((number, ids[-1]))
        elif what == "take":
            while (found := head.next_requests(number, wait=False)) == [] and log.waiting:
                pass  # it has not heard that something arrived
            assert [request.id for request, _ in found or []] == log.take(number)
        elif what == "epoch":
            head.close()
            head = head_of(server, namespace)
            log.begin()
            for cancelled in ended:
                log.drop(cancelled)
        elif ids:
            one = ids[number % len(ids)]
            if what == "finish":
                head.finish(one, "stop")
                log.drop(one)
            else:
                head.cancel(one)
                waits = one in [each for _, each in log.waiting]
                log.drop(one) if waits else ended.add(one)
    while log.waiting:
        if found := head.next_requests(3, wait=False):
            assert [request.id for request, _ in found] == log.take(3)
    assert not head.next_requests(3, wait=False)
    head.close()
    keys, pipe = RedisKeys(namespace), RedisConnection(server.url)
    admitted = [int(one) for one in pipe.call("ZRANGE", keys.admitted, 0, -1)]
    assert admitted == [number for _, number in sorted(log.taken)]
    assert pipe.call("ZCARD", keys.queue) == 0
    pipe.close()


def test_head_gets_tenants_requests_by_turns_and_one_of_each_that_has_none(server, namespace, pipe):
    head = head_of(server, namespace)
    for tenant, priority in (*(("a", 0),) * 5, *(("b", 2),) * 2, ("", 9), ("a", -1), ("c", 0)):
        head.enqueue(**ASKED, tenant=tenant, priority=priority)
    head.cancel(10)  # the one of c

    def found(count: int, **last: tuple[int, int]) -> list[int]:
        """The requests that the head gets for so much room, by the last ones that wait there."""
        waiting = {tenant.strip("_"): key for tenant, key in last.items()}
        return [one.id for one, _ in head.next_requests(count, waiting, wait=False) or []]

    assert found(0) == [8, 9, 6], "of each tenant the first"
    assert found(0, _=(9, 8), a=(-1, 9), b=(2, 6)) == []
    before = commands(pipe, "evalsha")
    assert found(0, _=(9, 8), a=(-1, 9), b=(2, 6)) == [], "nothing has changed"
    assert commands(pipe, "evalsha") == before
    assert found(3, _=(9, 8), b=(2, 6)) == [1, 7, 2], "by turns"
    urgent = head.enqueue(**ASKED, tenant="a", priority=-2)
    while not (more := found(0, a=(0, 2))):
        pass  # it has not heard
    assert more == [urgent], "what comes before the last that waits"
    head.close()
    with head_of(server, namespace) as head:
        assert found(0) == [8, urgent, 6], "a new epoch begins again"
        head.cancel(9)
        assert sorted(found(99)) == [1, 2, 3, 4, 5, 7]


def commands(pipe: RedisConnection, kind: str = "") -> int:
    """How many commands Redis has run, of one kind or of all but this question and what a rank
    always has under way."""
    told = pipe.call("INFO", "commandstats").decode()
    calls = re.findall(r"^cmdstat_(\w+)\S*:calls=(\d+)", told, re.MULTILINE)
    apart = ("info", "blpop")
    return sum(int(n) for name, n in calls if name not in apart and kind in ("", name))


def test_redis_is_not_asked_while_nothing_arrives(head, pipe):
    assert head.next_requests(4, wait=False) == []  # an epoch begins: it is asked once
    before = commands(pipe)
    for _ in range(50):
        assert head.next_requests(4, wait=False) == []
    assert commands(pipe) == before
    head.close_queue()
    assert head.next_requests(4, wait=True) is None
    before = commands(pipe)
    for wait in (True, False) * 20:
        assert head.next_requests(4, wait=wait) is None
    assert commands(pipe) == before


def test_many_requests_are_announced_once(server, pipe):
    namespace = f"log-{next(names)}"
    epoch = epoch_control.begin_epoch(server.url, namespace)
    announced = f"{RedisKeys(namespace).ready(epoch)}:0"
    with RequestLog(server.url, namespace=namespace, epoch=epoch) as user:
        ids = [user.enqueue(**ASKED) for _ in range(100)]
        user.close_queue()
        assert pipe.call("LRANGE", announced, 0, -1) == [b"ARRIVED"]
        with Controller(server.url, namespace=namespace, epoch=epoch, rank=0) as head:
            before = commands(pipe, "evalsha")
            found = head.next_requests(99, wait=True) or []
            assert [request.id for request, _ in found] == ids[:99]
            assert commands(pipe, "evalsha") == before + 1
            ids.append(user.enqueue(**ASKED))
            # There was more than was asked for, so nothing has to be said.
            found = head.next_requests(99, wait=True) or []
            assert [request.id for request, _ in found] == ids[99:]
            assert head.next_requests(99, wait=True) is None
            assert commands(pipe, "evalsha") <= before + 4  # one of them is enqueue's
            ids.append(user.enqueue(**ASKED))  # is told again, though the queue was closed
            while (found := head.next_requests(99, wait=False)) is None:
                pass  # it has not heard
            assert [request.id for request, _ in found] == ids[-1:]


@pytest.mark.parametrize("epochs", [0, 1])
def test_a_request_of_before_the_first_head_is_taken_and_leaves_nothing(server, pipe, epochs):
    """Before the first epoch, or in one to which no head came."""
    namespace = f"log-{next(names)}"
    epoch = epoch_control.begin_epoch(server.url, namespace) if epochs else 0
    with RequestLog(server.url, namespace=namespace, epoch=epoch) as user:
        request = user.enqueue(**ASKED)
    assert len(pipe.call("KEYS", f"{RedisKeys(namespace).epochs}:*")) >= epochs
    with head_of(server, namespace) as head:
        assert not pipe.call("KEYS", f"{RedisKeys(namespace).epochs}:{epoch}:*")
        assert head.next_requests(1, wait=False) == [(Request(request, **ASKED), ())]


@pytest.fixture
def waiting(
    server: EmbeddedRedis, head: Controller, namespace: str
) -> Iterator[Future[list[tuple[Request, tuple[int, ...]]] | None]]:
    """What a head hears that waits for requests in a thread of its own, and has begun to."""
    assert head.next_requests(4, wait=False) == []
    with ThreadPoolExecutor(1) as thread:
        yield thread.submit(head.next_requests, 4, wait=True)
        epoch_control.begin_epoch(server.url, namespace)  # whatever happened, it waits no longer


@pytest.fixture
def user(server: EmbeddedRedis, namespace: str) -> Iterator[RequestLog]:
    with RequestLog(server.url, namespace=namespace, epoch=1) as user:
        yield user


def test_a_head_that_waits_is_woken_by_a_request(user, waiting):
    request = user.enqueue(**ASKED)
    assert waiting.result(20) == [(Request(id=request, **ASKED), ())]


def test_a_head_that_waits_learns_that_nothing_will_come(user, waiting):
    user.close_queue()
    assert waiting.result(20) is None


def test_a_head_that_waits_hears_what_is_cancelled(head, user, request):
    first = head.enqueue(**ASKED)
    assert take(head)
    waiting = request.getfixturevalue("waiting")
    user.cancel(first)
    user.cancel(user.enqueue(**ASKED))  # may be in the queue no more when the head asks
    last = user.enqueue(**ASKED)
    found = waiting.result(20)
    assert head.cancelled(first)
    while last not in [request.id for request, _ in found]:
        found += head.next_requests(4, wait=True) or []


def test_a_head_that_waits_learns_that_its_epoch_is_over(server, namespace, waiting):
    epoch_control.begin_epoch(server.url, namespace)
    with pytest.raises(StaleEpoch):
        waiting.result(20)


def test_readers_hear_what_the_first_token_took_if_the_head_knows(head, events):
    for known, cached in ((None, None), (0, 0), (12_345_678_901, 7), (None, 9)):
        request = head.enqueue(**ASKED)
        take(head)
        head.finish(request, "stop", known, cached)
        (end,) = events(request)
        assert isinstance(end, Finished)
        assert (end.reason, end.prefill_ns, end.cached) == ("stop", known, cached)


def test_prompt_logprobs_are_sent_once_and_before_the_answer(head, events):
    request = head.enqueue(**ASKED)
    told = [TokenLogprobs(-0.1 * i, ((i, -1e-17), (9, -2.5))) for i in range(1, 4)]
    head.add_prompt_logprobs(request, PromptLogprobs(1, (told[0],)))
    # It is read again after a fault, and in other portions.
    head.add_prompt_logprobs(request, PromptLogprobs(1, tuple(told[:2])))
    head.add_prompt_logprobs(request, PromptLogprobs(1, tuple(told[:2])))
    accept(head, request, 3, [10])
    head.finish(request, "stop")
    head.add_prompt_logprobs(request, PromptLogprobs(3, (told[2],)))
    expected = [
        PromptLogprobs(1, (told[0],)),
        PromptLogprobs(2, (told[1],)),
        Accepted(3, (10,)),
        Finished("stop"),
    ]
    assert events(request) == expected
    assert head.tokens(request) == (10,)


def test_a_request_with_which_clusters_end_is_given_up(server, namespace, events):
    """It may be what ends them, and every further one would take it up too."""
    poison, innocent, waiting = 1, 2, 3
    with head_of(server, namespace) as head:
        assert [head.enqueue(**ASKED) for _ in range(3)] == [poison, innocent, waiting]
    for tokens in range(MAX_FAILED_CLUSTERS):
        for failed in (False, False, False, True):  # neither lost ranks nor orderly ends count
            epoch_control.end_epoch(server.url, namespace, failed=False)
            with head_of(server, namespace) as head:
                found = head.next_requests(2, wait=False)
                assert [request.id for request, _ in found or []] == [poison, innocent]
                if failed:
                    accept(head, innocent, 3 + tokens, [9])
        epoch_control.end_epoch(server.url, namespace, failed=True)
    with head_of(server, namespace) as head:
        assert events(poison) == [Finished(FAILED)]
        found = head.next_requests(9, wait=False)
        assert [request.id for request, _ in found or []] == [innocent, waiting]


def test_tokens_of_several_requests_are_published_at_once(head, pipe, events):
    first, second = head.enqueue(**ASKED), head.enqueue(**ASKED)
    told = [TokenLogprobs(-0.5, ((4, -1e-17),)), TokenLogprobs(-0.25), TokenLogprobs(-1)]
    before = commands(pipe, "evalsha")
    pieces = [
        (first, Accepted(3, (10, 11))),
        (second, Accepted(3, (20, 21), tuple(told[:2]))),
        (first, Accepted(4, (11, 12, 13))),  # one of them told before
        (second, Accepted(4, (21, 22), tuple(told[1:]))),
        (second, Accepted(6, ())),
    ]
    head.accept(pieces)
    head.accept(pieces)
    head.finish(first, "stop")
    head.finish(second, "stop")
    head.accept(pieces)
    head.finish(first, "length")  # the first reason stays
    assert head.tokens(first) == (10, 11, 12, 13)
    assert commands(pipe, "evalsha") == before + 6
    end = Finished("stop")
    for _ in range(2):  # a reader may come late or again
        assert events(first) == [Accepted(3, (10, 11)), Accepted(5, (12, 13)), end]
    answer = [Accepted(3, (20, 21), tuple(told[:2])), Accepted(5, (22,), (told[2],))]
    assert events(second) == [*answer, end]


def test_sampling_parameters_travel_exactly(head):
    sampling = Asked(
        temperature=0.1 + 0.2, logit_bias=((3, -1.5), (4, 1e-3)), seed=2**63 - 1, logprobs=0
    )
    request = head.enqueue(**ASKED, sampling=sampling)
    assert take(head) == Request(id=request, **ASKED, sampling=sampling)


def perform(head: Controller, write: Callable[[], object]) -> None:
    """Writes and waits until Redis has done it; raises what it refused."""
    write()
    head.tokens(0)  # which waits for Redis


def test_of_several_pieces_with_one_refused_nothing_is_accepted(head):
    first, second, over = (head.enqueue(**ASKED) for _ in range(3))
    head.finish(over, "stop")
    good, also_good = (first, Accepted(3, (10,))), (second, Accepted(3, (20,)))
    beyond = (first, Accepted(5, (1,)))
    finished = (over, Accepted(3, (1,)))
    unknown = (99, Accepted(0, (1,)))
    for pieces, said in (
        ([good, beyond], "has 4 tokens, and none can be accepted at 5"),
        ([also_good, beyond, good], "has 3 tokens, and none can be accepted at 5"),
        ([good, finished, also_good], r"finished \(stop\)"),
        ([good, also_good, unknown], "equest 99 is not in the log"),
    ):
        with pytest.raises(ControllerError, match=said):
            perform(head, lambda pieces=pieces: head.accept(pieces))
        assert head.tokens(first) == head.tokens(second) == head.tokens(over) == ()
    head.accept([good, also_good])
    assert head.tokens(first) + head.tokens(second) == (10, 20)


def test_a_request_that_is_not_in_the_log_is_named(head):
    for call in (
        lambda: accept(head, 99, 0, [1]),
        lambda: head.finish(99, "stop"),
        lambda: head.cancel(99),
    ):
        with pytest.raises(ControllerError, match="equest 99 is not in the log"):
            perform(head, call)


def test_what_a_stale_epoch_writes_is_refused(server, head, namespace):
    request = head.enqueue(**ASKED)
    epoch_control.begin_epoch(server.url, namespace)
    for write in (
        lambda: accept(head, request, 3, [1]),
        lambda: head.finish(request, "stop"),
        lambda: head.report(request, {}),
        lambda: take(head),
        lambda: head.close_queue(),
        lambda: head.publish_stage_stats(NO_TIMES, {"busy_ns": 30}),
    ):
        with pytest.raises(StaleEpoch):
            perform(head, write)
    assert head.tokens(request) == ()
    assert read_status(server.url, namespace).totals == {}


def test_a_closed_queue_ends_when_it_is_empty(server, head, namespace):
    request = head.enqueue(**ASKED)
    head.close_queue()
    assert take(head).id == request
    assert take(head) is None  # at once: nothing will come
    with head_of(server, namespace) as successor:
        assert take(successor).id == request
        assert take(successor, wait=False) is None
        successor.enqueue(**ASKED)
        assert take(successor) is not None


def test_what_is_counted_adds_up_over_epochs(server, head, namespace):
    def seen() -> ClusterStatus:
        return read_status(server.url, namespace)

    def stage(epoch: int) -> Controller:
        return Controller(server.url, namespace=namespace, epoch=epoch, rank=1)

    head.publish_statistics({"running": 2}, {"steps": 7, "hits/1": 3})
    with stage(seen().epoch) as first:
        first.publish_stage_stats(NO_TIMES, {"busy_ns": 30, "active_ns": 40})
        first.publish_stage_stats(NO_TIMES, {})  # nothing to tell
    with head:
        pass  # all of it has come
    assert seen().statistics == {"running": 2, "steps": 7}
    assert seen().busy == {"1": 0.75}
    before = seen().totals
    assert before == {"steps": 7, "hits/1": 3, "busy_ns/1": 30, "active_ns/1": 40}
    with head_of(server, namespace) as successor:
        assert (seen().statistics, seen().busy) == ({}, {})
        assert seen().totals == before
        successor.publish_statistics({"running": 1}, {"steps": 2, "hits/2": 1})
    assert seen().statistics == {"running": 1, "steps": 2}
    assert seen().totals == before + Counter({"steps": 2, "hits/2": 1})


def test_requests_come_with_what_an_earlier_epoch_has_decided(server, head, pipe, namespace):
    ids = [head.enqueue(**ASKED) for _ in range(4)]
    assert len(head.next_requests(3, wait=True) or []) == 3
    head.accept([(ids[0], Accepted(3, (10, 11))), (ids[2], Accepted(3, (30,)))])
    head.tokens(ids[0])
    with head_of(server, namespace) as successor:
        asked, looked_up = commands(pipe, "evalsha"), commands(pipe, "xrange")
        found = successor.next_requests(9, wait=True) or []
        assert [(request.id, answer) for request, answer in found] == list(
            zip(ids, [(10, 11), (), (30,), ()], strict=True)
        )
        # Only of those with an answer the tokens are looked up.
        assert commands(pipe, "evalsha") == asked + 1
        assert commands(pipe, "xrange") == looked_up + 2


def test_an_epoch_that_begins_does_not_take_up_what_was_cancelled(server, head, namespace, events):
    first, second, third = (head.enqueue(**ASKED) for _ in range(3))
    for _ in range(2):
        take(head)
    accept(head, first, 3, [10, 11])
    head.tokens(first)
    with RequestLog(server.url, namespace=namespace, epoch=1) as user:
        user.cancel(first)
        with head_of(server, namespace) as successor:
            user.cancel(second)  # is back in the queue
            assert take(successor).id == third
            assert events(first) == [Accepted(3, (10, 11)), Finished("cancelled")]
            assert events(second) == [Finished("cancelled")]
            assert not successor.cancelled(third)


def test_a_finished_request_does_not_stay_forever(head, pipe, namespace):
    request = head.enqueue(**ASKED)
    accept(head, request, 3, [1])
    head.report(request, {})
    keys = RedisKeys(namespace)
    names = (keys.request(request), keys.events(request), keys.reports(request))
    head.tokens(request)  # which waits for Redis
    assert [pipe.call("TTL", key) for key in names[:2]] == [-1, -1]
    perform(head, lambda: head.finish(request, "stop"))
    assert all(0 < pipe.call("TTL", key) <= request_log.KEEP_FINISHED_S for key in names)


def test_what_comes_late_of_a_request_that_is_forgotten_is_dropped(head, pipe, namespace):
    """A stage may say it when the head has long ended it, also after the hour."""
    request, keys = head.enqueue(**ASKED), RedisKeys(namespace)
    perform(head, lambda: head.finish(request, "stop"))
    pipe.call("DEL", keys.request(request), keys.events(request))
    perform(
        head,
        lambda: head.add_prompt_logprobs(request, PromptLogprobs(1, (TokenLogprobs(-0.1, ()),))),
    )
    perform(head, lambda: head.report(request, {"rows": 1}))
    names = (keys.request(request), keys.events(request), keys.reports(request))
    assert not pipe.call("EXISTS", *names)


def test_requests_that_redis_has_evicted_hold_up_no_other(server, pipe, namespace):
    """A Redis of the user's own may evict keys: requests, or what they share."""
    keys = RedisKeys(namespace)
    with head_of(server, namespace) as head:
        gone, without_shared, admitted, left = (head.enqueue(**ASKED) for _ in range(4))
        pipe.call("DEL", keys.request(gone), keys.shared(without_shared))
        found = head.next_requests(4, wait=False) or []
        assert [each.id for each, _ in found] == [admitted, left]
        assert pipe.call("HGET", keys.request(without_shared), "reason") == FAILED.encode()
        assert not pipe.call("EXISTS", keys.request(gone), keys.shared(without_shared))
        pipe.call("DEL", keys.request(admitted))
    epoch_control.end_epoch(server.url, namespace, failed=True)
    with head_of(server, namespace) as head:
        found = head.next_requests(4, wait=False) or []
        assert [each.id for each, _ in found] == [left]
        perform(head, partial(head.finish, left, "stop"))
    rest = (keys.queue, f"{keys.queue}:of:", f"{keys.queue}:tenants", keys.admitted)
    assert not pipe.call("EXISTS", *rest)


def test_what_answers_of_a_user_share_is_stored_once_and_goes_with_the_last(head, pipe, namespace):
    keys, prompts = RedisKeys(namespace), ((7,) * 3000, (8,) * 3000)
    sampling = Asked(1.0, grammar="g" * 100_000)
    requests = [
        Request(0, prompt, 9, stop=("x" * 200,) * 64, sampling=replace(sampling, seed=seed))
        for prompt in prompts
        for seed in range(64)
    ]
    before = used(pipe)
    first = pipe.call(*enqueuing(keys, requests))
    assert used(pipe) - before < 2**20
    found = head.next_requests(200, wait=True) or []
    assert [each for each, _ in found] == [
        replace(each, id=first + i) for i, each in enumerate(requests)
    ]
    for request, _ in found[1:]:
        perform(head, partial(head.finish, request.id, "stop"))
    assert pipe.call("EXISTS", keys.shared(first)) == 1
    perform(head, lambda: head.finish(first, "stop"))
    assert pipe.call("EXISTS", keys.shared(first)) == 0


def used(pipe: RedisConnection) -> int:
    """Bytes of Redis' memory."""
    return int(re.search(rb"used_memory:(\d+)", pipe.call("INFO", "memory"))[1])  # type: ignore[index]


TOP = tuple((100_000 + i, -1.2345678901234567) for i in range(20))
LOGPROBS = TokenLogprobs(-12.345678901234567, TOP)


@pytest.mark.parametrize("asked", [{}, {"logprobs": 20}, {"prompt_logprobs": 20}])
def test_request_occupies_no_more_than_was_counted_at_its_admission(head, pipe, namespace, asked):
    count, keys = 2000, RedisKeys(namespace)
    request = Request(0, (1000,) * count, count, sampling=Asked(**asked))
    with pytest.MonkeyPatch.context() as patched:
        number = pipe.call(*enqueuing(keys, [request]))
        take(head)
        for i in range(count if "prompt_logprobs" in asked else 0):
            head.add_prompt_logprobs(number, PromptLogprobs(i, (LOGPROBS,)))
        scored = [LOGPROBS] if "logprobs" in asked else []
        for i in range(count):
            accept(head, number, count + i, [50_000], scored)
        head.report(number, {"token_ns": [10**18 + i for i in range(count)]})
        perform(head, lambda: head.tokens(number))
        names = (keys.request, keys.events, keys.reports, keys.shared)
        occupied = sum(pipe.call("MEMORY", "USAGE", name(number)) for name in names)
        patched.setattr(log_records, "MAX_BYTES", occupied)
        with pytest.raises(ConfigError, match="may take"):
            enqueuing(keys, [request], 2 * count + 1)


# Prompts, answers to each, and the settings of the largest requests that are admitted; their tokens
# are as many as fit.
LARGEST: list[Any] = [
    (8, 128, {"logprobs": 20, "grammar": "g" * 100_000}),
    (1, 1, {}),
    (1, 1, {"prompt_logprobs": 20}),
    pytest.param(8, 1, {}, marks=pytest.mark.long),
]


@pytest.mark.slow
@pytest.mark.parametrize(("prompts", "answers", "asked"), LARGEST)
def test_largest_request_is_less_than_20_mib_in_redis(
    head, pipe, namespace, prompts, answers, asked
):
    """At any time, with the longest numbers, and each token by itself."""
    in_prompts = prompts > answers or "prompt_logprobs" in asked

    def of(tokens: int) -> list[Request]:
        length, new = (tokens, 1) if in_prompts else (300, tokens)
        sampling = Asked(1.0, **asked)
        return [
            Request(
                *(0, tuple(range(100_000 + first, 100_000 + first + length)), new),
                stop=("x" * 256,) * 64,
                sampling=replace(sampling, seed=2**59 + number),
            )
            for first in range(prompts)
            for number in range(answers)
        ]

    def fits(tokens: int) -> bool:
        with suppress(ConfigError):
            return bool(enqueuing(keys, of(tokens)))
        return False

    keys, most = RedisKeys(namespace), 2**20
    most = bisect_left(range(most), True, key=lambda tokens: not fits(tokens)) - 1
    before = used(pipe)
    pipe.call(*enqueuing(keys, of(most)))
    grown = [used(pipe) - before]
    found = head.next_requests(2 * prompts * answers, wait=True) or []
    requests = [request for request, _ in found]
    for request in requests:
        length, count = len(request.prompt), request.max_new_tokens
        for at in range(1, length if "prompt_logprobs" in asked else 1):
            head.add_prompt_logprobs(request.id, PromptLogprobs(at, (LOGPROBS,)))
        scored = (LOGPROBS,) * ("logprobs" in asked)
        pieces = [(request.id, Accepted(length + i, (150_000,), scored)) for i in range(count)]
        for first in range(0, count, 1000):
            head.accept(pieces[first : first + 1000])
        head.report(request.id, {"token_ns": [10**18 + at for at in range(count)]})
    head.tokens(0)  # which waits for Redis
    grown.append(used(pipe) - before)
    assert max(grown) < 20 * 2**20 and len(requests) == prompts * answers
    for request in requests:
        perform(head, partial(head.finish, request.id, "length"))
    pipe.call("DEL", *(name(each.id) for each in requests for name in (keys.events, keys.reports)))


@pytest.mark.parametrize(
    ("count", "tokens", "asked", "fits"),
    [
        (1, 10**6, {}, False),
        (1, 250_000, {}, True),
        (128, 2000, {}, True),
        (128, 100, {"logprobs": 20}, True),
        (128, 2000, {"logprobs": 20}, False),
        (128, 1, {"prompt_logprobs": 20}, False),
    ],
)
def test_request_that_may_occupy_too_much_is_refused_by_name(count, tokens, asked, fits):
    request = Request(0, (1,) * 1000, tokens, sampling=Asked(**asked))
    with nullcontext() if fits else pytest.raises(ConfigError, match="may take 18; ask for fewer"):
        enqueuing(RedisKeys("any"), [request] * count, 10**7)


def test_requests_are_refused_while_memory_is_full_and_ended_ones_go_sooner(head, pipe, namespace):
    known = head.enqueue(**ASKED)
    (most,) = pipe.call("CONFIG", "GET", "maxmemory")[1:]
    try:
        pipe.call("CONFIG", "SET", "maxmemory", int(used(pipe) / 0.8))
        with pytest.raises(LogFull, match="full"):
            head.enqueue(**ASKED)
        perform(head, lambda: head.finish(known, "stop"))
        assert 0 < pipe.call("TTL", RedisKeys(namespace).events(known)) <= 60
    finally:
        pipe.call("CONFIG", "SET", "maxmemory", most)
    head.enqueue(**ASKED)


def test_log_that_cannot_be_written_is_noticed(server, namespace):
    async def check() -> None:
        log = AsyncRequestLog(server.url, namespace=namespace, patience=0)
        try:
            await log.check_writable()
        finally:
            await log.close()

    with RedisConnection(server.url) as pipe:
        asyncio.run(check())
        pipe.call("CONFIG", "SET", "min-replicas-to-write", 1)
        try:
            with pytest.raises(WritesRefused) as refused:
                asyncio.run(check())
        finally:
            pipe.call("CONFIG", "SET", "min-replicas-to-write", 0)
    assert api_error_of(refused.value).status == 503


def test_every_rank_reports(server, head, namespace):
    request = head.enqueue(**ASKED)
    with Controller(server.url, namespace=namespace, epoch=1, rank=1) as stage:
        stage.report(request, {"busy": 0.5})
        head.report(request, {"steps": 7, "tbt": [1.5, 2]})
        assert reports_of(server.url, namespace, request, count=2) == {
            0: {"steps": 7, "tbt": [1.5, 2]},
            1: {"busy": 0.5},
        }
    with pytest.raises(ControllerError, match=r"2 of 3 ranks \(\[0, 1\]\)"):
        reports_of(server.url, namespace, request, count=3, timeout=0.01)
