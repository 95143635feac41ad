"""What the workers of a cluster share in a real Redis: epochs, complaints, who is there."""

import os
import queue
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from itertools import count

import pytest
import torch
from torch.distributed import DistStoreError

from pipespec.cluster.deployment.rank_assignment import RankAssignment
from pipespec.cluster.processes.agent_handle import WorkerDeath
from pipespec.cluster.processes.fault_stats import FaultKind
from pipespec.cluster.ranks.heartbeat import Heartbeat
from pipespec.cluster.recovery import cluster_state
from pipespec.cluster.recovery.cluster_state import LayoutChange
from pipespec.cluster.recovery.recovery import Recovery
from pipespec.config.hosts import Host
from pipespec.controller import epoch_control
from pipespec.controller.embedded_redis import EmbeddedRedis
from pipespec.controller.membership import Epoch, LinkAddressTable, Membership, Suspicion
from pipespec.controller.rank_controller import Controller
from pipespec.controller.redis_connection import ANSWER_TIMEOUT_S, RedisConnection, check_server
from pipespec.controller.task_graph import compute, prune, step_graph, transfer
from pipespec.errors import ConfigError, RankFailed, StaleEpoch, Unreachable
from pipespec.system.network_interfaces import LOOPBACK
from pipespec.transport.rendezvous_store import RendezvousStore
from pipespec.transport.tp_group import TPProcessGroup
from tests.helpers.listening import listening
from tests.helpers.log import accept, take
from tests.helpers.redis_tls import redis_server
from tests.helpers.waiting import until
from tools.rig import clock

# For what comes; tests end as soon as it has.
PATIENCE_S = 20.0
# For what does not come.
SHORT_S = 0.03
ASKED = {"prompt": (5, 6, 7), "max_new_tokens": 9}
names = count()


class Life:
    """A namespace, and whoever connects to it."""

    def __init__(self, url: str, stack: ExitStack):
        self.url, self.namespace = url, f"workers-{next(names)}"
        self._stack = stack

    def begin(self, plan: str = "") -> int:
        return epoch_control.begin_epoch(self.url, self.namespace, plan)

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


def test_newest_epoch_is_read_with_its_assignment(life):
    shared = life.worker()
    assert shared.epoch(0, SHORT_S) is None
    assert [life.begin(plan) for plan in ("first", "second", "drei → 3")] == [1, 2, 3]
    for known in range(3):
        assert shared.epoch(known, SHORT_S) == Epoch(3, "drei → 3")
    assert shared.epoch(3, SHORT_S) is None
    assert life.begin() == 4
    assert shared.epoch(3, SHORT_S) == Epoch(4, "")  # the end


@pytest.mark.skipif(clock.missing() is not None, reason=str(clock.missing()))
def test_wait_for_an_epoch_ends_though_the_clock_of_redis_is_set_back(tmp_path, monkeypatch):
    stepped = clock.SteppedClock(tmp_path)
    with ExitStack() as stack:
        with monkeypatch.context() as patch:
            for name, value in stepped.environment.items():
                patch.setenv(name, value)
            life = Life(stack.enter_context(EmbeddedRedis()).url, stack)
        shared, admin = life.worker(), stack.enter_context(RedisConnection(life.url))
        waiting = stack.enter_context(ThreadPoolExecutor(1)).submit(shared.epoch, 0, 0.5)
        until(lambda: b"blocked_clients:1" in admin.call("INFO", "clients"))
        stepped.step(-3600)
        assert waiting.result(ANSWER_TIMEOUT_S / 2) is None
        assert shared.epoch(life.begin("plan") - 1, SHORT_S) == Epoch(1, "plan")


def test_each_suspicion_is_reported_once_in_order(life):
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


def test_only_workers_that_said_so_are_alive(life):
    shared = life.worker()
    everybody = ["alpha/0", "alpha/1", "beta/0"]
    assert shared.alive(everybody) == {}
    shared.renew("alpha/1", 41)
    shared.renew("beta/0", 42)
    shared.renew("beta/0", 43, "5 1 4096")  # started again
    assert shared.loaded(everybody) == {"alpha/1": 0, "beta/0": 4096}
    assert life.worker().alive(everybody) == {"alpha/1": 41, "beta/0": 43}
    assert shared.alive(["alpha/0", "alpha/1"]) == {"alpha/1": 41}


def test_ranks_attach_to_one_epoch(life):
    shared, epoch = life.worker(), life.begin()
    assert shared.attached(epoch) == shared.await_attached(epoch, 2, SHORT_S) == {}
    for rank in (2, 0):
        life.rank(epoch, rank)
    joined = dict.fromkeys((0, 2), os.getpid())
    assert shared.await_attached(epoch, 3, SHORT_S) == joined
    assert shared.await_attached(epoch, 2, 0) == shared.attached(epoch) == joined
    with ThreadPoolExecutor(1) as waiter:
        waiting = waiter.submit(shared.await_attached, epoch, 3, PATIENCE_S)
        life.rank(epoch, 1)
        assert waiting.result().keys() == {0, 1, 2}
    later = life.begin()
    assert shared.attached(later) == shared.attached(epoch) == {}
    with pytest.raises(StaleEpoch):
        life.rank(epoch, 0)


def test_one_process_holds_a_rank_for_the_whole_epoch(life, monkeypatch):
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


def test_progress_is_the_length_of_every_admitted_sequence(life):
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


def test_the_oldest_step_rises_with_each_that_all_ranks_complete(life):
    shared, epoch = life.worker(), life.begin()
    assert shared.oldest_step(epoch) == 0
    head, stage = life.rank(epoch, 0), life.rank(epoch, 1)

    def settled() -> int:
        for rank in (head, stage):
            rank.tokens(0)  # waits for Redis
        return shared.oldest_step(epoch)

    for step in range(3):
        head.submit(step_graph(1, step))
        stage.complete([compute(1, step)])
        stage.complete([prune(1, step)])
        assert settled() == step  # the head has not said anything yet
        head.complete([compute(0, step), prune(0, step), transfer(0, step)])
        assert settled() == step + 1
    assert shared.oldest_step(life.begin()) == 0


def test_what_ranks_leave_for_one_another_is_that_of_their_epoch(life):
    epoch = life.begin()
    with LinkAddressTable(life.url, life.namespace, epoch) as one:
        one.write("0", b"\0an address\xff")
        with LinkAddressTable(life.url, life.namespace, epoch) as other:
            assert other.read(["0", "1"]) == [b"\0an address\xff", None]
        later = life.begin()
        with LinkAddressTable(life.url, life.namespace, later) as next_one:
            assert next_one.read(["0"]) == [None]
        assert one.read(["0"]) == [None], "gone with its epoch"
        with pytest.raises(StaleEpoch):
            one.write("0", b"late")
        assert one.read(["0"]) == [None]


def test_ranks_find_one_another_through_redis_and_no_store_listens(life):
    epoch = life.begin()
    before = listening([os.getpid()])

    def member(rank: int) -> tuple[list[float], set[str]]:
        with LinkAddressTable(life.url, life.namespace, epoch) as table:
            group = TPProcessGroup(RendezvousStore(table), rank, 2)
            parts = group.gather(torch.full((1,), float(rank)))
            places = {each.address for each in listening([os.getpid()]) - before}
            return [part.item() for part in parts], places

    with ThreadPoolExecutor(2) as pool:
        for parts, places in pool.map(member, range(2)):
            assert parts == [0.0, 1.0]
            assert places == {LOOPBACK}, "what members add up stays on their host"


def test_a_rank_that_waits_for_others_notices_that_its_epoch_is_over(life):
    epoch = life.begin()
    heartbeat = Heartbeat(life.url, life.namespace, "m/0", patience_s=PATIENCE_S)
    with heartbeat, LinkAddressTable(life.url, life.namespace, epoch) as table:
        heartbeat.next(0)
        store = RendezvousStore(table, lambda: heartbeat.check(epoch))

        with ThreadPoolExecutor(1) as waiter:
            waiting = waiter.submit(TPProcessGroup, store, 0, 2)  # nobody else comes
            life.begin()
            with pytest.raises(StaleEpoch, match="is over"):
                waiting.result()


def test_rank_without_peers_says_that_it_found_none(life):
    epoch = life.begin()
    with LinkAddressTable(life.url, life.namespace, epoch) as table:
        store = RendezvousStore(table)
        with pytest.raises(DistStoreError, match=r"no answer within 0\.03 seconds"):
            store.wait(["1"], timedelta(seconds=SHORT_S))


@pytest.mark.parametrize(
    "ask",
    [
        lambda shared: shared.renew("alpha/0", 1),
        lambda shared: shared.epoch(0, PATIENCE_S),
        lambda shared: shared.suspicions(PATIENCE_S),
        lambda shared: shared.progress(),
        lambda shared: shared.followers(1),
    ],
)
def test_every_call_reports_a_lost_redis(ask):
    with EmbeddedRedis() as server:
        shared = Membership(server.url, "gone")
        shared.renew("alpha/0", 1)
    with shared, pytest.raises(Unreachable, match="was lost"):
        ask(shared)


class Processes:
    """Workers that somebody else starts and ends."""

    def __init__(self) -> None:
        self.deaths: queue.SimpleQueue[WorkerDeath] = queue.SimpleQueue()
        self.looks = 0  # how often somebody asked whether a lost one's host is starting
        self.prepared_at = 0.0  # when the answer was yes
        self.checks = 0  # how often the recovery has checked all signs

    def signs(self) -> dict[str, int]:
        return {}

    def preparing(self, worker: str) -> bool:
        self.looks += 1
        if self.looks < 10:
            self.prepared_at = time.monotonic()
        return self.looks < 10

    def restart_lost_hosts(self) -> None:
        self.checks += 1


ASSIGNMENT = RankAssignment(("m/0", "m/1"), (range(4),))
WORKS, WAITS = "1 1", "2 0"


@pytest.mark.parametrize(
    ("told", "stalls"), [((WAITS, WAITS), True), ((WAITS, WORKS), False), ((WAITS, None), False)]
)
def test_ranks_that_all_wait_stall_and_one_that_works_may_take_long(
    life, told, stalls, monkeypatch
):
    monkeypatch.setattr(cluster_state, "STALL_S", 0.0)
    shared, epoch = life.worker(), life.begin()
    seen = cluster_state.ClusterProgress()

    def stalled() -> bool:
        for worker, state in zip(ASSIGNMENT.everyone, told, strict=True):
            if state is not None:
                shared.renew(worker, 1, state)
        beats = shared.beats(ASSIGNMENT.everyone)
        known = [beats.get(worker) for worker in ASSIGNMENT.everyone]
        return seen.stalls(shared, epoch, known, complete=True)

    assert [stalled() for _ in range(3)] == [False] * 3, "no request is running"
    head = life.rank(epoch, 0)
    head.enqueue(**ASKED)
    take(head)
    assert [stalled() for _ in range(3)] == [False, stalls, stalls]


def recovery_of(
    life: Life,
    replan: Callable[[set[str]], RankAssignment] = lambda _: ASSIGNMENT,
    patience_s: float = PATIENCE_S,
    server: EmbeddedRedis | None = None,
) -> Recovery:
    return Recovery(
        *(life.url, life.namespace, ASSIGNMENT),
        workers=ASSIGNMENT.everyone,
        replan=replan,
        patience_s=patience_s,
        server=server,
    )


def renewed(shared: Membership, workers: Iterable[str] = ASSIGNMENT.everyone) -> bool:
    """These workers give a sign of life."""
    for worker in workers:
        shared.renew(worker, os.getpid())
    return True


def test_word_of_a_death_ends_no_epoch_that_the_next_life_has_joined(life):
    """It can come late; the epoch would end for a worker that is there and well."""
    processes = Processes()
    with recovery_of(life) as recovery:
        recovery.watch(processes)
        first = recovery.state.epoch
        life.rank(first, 0)
        life.rank(first, 1)
        processes.deaths.put(WorkerDeath("m/1", "an earlier life", os.getpid() + 1))
        until(processes.deaths.empty)
        processes.deaths.put(WorkerDeath("m/1", "this life", os.getpid()))
        until(lambda: recovery.state.epoch > first)
    assert [fault.reason for fault in recovery.state.faults] == ["m/1 ended (this life)"]


def test_what_ended_an_epoch_is_counted_with_what_it_cost(life):
    processes = Processes()
    with recovery_of(life) as recovery:
        shared = life.worker()
        shared.count({"faults/link_broke": 3, "steps": 9})
        recovery.watch(processes)
        first = recovery.state.epoch
        head = life.rank(first, 0)
        life.rank(first, 1)
        request = head.enqueue(**ASKED)
        take(head)
        accept(head, request, 3, (10,))
        until(lambda: shared.progress() == ((request, 4),))
        shared.suspect(first, "m/0", "lost its link")
        until(lambda: recovery.state.epoch > first)
        # Word of what was behind it comes later.
        processes.deaths.put(WorkerDeath("m/1", "killed", os.getpid()))
        until(processes.deaths.empty)
        head = life.rank(recovery.state.epoch, 0)
        life.rank(recovery.state.epoch, 1)
        until(lambda: "recoveries" in shared.totals())
        told = shared.totals()
        assert told["faults/worker_ended"] == told["recoveries"] == 1
        assert told["faults/link_broke"] == 3, "as an earlier launcher has counted"
        take(head)
        accept(head, request, 4, (11,))
        until(lambda: "resumptions" in shared.totals())
        assert shared.totals()["resumption_ns"] > told["recovery_ns"]
    assert [fault.kind for fault in recovery.state.faults] == [FaultKind.WORKER_ENDED]


def test_another_layout_begins_once_its_workers_live_and_counts_as_no_fault(life):
    processes, shared = Processes(), life.worker()
    begun: list[int] = []
    with recovery_of(life) as recovery:
        recovery.watch(processes)
        first = recovery.state.epoch
        life.rank(first, 0)
        life.rank(first, 1)
        wider = RankAssignment(("m/0", "m/1", "n/0"), (range(2), range(2, 4)))
        change = LayoutChange(wider, "n joins", lambda: begun.append(recovery.state.epoch))
        recovery.watch_workers(wider.everyone)
        recovery.change(change)
        checks = processes.checks
        until(lambda: renewed(shared) and processes.checks > checks + 3)
        assert recovery.state.epoch == first
        until(lambda: renewed(shared, wider.everyone) and begun)
        assert begun == [recovery.state.epoch] == [first + 1]
        assert recovery.state.assignment == wider
        assert not recovery.state.complete
        for rank in range(3):
            life.rank(first + 1, rank)
        until(lambda: renewed(shared, wider.everyone) and recovery.state.complete)
        assert recovery.state.faults == ()
    assert "recoveries" not in shared.totals()


def test_no_epoch_begins_for_a_host_that_has_gone_and_had_no_rank_any_more(life):
    shared, begun = life.worker(), threading.Event()
    with recovery_of(life) as recovery:
        recovery.watch(Processes())
        first = recovery.state.epoch
        same = replace(ASSIGNMENT, joined=(Host("n", "10.0.0.2", "local"),))
        recovery.change(LayoutChange(same, "another has gone", begun.set))
        until(lambda: renewed(shared) and begun.is_set())
        until(lambda: renewed(shared) and recovery.state.assignment == same)
        assert recovery.state.epoch == first


def test_a_layout_that_was_dropped_has_begun_by_then_or_never_does(life):
    """Who drops it must know whether the host that joins is part of the cluster."""
    processes, shared = Processes(), life.worker()
    begun: list[int] = []
    with recovery_of(life) as recovery:
        recovery.watch(processes)

        def checked_again() -> None:
            checks = processes.checks
            until(lambda: renewed(shared) and processes.checks > checks + 2)

        checked_again()
        for layers in range(1, 6):
            other = RankAssignment(ASSIGNMENT.workers, (range(layers), range(layers, 6)))
            recovery.change(LayoutChange(other, "", lambda: begun.append(recovery.state.epoch)))
            recovery.drop_change()
            known = len(begun)
            checked_again()
            assert len(begun) == known


def test_another_layout_begins_also_if_redis_is_lost_at_that_moment(life, monkeypatch):
    shared, begin_epoch, lost = life.worker(), epoch_control.begin_epoch, []
    other = RankAssignment(ASSIGNMENT.workers, (range(1), range(1, 6)))
    begun: list[RankAssignment] = []

    def lose_once(*args: str) -> int:
        if not lost:
            lost.append(args)
            raise Unreachable("Redis was lost")
        return begin_epoch(*args)

    with recovery_of(life) as recovery:
        monkeypatch.setattr(epoch_control, "begin_epoch", lose_once)
        recovery.watch(Processes())
        recovery.change(LayoutChange(other, "", lambda: begun.append(recovery.state.assignment)))
        until(lambda: renewed(shared) and begun)
        assert begun == [recovery.state.assignment] == [other]
        assert [fault.kind for fault in recovery.state.faults] == [FaultKind.REDIS_GONE]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_process_in_front_of_redis_that_fails_is_started_again(number):
    with redis_server(with_tls=False), EmbeddedRedis(port=0) as server, ExitStack() as stack:
        life = Life(server.url, stack)
        front = server.proxy_pid
        with recovery_of(life, server=server) as recovery:
            recovery.watch(Processes())
            os.kill(front, number)
            until(lambda: recovery.state.faults and server.proxy_pid not in (None, front))
            assert check_server(server.url_at(LOOPBACK))
            assert [fault.kind for fault in recovery.state.faults] == [FaultKind.REDIS_GONE]


def test_redis_that_refuses_writes_for_a_while_is_waited_for_and_not_started_again():
    with EmbeddedRedis() as server, ExitStack() as stack, RedisConnection(server.url) as pipe:
        life = Life(server.url, stack)
        shared, process = life.worker(), server.pid
        with recovery_of(life, server=server) as recovery:
            recovery.watch(Processes())
            until(lambda: renewed(shared))
            epoch, (most,) = recovery.state.epoch, pipe.call("CONFIG", "GET", "maxmemory")[1:]
            pipe.call("CONFIG", "SET", "maxmemory", 1)
            until(lambda: recovery.state.faults)
            pipe.call("CONFIG", "SET", "maxmemory", most)
            until(lambda: recovery.state.epoch > epoch)
            recovery.check()
            said = r"refuses writes: .* \(its log is /.*/redis\.log, its folder /.* \d+ MiB left\)"
            assert re.search(said, recovery.state.faults[0].reason)
            assert server.pid == process


def test_no_worker_gives_up_while_a_lost_host_is_starting(life, monkeypatch):
    """Imports can take longer than the patience with a worker that says nothing, and the workers
    of a host do not join at the same moment."""

    def replan(_: set[str]) -> RankAssignment:
        raise ConfigError("nobody is left.")

    monkeypatch.setattr(cluster_state, "ALONE_S", 1.0)
    processes, patience_s = Processes(), 0.5
    with recovery_of(life, replan, patience_s) as recovery:
        life.worker().renew("m/0", os.getpid())
        recovery.watch(processes)
        until(lambda: recovery.state.failure, PATIENCE_S)
        assert time.monotonic() - processes.prepared_at > patience_s
        with pytest.raises(RankFailed, match="m/0, m/1 stayed away: nobody is left"):
            recovery.check()
    assert processes.looks >= 10


def test_the_state_of_a_recovery_is_a_snapshot_with_the_assignment_of_its_epoch(life, monkeypatch):
    monkeypatch.setattr(cluster_state, "ALONE_S", 1.0)
    fewer = RankAssignment(("m/0",), (range(4),))
    with recovery_of(life, lambda _: fewer, patience_s=0.1) as recovery:
        before = recovery.state
        seen = {before.epoch: before.assignment}
        life.worker().renew("m/1", os.getpid())  # and never again
        recovery.watch(Processes())

        def replaced() -> bool:
            state = recovery.state
            return seen.setdefault(state.epoch, state.assignment) == fewer

        until(replaced, PATIENCE_S)
        epoch = life.worker().epoch(0, SHORT_S)
    assert seen[before.epoch] == before.assignment == ASSIGNMENT
    assert RankAssignment.decode(epoch.assignment) == fewer
    assert before.faults == (), "a state that was read before does not change"
    assert recovery.state.faults[0].kind is FaultKind.STAYED_AWAY
