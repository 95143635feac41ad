"""A worker's heartbeat in a real Redis: it tells of new epochs, and that the worker lives."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest

from pipespec.cluster.heartbeat import Heartbeat
from pipespec.controller import epochs
from pipespec.controller.connection import Pipe
from pipespec.controller.keys import Keys
from pipespec.controller.membership import LEASE_S, Epoch, Membership, Suspicion
from pipespec.controller.server import EmbeddedRedis
from pipespec.errors import ControllerError, StaleEpoch, Unreachable
from tests.helpers.waiting import until

NAMESPACE = "heartbeat"
WORKER = "alpha/1"
# For what comes; tests end as soon as it has.
PATIENCE_S = 30.0


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


def begin(server: EmbeddedRedis, plan: str = "") -> int:
    return epochs.begin(server.url, NAMESPACE, plan)


def beating(server: EmbeddedRedis, patience_s: float = PATIENCE_S) -> Heartbeat:
    return Heartbeat(server.url, NAMESPACE, WORKER, patience_s=patience_s)


def kill(server: EmbeddedRedis) -> None:
    """Ends the server as a crash would; returns when it is gone."""
    os.kill(server.pid, signal.SIGKILL)
    until(lambda: not server.alive())


@contextmanager
def waiting_for(heartbeat: Heartbeat, after: int) -> Iterator[list[object]]:
    """What `next` brings a thread that waits while the block runs; filled at its end."""
    found: list[object] = []

    def wait() -> None:
        try:
            found.append(heartbeat.next(after))
        except Unreachable as error:
            found.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    yield found
    thread.join(PATIENCE_S)


class Alarm:
    """Notes the threads that call it."""

    def __init__(self) -> None:
        self.callers: list[int] = []
        self.rung = threading.Event()

    def __call__(self) -> None:
        self.callers.append(threading.get_ident())
        self.rung.set()

    def await_call(self) -> None:
        assert self.rung.wait(PATIENCE_S), "nobody called"


# Epochs ---------------------------------------------------------------------------------------


def test_the_newest_epoch_is_there_at_once(server: EmbeddedRedis) -> None:
    begin(server, "first")
    begin(server, "second")
    with beating(server) as heartbeat:
        assert heartbeat.next(0) == Epoch(2, "second")
        assert heartbeat.next(1) == Epoch(2, "second")
        heartbeat.check(2)


def test_who_waits_is_woken_by_each_new_epoch(server: EmbeddedRedis) -> None:
    with beating(server) as heartbeat:
        for number in (1, 2, 3):
            with waiting_for(heartbeat, number - 1) as found:
                begin(server, f"plan {number}")
            assert found == [Epoch(number, f"plan {number}")]
        heartbeat.check(3)
        with pytest.raises(StaleEpoch, match="Epoch 2 is over"):
            heartbeat.check(2)


# The guard ------------------------------------------------------------------------------------


def test_the_alarm_is_called_once_from_another_thread(server: EmbeddedRedis) -> None:
    begin(server)
    alarm = Alarm()
    with beating(server) as heartbeat:
        epoch = heartbeat.next(0).number
        with heartbeat.guard(epoch, alarm):
            assert alarm.callers == []
            begin(server)
            alarm.await_call()
            with pytest.raises(StaleEpoch):
                heartbeat.check(epoch)
            # Neither later epochs nor a Redis that goes away call it again.
            begin(server)
            assert heartbeat.next(2).number == 3
            kill(server)
            server.restart()
            begin(server)
            assert heartbeat.next(3).number == 4
        assert len(alarm.callers) == 1
        assert threading.get_ident() not in alarm.callers


def test_each_epoch_can_be_guarded_anew(server: EmbeddedRedis) -> None:
    begin(server)
    alarms = [Alarm() for _ in range(3)]
    with beating(server) as heartbeat:
        for number, alarm in enumerate(alarms, 1):
            with heartbeat.guard(heartbeat.next(number - 1).number, alarm):
                begin(server)
                alarm.await_call()
    assert [len(alarm.callers) for alarm in alarms] == [1, 1, 1]


def test_nobody_is_alarmed_after_the_block(server: EmbeddedRedis) -> None:
    begin(server)
    alarm = Alarm()
    with beating(server) as heartbeat:
        with heartbeat.guard(heartbeat.next(0).number, alarm):
            pass
        begin(server)
        heartbeat.next(1)
        assert alarm.callers == []


def test_a_block_does_not_end_while_the_alarm_is_under_way(server: EmbeddedRedis) -> None:
    """The alarm ends a link, which the end of the block would close."""
    begin(server)
    begun, ended = threading.Event(), threading.Event()
    overlapped: list[bool] = []

    def alarm() -> None:
        begun.set()
        overlapped.append(ended.wait(0.2))

    with beating(server) as heartbeat:
        with heartbeat.guard(heartbeat.next(0).number, alarm):
            begin(server)
            assert begun.wait(PATIENCE_S)
        ended.set()
    assert overlapped == [False]


def test_an_epoch_that_is_over_is_not_guarded(server: EmbeddedRedis) -> None:
    begin(server)
    alarm = Alarm()
    entered = False
    with beating(server) as heartbeat:
        epoch = heartbeat.next(0).number
        begin(server)
        heartbeat.next(epoch)
        with (
            pytest.raises(StaleEpoch, match="a newer one has begun"),
            heartbeat.guard(epoch, alarm),
        ):
            entered = True
        begin(server)
        heartbeat.next(2)
    assert not entered
    assert alarm.callers == []


def test_the_alarm_is_called_when_redis_goes_away(server: EmbeddedRedis) -> None:
    """A rank's own connection is lost too, and its epoch with it."""
    begin(server)
    alarm = Alarm()
    with beating(server) as heartbeat, heartbeat.guard(heartbeat.next(0).number, alarm):
        kill(server)
        alarm.await_call()
    assert len(alarm.callers) == 1


def test_an_error_of_the_block_comes_through(server: EmbeddedRedis) -> None:
    begin(server)
    alarm = Alarm()
    with beating(server) as heartbeat:
        with pytest.raises(ZeroDivisionError), heartbeat.guard(heartbeat.next(0).number, alarm):
            _ = 1 / 0
        begin(server)
        heartbeat.next(1)
    assert alarm.callers == []


# The lease ------------------------------------------------------------------------------------


def test_a_lease_is_renewed_until_it_runs_out_after_the_end(server: EmbeddedRedis) -> None:
    with Membership(server.url, NAMESPACE) as shared:
        assert shared.alive([WORKER]) == {}
        with beating(server):
            until(lambda: shared.alive([WORKER]))
            assert shared.alive([WORKER, "beta/0"]) == {WORKER: os.getpid()}
            pipe = Pipe(server.url)
            lease = Keys(NAMESPACE).lease(WORKER)
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


# Suspicions -----------------------------------------------------------------------------------


def test_a_suspicion_is_told_in_the_workers_name(server: EmbeddedRedis) -> None:
    with beating(server) as heartbeat:
        heartbeat.suspect(4, "The link to rank 2 broke.")
    with Membership(server.url, NAMESPACE) as shared:
        assert shared.suspicions(PATIENCE_S) == [Suspicion(4, WORKER, "The link to rank 2 broke.")]


def test_a_suspicion_that_nobody_can_hear_is_kept_to_oneself(server: EmbeddedRedis) -> None:
    with beating(server) as heartbeat:
        kill(server)
        heartbeat.suspect(4, "The link to rank 2 broke.")
    server.restart()
    with Membership(server.url, NAMESPACE) as shared:
        assert shared.suspicions(0.1) == []


# A Redis that goes away -----------------------------------------------------------------------


def test_a_redis_that_comes_back_is_reached_again(server: EmbeddedRedis) -> None:
    begin(server, "first")
    with beating(server) as heartbeat, Membership(server.url, NAMESPACE) as before:
        until(lambda: before.alive([WORKER]))
        heartbeat.next(0)
        for number, end in ((2, kill), (3, lambda server: None)):
            with waiting_for(heartbeat, number - 1) as found:
                end(server)
                server.restart()
                heartbeat.check(number - 1)  # an epoch outlives its Redis
                begin(server, f"plan {number}")
            assert found == [Epoch(number, f"plan {number}")]
        with Membership(server.url, NAMESPACE) as shared:
            shared._pipe.call("DEL", Keys(NAMESPACE).lease(WORKER))
            until(lambda: shared.alive([WORKER]))


def test_a_redis_that_stays_away_too_long_is_given_up(server: EmbeddedRedis) -> None:
    begin(server)
    alarm = Alarm()
    with beating(server, patience_s=0.2) as heartbeat:
        epoch = heartbeat.next(0).number
        with waiting_for(heartbeat, epoch) as found:
            kill(server)
        assert len(found) == 1 and isinstance(found[0], Unreachable)
        with pytest.raises(Unreachable, match=r"Redis at .* refused the connection"):
            heartbeat.next(epoch)
        with pytest.raises(Unreachable):
            heartbeat.check(epoch)
        with pytest.raises(Unreachable), heartbeat.guard(epoch, alarm):
            pass
        # What is known stays known.
        assert heartbeat.next(0).number == epoch
        with pytest.raises(StaleEpoch):
            heartbeat.check(epoch - 1)
    assert alarm.callers == []


def test_a_redis_that_takes_nothing_more_is_given_up_at_once(server: EmbeddedRedis) -> None:
    begin(server)
    alarm = Alarm()
    with beating(server) as heartbeat:
        epoch = heartbeat.next(0).number
        with heartbeat.guard(epoch, alarm):
            Pipe(server.url).call("CONFIG", "SET", "maxmemory", 1)
            alarm.await_call()
        for ask in (heartbeat.next, heartbeat.check):
            with pytest.raises(ControllerError, match=r"Redis refuses writes: .*maxmemory"):
                ask(epoch)
    assert len(alarm.callers) == 1


def test_a_redis_that_was_never_there_is_given_up() -> None:
    with EmbeddedRedis() as server:
        url = server.url
    with (
        Heartbeat(url, NAMESPACE, WORKER, patience_s=0) as heartbeat,
        pytest.raises(Unreachable, match="refused the connection"),
    ):
        heartbeat.next(0)
