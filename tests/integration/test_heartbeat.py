import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise

import pytest

from pipespec.cluster.ranks import heartbeat as heartbeat_module
from pipespec.cluster.ranks.heartbeat import Heartbeat
from pipespec.controller import epoch_control, membership
from pipespec.controller.embedded_redis import EmbeddedRedis
from pipespec.controller.membership import LEASE_S, Epoch, Membership
from pipespec.controller.redis_connection import RedisConnection
from pipespec.controller.redis_keys import RedisKeys
from pipespec.errors import ControllerError, StaleEpoch, Unreachable
from pipespec.transport.distributed import GlooWait
from tests.helpers.waiting import until

NAMESPACE = "heartbeat"
WORKER = "alpha/1"
# For what comes; tests end as soon as it has.
PATIENCE_S = 30.0


def begin(redis: EmbeddedRedis, plan: str = "") -> int:
    return epoch_control.begin_epoch(redis.url, NAMESPACE, plan)


def beating(redis: EmbeddedRedis, patience_s: float = PATIENCE_S) -> Heartbeat:
    return Heartbeat(redis.url, NAMESPACE, WORKER, patience_s=patience_s)


def by_hand(redis: EmbeddedRedis) -> Heartbeat:
    """Of a worker that was started by hand, without patience."""
    return Heartbeat(redis.url, NAMESPACE, WORKER, patience_s=0.0, by_hand=True)


def kill(redis: EmbeddedRedis) -> None:
    """Ends the server as a crash would; returns when it is gone."""
    os.kill(redis.pid, signal.SIGKILL)
    until(lambda: not redis.alive())


@contextmanager
def waiting_for(heartbeat: Heartbeat, after: int) -> Iterator[Future[Epoch]]:
    """What `next` brings a thread that waits while the block runs."""
    with ThreadPoolExecutor(1) as thread:
        yield thread.submit(heartbeat.next, after)


class RecordingLink:
    """A link that records the threads that abort it."""

    def __init__(self) -> None:
        self.callers: list[int] = []
        self.rung = threading.Event()

    def abort(self) -> None:
        self.callers.append(threading.get_ident())
        self.rung.set()

    def await_abort(self) -> None:
        assert self.rung.wait(PATIENCE_S), "the link was not aborted"


def test_each_new_epoch_wakes_waiting_workers(redis):
    with beating(redis) as heartbeat:
        for number in (1, 2, 3):
            with waiting_for(heartbeat, number - 1) as found:
                begin(redis, f"plan {number}")
            assert found.result() == Epoch(number, f"plan {number}")
        heartbeat.check(3)
        with pytest.raises(StaleEpoch, match="Epoch 2 is over"):
            heartbeat.check(2)


def test_links_are_aborted_once_when_the_epoch_ends(redis):
    begin(redis)
    link = RecordingLink()
    with beating(redis) as heartbeat:
        epoch = heartbeat.next(0).number
        with heartbeat.aborting(epoch, link.abort):
            assert link.callers == []
            begin(redis)
            link.await_abort()
            with pytest.raises(StaleEpoch):
                heartbeat.check(epoch)
            # Neither later epochs nor a Redis that goes away call it again.
            begin(redis)
            assert heartbeat.next(2).number == 3
            kill(redis)
            redis.restart()
            begin(redis)
            assert heartbeat.next(3).number == 4
        assert len(link.callers) == 1
        assert threading.get_ident() not in link.callers


def test_block_does_not_end_while_its_links_are_aborted(redis):
    """The end of the block would close the link meanwhile."""
    begin(redis)
    begun, ended = threading.Event(), threading.Event()
    overlapped: list[bool] = []

    class SlowLink:
        def abort(self) -> None:
            begun.set()
            overlapped.append(ended.wait(0.2))

    with beating(redis) as heartbeat:
        with heartbeat.aborting(heartbeat.next(0).number, SlowLink().abort):
            begin(redis)
            assert begun.wait(PATIENCE_S)
        ended.set()
    assert overlapped == [False]


def test_what_a_waiting_rank_does_not_see_is_reported_once(redis):
    begin(redis)
    looks: list[int] = []

    def look() -> None:
        looks.append(threading.get_ident())
        if len(looks) == 2:
            raise ControllerError("a command was lost.")

    with Membership(redis.url, NAMESPACE) as shared, beating(redis) as heartbeat:
        epoch = heartbeat.next(0).number
        with heartbeat.aborting(epoch, look=look):
            (found,) = shared.suspicions(PATIENCE_S)
            begin(redis)
            heartbeat.next(epoch)
        assert (found.epoch, found.worker, found.reason) == (epoch, WORKER, "a command was lost.")
    assert len(looks) == 2
    assert threading.get_ident() not in looks


def test_an_epoch_that_is_over_is_not_guarded(redis):
    begin(redis)
    link = RecordingLink()
    with beating(redis) as heartbeat:
        begin(redis)
        heartbeat.next(1)
        with pytest.raises(StaleEpoch, match="a newer one has begun"):
            heartbeat.aborting(1, link.abort).__enter__()
        begin(redis)
        heartbeat.next(2)
    assert link.callers == []


def test_the_links_of_an_outer_block_are_aborted_after_the_inner_one(redis):
    begin(redis)
    outer, inner = RecordingLink(), RecordingLink()
    with beating(redis) as heartbeat:
        epoch = heartbeat.next(0).number
        with heartbeat.aborting(epoch, outer.abort):
            with heartbeat.aborting(epoch, inner.abort):
                pass
            begin(redis)
            outer.await_abort()
    assert inner.callers == []


def test_a_worker_lives_as_long_as_its_launcher_though_redis_lives_on(redis, monkeypatch):
    """As with a Redis of the user's, whose launcher was killed."""
    monkeypatch.setattr(heartbeat_module, "LAUNCHER_S", 0.5)
    monkeypatch.setattr(membership, "LAUNCHER_LEASE_S", 0.8)
    epoch = begin(redis)
    with by_hand(redis) as heartbeat, Membership(redis.url, NAMESPACE) as shared:
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            shared.renew_launcher()
            heartbeat.check(epoch)
        with pytest.raises(Unreachable, match="The launcher of the cluster gave no sign of life"):
            heartbeat.next(epoch)


def test_a_worker_that_gloo_does_not_release_is_killed(redis, monkeypatch):
    monkeypatch.setattr(heartbeat_module, "RELEASE_S", 0.2)
    begin(redis)
    killed = threading.Event()
    with (
        Heartbeat(redis.url, NAMESPACE, WORKER, patience_s=9, kill=killed.set) as heartbeat,
        heartbeat.aborting(heartbeat.next(0).number, RecordingLink().abort),
        GlooWait(),
    ):
        begin(redis)
        assert killed.wait(PATIENCE_S)


def test_a_worker_that_computes_when_its_links_are_aborted_is_left_alone(redis, monkeypatch):
    """It finds out when it uses them next, which may take seconds."""
    monkeypatch.setattr(heartbeat_module, "RELEASE_S", 0.0)
    begin(redis)
    killed, link = threading.Event(), RecordingLink()
    with (
        Heartbeat(redis.url, NAMESPACE, WORKER, patience_s=9, kill=killed.set) as heartbeat,
        heartbeat.aborting(heartbeat.next(0).number, link.abort),
    ):
        begin(redis)
        link.await_abort()
        for number in (2, 3):
            begin(redis)
            assert heartbeat.next(number).number == number + 1
    assert not killed.is_set()


def test_links_are_aborted_when_redis_goes_away(redis):
    """A rank's own connection is lost too, and its epoch with it."""
    begin(redis)
    link = RecordingLink()
    with beating(redis) as heartbeat, heartbeat.aborting(heartbeat.next(0).number, link.abort):
        kill(redis)
        link.await_abort()
    assert len(link.callers) == 1


def test_a_lease_is_renewed_until_it_runs_out_after_the_end(redis):
    with Membership(redis.url, NAMESPACE) as shared:
        assert shared.alive([WORKER]) == {}
        with beating(redis):
            until(lambda: shared.alive([WORKER]))
            assert shared.alive([WORKER, "beta/0"]) == {WORKER: os.getpid()}
            pipe = RedisConnection(redis.url)
            lease = RedisKeys(NAMESPACE).lease(WORKER)
            left_ms = pipe.call("PTTL", lease)
            assert 0 < left_ms <= LEASE_S * 1000
            seen = [left_ms]

            def renewed_twice() -> bool:
                seen.append(pipe.call("PTTL", lease))
                assert seen[-1] > 0, "it ran out"
                return sum(after > before for before, after in pairwise(seen)) == 2

            until(renewed_twice)
            pipe.close()
        until(lambda: not shared.alive([WORKER]))


def test_a_redis_that_comes_back_is_reached_again(redis):
    begin(redis, "first")
    with beating(redis) as heartbeat, Membership(redis.url, NAMESPACE) as before:
        until(lambda: before.alive([WORKER]))
        heartbeat.next(0)
        for number, end in ((2, kill), (3, lambda redis: None)):
            with waiting_for(heartbeat, number - 1) as found:
                end(redis)
                redis.restart()
                heartbeat.check(number - 1)  # an epoch outlives its Redis
                begin(redis, f"plan {number}")
            assert found.result() == Epoch(number, f"plan {number}")
        with Membership(redis.url, NAMESPACE) as shared:
            RedisConnection(redis.url).call("DEL", RedisKeys(NAMESPACE).lease(WORKER))
            until(lambda: shared.alive([WORKER]))


def test_a_redis_that_stays_away_too_long_is_given_up(redis):
    begin(redis)
    link = RecordingLink()
    with beating(redis, patience_s=0.2) as heartbeat:
        epoch = heartbeat.next(0).number
        with waiting_for(heartbeat, epoch) as found:
            kill(redis)
        assert isinstance(found.exception(), Unreachable)
        with pytest.raises(Unreachable, match=r"Redis at .* refused the connection"):
            heartbeat.next(epoch)
        with pytest.raises(Unreachable):
            heartbeat.check(epoch)
        heartbeat.suspect(epoch, "The link to rank 2 broke.")  # raises nothing
        with pytest.raises(Unreachable), heartbeat.aborting(epoch, link.abort):
            pass
        # What is known stays known.
        assert heartbeat.next(0).number == epoch
        with pytest.raises(StaleEpoch):
            heartbeat.check(epoch - 1)
    assert link.callers == []


def test_a_redis_that_refuses_writes_for_a_while_is_waited_for(redis):
    begin(redis)
    with (
        beating(redis) as heartbeat,
        RedisConnection(redis.url) as pipe,
        Membership(redis.url, NAMESPACE) as shared,
    ):
        until(lambda: shared.alive([WORKER]))
        (most,) = pipe.call("CONFIG", "GET", "maxmemory")[1:]
        pipe.call("CONFIG", "SET", "maxmemory", 1)
        heartbeat.suspect(4, "The link to rank 2 broke.")  # raises nothing
        pipe.call("DEL", RedisKeys(NAMESPACE).lease(WORKER))
        pipe.call("CONFIG", "SET", "maxmemory", most)
        until(lambda: shared.alive([WORKER]))
        heartbeat.check(heartbeat.next(0).number)


def test_a_redis_that_takes_nothing_more_is_given_up(redis):
    begin(redis)
    link = RecordingLink()
    with beating(redis, patience_s=0.2) as heartbeat:
        epoch = heartbeat.next(0).number
        with heartbeat.aborting(epoch, link.abort):
            RedisConnection(redis.url).call("CONFIG", "SET", "maxmemory", 1)
            link.await_abort()
        for ask in (heartbeat.next, heartbeat.check):
            with pytest.raises(ControllerError, match=r"Redis refuses writes: .*maxmemory"):
                ask(epoch)
    assert len(link.callers) == 1
