"""Workers are killed, stopped and cut from their Redis in mid-sentence; the text stays the same.

Most tests strike one cluster, one after another: each leaves it whole, or its text was not.
"""

import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any

import pytest

from pipespec.config.compose import compose
from pipespec.config.hosts import own_name
from pipespec.controller import embedded_redis
from pipespec.controller.log_records import Accepted
from pipespec.controller.membership import Membership
from pipespec.controller.redis_connection import RedisConnection
from pipespec.controller.redis_keys import RedisKeys
from pipespec.errors import ConfigError, RankFailed, Unreachable
from pipespec.system.folders import resource_dir
from tests.helpers import heads
from tests.helpers.clusters import Clusters
from tests.helpers.processes import is_alive
from tests.helpers.waiting import until
from tools.rig.requests import Running

PROMPT = "Once upon a time there was a king who had three sons and"
DEMO = resource_dir("demo")
STAGES = 3
TOKENS = 48
# The fault happens when so many tokens have been seen.
EARLY, LATE = 4, 20
PATIENCE_S = 60.0
GREEDY = compose(["sampling.temperature=0"]).sampling.params(0)
# No worker stays away for so long, and no Redis.
PATIENT = ("cluster.patience_s=600",)


@pytest.fixture(scope="module")
def clusters() -> Iterator[Clusters]:
    with Clusters(f"cluster.stages={STAGES}", "cluster.devices=[cpu]", "model.context=256") as made:
        yield made


@pytest.fixture
def struck(clusters: Clusters) -> Running:
    """The cluster that most tests strike."""
    return clusters.running(*PATIENT)


def ask(running: Running, *, at: int = 0, fault: Callable[[], None] = lambda: None) -> list[int]:
    """The tokens of an answer; the fault happens once `at` of them have come."""
    prompt = running.client.served.encode(PROMPT)
    request = running.client.submit(prompt, GREEDY, max_new_tokens=TOKENS)
    tokens: list[int] = []
    base = len(prompt)
    for event in running.client.events(request):
        if isinstance(event, Accepted):
            assert event.base == base + len(tokens), "a token is lost or comes twice"
            before, tokens = len(tokens), [*tokens, *event.tokens]
            if before < at <= len(tokens):
                fault()
    assert len(running.client.reports(request)) == running.cluster.deployment.num_ranks
    return tokens


def pid_of(running: Running, rank: int) -> int:
    """The process of a rank's worker, once it lives: an earlier test may have ended another."""
    worker = running.cluster.deployment.workers[rank]
    with Membership(running.cluster.url, running.cluster.namespace) as shared:
        pid = lambda: shared.alive([worker]).get(worker, 0)  # noqa: E731
        until(lambda: is_alive(pid()), PATIENCE_S, f"{worker} did not come back")
        return pid()


def await_another(running: Running, rank: int, pid: int) -> None:
    """Wait until another process than `pid` has a rank: on a busy machine an answer may be whole
    before its reader has caused the fault."""
    until(lambda: pid_of(running, rank) != pid, PATIENCE_S, f"rank {rank} was not replaced")


def to_redis(running: Running, *command: str | int) -> Any:
    """What the cluster's Redis replies."""
    with closing(RedisConnection(running.cluster.url)) as pipe:
        return pipe.call(*command)


@pytest.fixture(scope="module")
def greedy(clusters: Clusters) -> list[int]:
    return ask(clusters.running(*PATIENT))


def test_text_is_unchanged_when_every_rank_is_killed_in_turn(struck, greedy, long):
    for rank in range(struck.cluster.deployment.num_ranks):
        for at in (EARLY, LATE) if long else (LATE,):
            faults = len(struck.cluster.faults)
            pid = pid_of(struck, rank)
            answer = ask(struck, at=at, fault=lambda pid=pid: os.kill(pid, signal.SIGKILL))
            assert answer == greedy
            # As in `await_another`.
            until(
                lambda faults=faults: len(struck.cluster.faults) > faults,
                PATIENCE_S,
                f"nobody noticed that rank {rank} is gone",
            )
    assert ask(struck) == greedy


def test_text_drafted_by_a_head_is_the_same_when_ranks_are_killed(
    clusters, greedy, tmp_path_factory
):
    """The head, and the last stage, which returns features to it."""
    head = heads.write_eagle3(tmp_path_factory.mktemp("heads") / "head", DEMO / "target")
    always = "policy.row_cost=0.0001", "proposer.rounds=2"
    struck = clusters.running(*PATIENT, "proposer=head", f"model.draft={head}", *always)
    for rank in (0, STAGES):
        pid = pid_of(struck, rank)
        answer = ask(struck, at=LATE, fault=lambda pid=pid: os.kill(pid, signal.SIGKILL))
        assert answer == greedy
        await_another(struck, rank, pid)
    assert ask(struck) == greedy


@pytest.mark.parametrize(("rank", "number"), [(1, signal.SIGSEGV), (0, signal.SIGSTOP)])
def test_rank_that_hangs_or_ends_by_another_signal_alone_is_replaced(struck, greedy, rank, number):
    before = [pid_of(struck, each) for each in range(STAGES + 1)]
    assert ask(struck, at=EARLY, fault=lambda: os.kill(before[rank], number)) == greedy
    await_another(struck, rank, before[rank])
    after = [pid_of(struck, each) for each in range(STAGES + 1)]
    assert before[:rank] + before[rank + 1 :] == after[:rank] + after[rank + 1 :]


def test_leases_that_run_out_early_end_no_epoch(struck, greedy):
    """As all do when the clock of Redis is set forward."""
    pids = [pid_of(struck, rank) for rank in range(STAGES + 1)]
    faults = len(struck.cluster.faults)

    leases = map(RedisKeys(struck.cluster.namespace).lease, struck.cluster.deployment.workers)
    assert ask(struck, at=EARLY, fault=lambda: to_redis(struck, "DEL", *leases)) == greedy
    assert len(struck.cluster.faults) == faults
    assert [pid_of(struck, rank) for rank in range(STAGES + 1)] == pids


def test_text_is_unchanged_when_redis_is_killed_or_hangs(struck, greedy):
    server = struck.cluster.redis.server
    known = len(struck.cluster.faults)
    for at, number in ((EARLY, signal.SIGKILL), (LATE, signal.SIGKILL), (EARLY, signal.SIGSTOP)):
        pid = server.pid
        assert ask(struck, at=at, fault=lambda: os.kill(server.pid, number)) == greedy  # noqa: B023
        until(lambda pid=pid: server.pid != pid, PATIENCE_S, "Redis was not started again")
    assert "Redis hung" in [fault.reason for fault in struck.cluster.faults[known:]]


def test_text_is_unchanged_when_redis_cannot_be_started_again_at_once(struck, greedy, monkeypatch):
    server, find = struck.cluster.redis.server, embedded_redis.find_redis
    refused = iter([OSError(errno.ENOMEM, "no memory for a process")] * 3)

    def find_later() -> str:
        if (error := next(refused, None)) is not None:
            raise error
        return find()

    monkeypatch.setattr(embedded_redis, "find_redis", find_later)
    assert ask(struck, at=EARLY, fault=lambda: os.kill(server.pid, signal.SIGKILL)) == greedy
    assert next(refused, None) is None


@pytest.mark.parametrize(
    "command", ["SCRIPT FLUSH", "CLIENT KILL TYPE normal SKIPME yes"], ids=lambda each: each[:6]
)
def test_text_is_the_same_when_redis_loses_its_scripts_or_connections(struck, greedy, command):
    assert ask(struck, at=EARLY, fault=lambda: to_redis(struck, *command.split())) == greedy
    to_redis(struck, *command.split())  # while no request is in flight
    assert ask(struck) == greedy


def test_a_rank_killed_between_requests_is_back_for_the_next(struck, greedy):
    assert ask(struck) == greedy
    os.kill(pid_of(struck, 1), signal.SIGKILL)
    assert ask(struck) == greedy


@pytest.mark.long
def test_cluster_ends_with_one_sentence_if_redis_can_never_be_started_again(clusters, monkeypatch):
    """Somebody has damaged its data, say."""
    with (  # noqa: PT012 - the block is the point
        pytest.raises(RankFailed, match="the data is damaged"),
        clusters.last("cluster.patience_s=601") as running,
    ):

        def find() -> str:
            raise ConfigError("the data is damaged")

        monkeypatch.setattr(embedded_redis, "find_redis", find)
        os.kill(running.cluster.redis.server.pid, signal.SIGKILL)
        until(lambda: not running.cluster.poll(), PATIENCE_S)


@pytest.mark.parametrize(
    ("asked", "settings"), [pytest.param(False, (), marks=pytest.mark.long), (True, PATIENT)]
)
def test_cluster_ends_with_one_sentence_after_many_faults_in_a_row(clusters, asked, settings):
    """A rank is killed again as soon as it is there, with or without a request to decode."""
    with (  # noqa: PT012 - the block is the point
        pytest.raises(RankFailed, match=rf"{own_name()}/1.*without a new token"),
        clusters.last(*settings) as running,
    ):
        if asked:
            running.client.submit([1, 2, 3], GREEDY, max_new_tokens=9)
        seen = 0
        while True:
            running.cluster.poll()
            pid = seen
            # A Redis that is slow to answer is started again.
            url, namespace = running.cluster.url, running.cluster.namespace
            with suppress(Unreachable), Membership(url, namespace) as shared:
                pid = shared.alive([f"{own_name()}/1"]).get(f"{own_name()}/1", seen)
            if pid != seen:
                os.kill(pid, signal.SIGKILL)
                seen = pid
