"""What the workers of a cluster share in a real Redis: epochs, complaints, who is there."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from typing import TypeVar

import pytest

from pipespec.cluster.faults import FaultKind
from pipespec.cluster.rank_assignment import RankAssignment
from pipespec.cluster.recovery import Recovery
from pipespec.cluster.running_host import Death
from pipespec.controller import epochs
from pipespec.controller.client import Controller
from pipespec.controller.graph import Layout, compute, prune, step_graph, transfer
from pipespec.controller.membership import Epoch, Membership, Suspicion
from pipespec.controller.server import EmbeddedRedis
from pipespec.errors import ConfigError, RankFailed, StaleEpoch, Unreachable
from tests.helpers.log import accept, take
from tests.helpers.waiting import until

# For what comes; tests end as soon as it has.
PATIENCE_S = 20.0
# For what does not come.
SHORT_S = 0.03
ASKED = {"prompt": (5, 6, 7), "max_new_tokens": 9}
names = count()
T = TypeVar("T")


class Life:
    """A namespace, and whoever connects to it."""

    def __init__(self, url: str, stack: ExitStack):
        self.url, self.namespace = url, f"workers-{next(names)}"
        self._stack = stack

    def begin(self, plan: str = "") -> int:
        return epochs.begin(self.url, self.namespace, plan)

    def worker(self) -> Membership:
        return self._stack.enter_context(Membership(self.url, self.namespace))

    def rank(self, epoch: int, rank: int) -> Controller:
        return self._stack.enter_context(
            Controller(self.url, namespace=self.namespace, epoch=epoch, rank=rank)
        )


@pytest.fixture
def life(server: EmbeddedRedis) -> Iterator[Life]:
    with ExitStack() as stack:
        yield Life(server.url, stack)


def during(wait: Callable[[], T], act: Callable[[], object]) -> T:
    """What `wait` returns while another thread waits for it and this one acts."""
    found: list[T] = []
    waiter = threading.Thread(target=lambda: found.append(wait()))
    waiter.start()
    act()
    waiter.join(2 * PATIENCE_S)
    return found[0]


# Epochs ---------------------------------------------------------------------------------------


def test_the_newest_epoch_is_told_with_its_plan(life: Life) -> None:
    shared = life.worker()
    assert shared.epoch(0, SHORT_S) is None
    assert [life.begin(plan) for plan in ("first", "second", "drei → 3")] == [1, 2, 3]
    for known in range(3):
        assert shared.epoch(known, SHORT_S) == Epoch(3, "drei → 3")
    assert shared.epoch(3, SHORT_S) is None
    assert life.begin() == 4
    assert shared.epoch(3, SHORT_S) == Epoch(4, "")  # the end


def test_who_waits_for_an_epoch_is_woken(life: Life) -> None:
    life.begin("first")
    shared = life.worker()
    start = time.monotonic()
    found = during(lambda: shared.epoch(1, PATIENCE_S), lambda: life.begin("second"))
    assert found == Epoch(2, "second")
    assert time.monotonic() - start < PATIENCE_S


# Suspicions -----------------------------------------------------------------------------------


def test_each_suspicion_is_told_once_in_order(life: Life) -> None:
    teller, shared = life.worker(), life.worker()
    assert shared.suspicions(SHORT_S) == []
    teller.suspect(1, "alpha/0", "The link to rank 2 broke.")
    teller.suspect(1, "beta/0", "späť\nno answer")
    told = [
        Suspicion(1, "alpha/0", "The link to rank 2 broke."),
        Suspicion(1, "beta/0", "späť\nno answer"),
    ]
    assert shared.suspicions(PATIENCE_S) == told
    assert shared.suspicions(SHORT_S) == []
    teller.suspect(2, "alpha/0", "again")
    assert shared.suspicions(PATIENCE_S) == [Suspicion(2, "alpha/0", "again")]
    # Who comes later hears everything.
    assert life.worker().suspicions(PATIENCE_S) == [*told, Suspicion(2, "alpha/0", "again")]


def test_who_waits_for_a_suspicion_is_woken(life: Life) -> None:
    teller, shared = life.worker(), life.worker()
    found = during(
        lambda: shared.suspicions(PATIENCE_S), lambda: teller.suspect(3, "alpha/0", "silence")
    )
    assert found == [Suspicion(3, "alpha/0", "silence")]


# Leases ---------------------------------------------------------------------------------------


def test_only_workers_that_said_so_are_alive(life: Life) -> None:
    shared = life.worker()
    everybody = ["alpha/0", "alpha/1", "beta/0"]
    assert shared.alive(everybody) == {}
    shared.renew("alpha/1", 41)
    shared.renew("beta/0", 42)
    shared.renew("beta/0", 43)  # started again
    assert life.worker().alive(everybody) == {"alpha/1": 41, "beta/0": 43}
    assert shared.alive(["alpha/0", "alpha/1"]) == {"alpha/1": 41}


# Ranks and their work -------------------------------------------------------------------------


def test_ranks_attach_to_one_epoch(life: Life) -> None:
    shared, epoch = life.worker(), life.begin()
    assert shared.attached(epoch) == {}
    assert shared.await_attached(epoch, 2, SHORT_S) == 0
    for rank in (2, 0):
        life.rank(epoch, rank)
    assert shared.attached(epoch) == dict.fromkeys((0, 2), os.getpid())
    assert shared.await_attached(epoch, 3, SHORT_S) == 2
    assert shared.await_attached(epoch, 2, 0) == 2
    joined = during(
        lambda: shared.await_attached(epoch, 3, PATIENCE_S), lambda: life.rank(epoch, 1)
    )
    assert joined == 3
    later = life.begin()
    assert shared.attached(later) == shared.attached(epoch) == {}
    with pytest.raises(StaleEpoch):
        life.rank(epoch, 0)


def test_one_process_holds_a_rank_for_the_whole_epoch(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who was started in its place cannot know what it has done."""
    shared, epoch = life.worker(), life.begin()
    held = os.getpid()
    life.rank(epoch, 1)
    monkeypatch.setattr(os, "getpid", lambda: held + 1)
    with pytest.raises(StaleEpoch, match=rf"rank 1 of epoch {epoch} was process {held}"):
        life.rank(epoch, 1)
    assert shared.attached(epoch) == {1: held}
    later = life.begin()
    life.rank(later, 1)
    assert shared.attached(later) == {1: held + 1}


def test_progress_is_the_length_of_every_admitted_sequence(life: Life) -> None:
    shared, epoch = life.worker(), life.begin()
    assert shared.progress() == ()
    assert shared.idle()
    head = life.rank(epoch, 0)
    first, second = head.enqueue(**ASKED), head.enqueue(**ASKED)
    assert shared.progress() == ()
    assert not shared.idle()  # both wait
    take(head)
    assert shared.progress() == ((first, 3),)
    accept(head, first, 3, [8, 9])
    take(head)
    assert shared.progress() == ((first, 5), (second, 3))
    assert not shared.idle()  # both are open
    head.finish(first, "length")
    head.tokens(first)
    assert shared.progress() == ((second, 3),)
    successor = life.rank(life.begin(), 0)
    assert shared.progress() == ()
    assert not shared.idle()  # it waits again
    successor.finish(second, "stop")
    successor.tokens(second)
    assert shared.progress() == ()
    assert shared.idle()


def test_the_oldest_step_rises_with_each_that_all_ranks_complete(life: Life) -> None:
    shared, epoch = life.worker(), life.begin()
    assert shared.oldest_step(epoch) == 0
    head, stage = life.rank(epoch, 0), life.rank(epoch, 1)

    def settled() -> int:
        for rank in (head, stage):
            rank.tokens(0)  # waits for Redis
        return shared.oldest_step(epoch)

    for step in range(3):
        head.submit(step_graph(Layout(1), step))
        stage.complete([compute(1, step)])
        stage.complete([prune(1, step)])
        assert settled() == step  # the head has not said anything yet
        head.complete([compute(0, step), prune(0, step), transfer(0, step)])
        assert settled() == step + 1
    assert shared.oldest_step(life.begin()) == 0


# Where the ranks meet -------------------------------------------------------------------------


def test_a_meeting_that_nobody_calls_is_given_up(life: Life) -> None:
    shared, epoch = life.worker(), life.begin()
    start = time.monotonic()
    assert shared.meeting(epoch, SHORT_S) is None
    assert SHORT_S <= time.monotonic() - start < PATIENCE_S


def test_a_meeting_is_that_of_its_epoch(life: Life) -> None:
    shared, epoch = life.worker(), life.begin()
    head = life.worker()
    place = "[fd00::1]:4242"
    found = during(lambda: shared.meeting(epoch, PATIENCE_S), lambda: head.invite(epoch, place))
    assert found == place
    assert shared.meeting(epoch, 0) == place
    later = life.begin()
    assert shared.meeting(later, SHORT_S) is None
    assert shared.meeting(epoch, 0) is None  # gone with its epoch


# A Redis that is gone -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ask",
    [
        lambda shared: shared.renew("alpha/0", 1),
        lambda shared: shared.epoch(0, PATIENCE_S),
        lambda shared: shared.suspicions(PATIENCE_S),
        lambda shared: shared.progress(),
        lambda shared: shared.meeting(1, PATIENCE_S),
    ],
)
def test_a_redis_that_is_gone_is_told_by_every_call(ask: Callable[[Membership], object]) -> None:
    with EmbeddedRedis() as server:
        shared = Membership(server.url, "gone")
        shared.renew("alpha/0", 1)
    with shared, pytest.raises(Unreachable, match="was lost"):
        ask(shared)


class Processes:
    """Workers that somebody else starts and ends."""

    def __init__(self) -> None:
        self.deaths: queue.SimpleQueue[Death] = queue.SimpleQueue()
        self.looks = 0  # how often somebody asked whether a lost one's host is starting
        self.prepared_at = 0.0  # when the answer was yes

    def kill(self, worker: str, since: float) -> bool:
        return False

    def preparing(self, worker: str) -> bool:
        self.looks += 1
        if self.looks < 10:
            self.prepared_at = time.monotonic()
        return self.looks < 10

    def mend(self) -> None:
        pass


ASSIGNMENT = RankAssignment(("m/0", "m/1"), (range(4),), "127.0.0.1")


def recovery_of(
    life: Life,
    replan: Callable[[set[str]], RankAssignment] = lambda _: ASSIGNMENT,
    patience_s: float = PATIENCE_S,
) -> Recovery:
    return Recovery(
        life.url,
        life.namespace,
        ASSIGNMENT,
        workers=ASSIGNMENT.workers,
        replan=replan,
        patience_s=patience_s,
    )


def test_word_of_a_death_ends_no_epoch_that_the_next_life_has_joined(life: Life) -> None:
    """It can come late; the epoch would end for a worker that is there and well."""
    processes = Processes()
    with recovery_of(life) as recovery:
        recovery.watch(processes)
        first = recovery.epoch
        life.rank(first, 0)
        life.rank(first, 1)
        processes.deaths.put(Death("m/1", "an earlier life", os.getpid() + 1))
        end = time.monotonic() + PATIENCE_S
        while not processes.deaths.empty():
            assert time.monotonic() < end
        processes.deaths.put(Death("m/1", "this life", os.getpid()))
        while recovery.epoch == first:
            assert time.monotonic() < end
    assert [fault.reason for fault in recovery.faults] == ["m/1 ended (this life)"]


def test_what_ended_an_epoch_is_counted_with_what_it_cost(life: Life) -> None:
    processes = Processes()
    with recovery_of(life) as recovery:
        shared = life.worker()
        shared.count({"faults/link_broke": 3, "steps": 9})
        recovery.watch(processes)
        first = recovery.epoch
        head = life.rank(first, 0)
        life.rank(first, 1)
        request = head.enqueue(**ASKED)
        take(head)
        accept(head, request, 3, (10,))
        until(lambda: shared.progress() == ((request, 4),))
        shared.suspect(first, "m/0", "lost its link")
        until(lambda: recovery.epoch > first)
        # Word of what was behind it comes later.
        processes.deaths.put(Death("m/1", "killed", os.getpid()))
        until(processes.deaths.empty)
        assert "recoveries" not in shared.totals()
        head = life.rank(recovery.epoch, 0)
        life.rank(recovery.epoch, 1)
        until(lambda: "recoveries" in shared.totals())
        told = shared.totals()
        assert told["faults/worker_ended"] == told["recoveries"] == 1
        assert told["faults/link_broke"] == 3
        assert 0 < told["recovery_ns"] < PATIENCE_S * 1e9
        assert "resumptions" not in told
        take(head)
        accept(head, request, 4, (11,))
        until(lambda: "resumptions" in shared.totals())
        assert shared.totals()["resumption_ns"] > told["recovery_ns"]
    assert [fault.kind for fault in recovery.faults] == [FaultKind.WORKER_ENDED]
    # Who watches the same log next goes on counting.
    with recovery_of(life) as recovery:
        recovery.watch(processes)
        life.rank(recovery.epoch, 0)
        life.rank(recovery.epoch, 1)
        shared.suspect(recovery.epoch, "m/0", "lost its link")
        epoch = recovery.epoch
        until(lambda: recovery.epoch > epoch)
        life.rank(recovery.epoch, 0)
        life.rank(recovery.epoch, 1)
        until(lambda: shared.totals()["recoveries"] == 2)
    assert shared.totals()["faults/worker_ended"] == 1
    assert shared.totals()["faults/link_broke"] == 4


def test_nobody_gives_up_while_a_lost_host_is_starting(life: Life) -> None:
    """Imports can take longer than the patience with a worker that says nothing, and the workers
    of a host do not join at the same moment."""

    def replan(_: set[str]) -> RankAssignment:
        raise ConfigError("nobody is left.")

    processes, patience_s = Processes(), 0.5
    with recovery_of(life, replan, patience_s) as recovery:
        life.worker().renew("m/0", os.getpid())
        recovery.watch(processes)
        recovery._thread.join(PATIENCE_S)
        assert time.monotonic() - processes.prepared_at > patience_s
        with pytest.raises(RankFailed, match="m/0, m/1 stayed away: nobody is left"):
            recovery.check()
    assert processes.looks >= 10
