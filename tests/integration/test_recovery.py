"""Workers are killed, stopped and cut from their Redis in mid-sentence; the text stays the same.

Most tests strike one cluster, one after another: each leaves it whole, or its text was not.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import psutil
import pytest

from pipespec.client.own import Running
from pipespec.config.compose import compose
from pipespec.controller.membership import Membership
from pipespec.controller.records import Accepted
from pipespec.core import Sampling
from pipespec.errors import RankFailed, Unreachable
from tests.helpers.clusters import Clusters
from tests.helpers.waiting import until

PROMPT = "Once upon a time there was a king who had three sons and"
STAGES = 3
TOKENS = 48
# The fault happens when so many tokens have been seen.
EARLY, LATE = 4, 20
PATIENCE_S = 60.0
GREEDY = compose(["verify=greedy"]).verify.sampling(0)
SAMPLED = compose(["verify=sample", "verify.seed=11", "verify.temperature=0.9"]).verify.sampling(0)
# No worker stays away for so long, and no Redis.
PATIENT = ("cluster.patience_s=600",)
FREE = ("cluster.sync=free",)


@pytest.fixture(scope="module")
def clusters() -> Iterator[Clusters]:
    with Clusters(f"cluster.stages={STAGES}", "cluster.devices=[cpu]", "model.context=256") as made:
        yield made


@pytest.fixture
def struck(clusters: Clusters) -> Running:
    """The cluster that most tests strike."""
    return clusters.running(*PATIENT)


def ask(
    running: Running,
    sampling: Sampling = GREEDY,
    *,
    at: int = 0,
    fault: Callable[[], None] = lambda: None,
) -> list[int]:
    """The tokens of an answer; the fault happens once `at` of them have come."""
    prompt = running.client.served.encode(PROMPT)
    request = running.client.submit(prompt, sampling, max_new_tokens=TOKENS)
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
    end = time.monotonic() + PATIENCE_S
    with Membership(running.cluster.url, running.cluster.namespace) as shared:
        while not alive(pid := shared.alive([worker]).get(worker, 0)):
            assert time.monotonic() < end, f"{worker} did not come back"
            time.sleep(0.05)
    return pid


def alive(pid: int) -> bool:
    return pid > 0 and psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"


@pytest.fixture(scope="module")
def greedy(clusters: Clusters) -> list[int]:
    return ask(clusters.running(*PATIENT))


@pytest.fixture(scope="module")
def sampled(clusters: Clusters) -> list[int]:
    return ask(clusters.running(*PATIENT), SAMPLED)


def test_the_same_text_though_every_rank_is_killed_in_turn(struck, greedy, long):
    for rank in range(struck.cluster.deployment.num_ranks):
        for at in (EARLY, LATE) if long else (LATE,):
            faults = len(struck.cluster.faults)
            pid = pid_of(struck, rank)
            answer = ask(struck, at=at, fault=lambda pid=pid: os.kill(pid, signal.SIGKILL))
            assert answer == greedy
            # On a busy machine the answer may be whole before its reader has seen so much of it.
            until(
                lambda faults=faults: len(struck.cluster.faults) > faults,
                PATIENCE_S,
                f"nobody noticed that rank {rank} is gone",
            )
    assert ask(struck) == greedy


@pytest.mark.long
def test_the_same_draws_though_ranks_are_killed(clusters, sampled):
    running = clusters.running(*FREE)
    for rank in (0, STAGES):
        pid = pid_of(running, rank)
        fault = lambda pid=pid: os.kill(pid, signal.SIGKILL)  # noqa: E731
        assert ask(running, SAMPLED, at=LATE, fault=fault) == sampled


@pytest.mark.parametrize("rank", [0, 2])
def test_the_same_text_though_a_rank_hangs(struck, greedy, rank):
    pid = pid_of(struck, rank)
    assert ask(struck, at=EARLY, fault=lambda: os.kill(pid, signal.SIGSTOP)) == greedy
    assert pid_of(struck, rank) != pid


def test_survivors_keep_their_processes(struck, greedy):
    before = [pid_of(struck, rank) for rank in range(STAGES + 1)]
    assert ask(struck, at=EARLY, fault=lambda: os.kill(before[1], signal.SIGKILL)) == greedy
    after = [pid_of(struck, rank) for rank in range(STAGES + 1)]
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, True, True]


def test_the_same_text_though_redis_is_killed_or_hangs(struck, greedy):
    server = struck.cluster._recovery._server
    known = len(struck.cluster.faults)
    for at, number in (
        (EARLY, signal.SIGKILL),
        (LATE, signal.SIGKILL),
        (EARLY, signal.SIGSTOP),
    ):
        pid = server.pid
        assert ask(struck, at=at, fault=lambda: os.kill(server.pid, number)) == greedy  # noqa: B023
        assert server.pid != pid
    assert "Redis hung" in [fault.reason for fault in struck.cluster.faults[known:]]


def test_a_rank_killed_between_requests_is_back_for_the_next(struck, greedy):
    assert ask(struck) == greedy
    os.kill(pid_of(struck, 1), signal.SIGKILL)
    assert ask(struck) == greedy


@pytest.mark.long
def test_a_spare_takes_the_place_of_a_worker_that_stays_away(clusters, greedy):
    """Its supervisor is stopped with it, so nobody starts it again."""
    with clusters.last("cluster.spares=1", "cluster.patience_s=1") as running:
        pid = pid_of(running, 2)
        supervisor = psutil.Process(pid).ppid()

        def fault() -> None:
            os.kill(supervisor, signal.SIGSTOP)
            os.kill(pid, signal.SIGSTOP)

        try:
            assert ask(running, at=EARLY, fault=fault) == greedy
            assert f"local/{STAGES + 1}" in running.cluster._recovery.assignment.workers
        finally:
            os.kill(supervisor, signal.SIGCONT)


@pytest.mark.parametrize(("asked", "settings"), [(False, FREE), (True, PATIENT)])
def test_a_cluster_that_cannot_be_kept_up_ends_with_one_sentence(clusters, asked, settings):
    """A rank is killed again as soon as it is there, with or without a request to decode."""
    with (  # noqa: PT012 - the block is the point
        pytest.raises(RankFailed, match=r"local/1.*and nothing was decided"),
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
                pid = shared.alive(["local/1"]).get("local/1", seen)
            if pid != seen:
                os.kill(pid, signal.SIGKILL)
                seen = pid
