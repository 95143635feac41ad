"""Members are killed, stopped and cut from their Redis in mid-sentence; the text stays the same."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from pipespec.cluster import deployment, session
from pipespec.cluster.session import ClusterSession
from pipespec.config.compose import compose
from pipespec.controller.members import Membership
from pipespec.controller.records import Accepted
from pipespec.errors import RankFailed

PROMPT = "Once upon a time there was a king who had three sons and"
STAGES = 3
TOKENS = 48
# The fault happens when so many tokens have been seen.
EARLY, LATE = 4, 20
GREEDY = ("verify=greedy",)
SAMPLED = ("verify=sample", "verify.seed=11", "verify.temperature=0.9")


def plan_of(*overrides: str) -> deployment.Plan:
    return deployment.plan(
        compose(
            [
                f"cluster.stages={STAGES}",
                "cluster.devices=[cpu]",
                f"decode.max_new_tokens={TOKENS}",
                "decode.ignore_eos=true",
                "model.context=256",
                *overrides,
            ]
        )
    )


def ask(cluster: ClusterSession, *, at: int = 0, fault: Callable[[], None] = lambda: None):
    """The tokens of an answer; the fault happens once `at` of them have come."""
    config = cluster.plan.config
    prompt = deployment.encode(cluster.plan, deployment.load_tokenizers(cluster.plan), PROMPT)
    request = cluster.submit(prompt, config.verify.sampling(0), max_new_tokens=TOKENS)
    tokens: list[int] = []
    base = len(prompt)
    for event in cluster.events(request):
        if isinstance(event, Accepted):
            assert event.base == base + len(tokens), "a token is lost or comes twice"
            before, tokens = len(tokens), [*tokens, *event.tokens]
            if before < at <= len(tokens):
                fault()
    assert len(cluster.reports(request)) == cluster.plan.num_ranks
    return tokens


def pid_of(cluster: ClusterSession, rank: int) -> int:
    member = cluster.plan.members[rank]
    with Membership(cluster.url, cluster.namespace) as shared:
        return shared.alive([member])[member]


@contextmanager
def expected(*overrides: str) -> Iterator[list[int]]:
    with session.start(plan_of(*overrides)) as cluster:
        yield ask(cluster)


@pytest.fixture(scope="module")
def greedy() -> list[int]:
    with expected(*GREEDY) as tokens:
        return tokens


@pytest.fixture(scope="module")
def sampled() -> list[int]:
    with expected(*SAMPLED) as tokens:
        return tokens


def test_the_same_text_though_every_rank_is_killed_in_turn(greedy):
    with session.start(plan_of(*GREEDY)) as cluster:
        for rank in range(cluster.plan.num_ranks):
            for at in (EARLY, LATE):
                faults = len(cluster.faults)
                pid = pid_of(cluster, rank)
                answer = ask(cluster, at=at, fault=lambda pid=pid: os.kill(pid, signal.SIGKILL))
                assert answer == greedy
                assert len(cluster.faults) > faults
        assert ask(cluster) == greedy


def test_the_same_draws_though_ranks_are_killed(sampled):
    with session.start(plan_of(*SAMPLED, "cluster.sync=free")) as cluster:
        for rank in (0, STAGES):
            pid = pid_of(cluster, rank)
            answer = ask(cluster, at=LATE, fault=lambda pid=pid: os.kill(pid, signal.SIGKILL))
            assert answer == sampled


@pytest.mark.parametrize("rank", [0, 2])
def test_the_same_text_though_a_rank_hangs(greedy, rank):
    with session.start(plan_of(*GREEDY)) as cluster:
        pid = pid_of(cluster, rank)
        assert ask(cluster, at=EARLY, fault=lambda: os.kill(pid, signal.SIGSTOP)) == greedy
        assert pid_of(cluster, rank) != pid


def test_survivors_keep_their_processes(greedy):
    with session.start(plan_of(*GREEDY)) as cluster:
        before = [pid_of(cluster, rank) for rank in range(STAGES + 1)]
        assert ask(cluster, at=EARLY, fault=lambda: os.kill(before[1], signal.SIGKILL)) == greedy
        after = [pid_of(cluster, rank) for rank in range(STAGES + 1)]
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, True, True]


def test_the_same_text_though_redis_is_killed_or_hangs(greedy):
    with session.start(plan_of(*GREEDY, "cluster.patience_s=600")) as cluster:
        server = cluster._recovery._server
        for at, number in (
            (EARLY, signal.SIGKILL),
            (LATE, signal.SIGKILL),
            (EARLY, signal.SIGSTOP),
        ):
            struck = server.pid
            assert ask(cluster, at=at, fault=lambda: os.kill(server.pid, number)) == greedy  # noqa: B023
            assert server.pid != struck
        assert "Redis hung" in [fault.reason for fault in cluster.faults]


def test_a_rank_killed_between_requests_is_back_for_the_next(greedy):
    with session.start(plan_of(*GREEDY)) as cluster:
        assert ask(cluster) == greedy
        os.kill(pid_of(cluster, 1), signal.SIGKILL)
        assert ask(cluster) == greedy


def test_a_spare_takes_the_place_of_a_member_that_stays_away(greedy):
    """Its supervisor is stopped with it, so nobody starts it again."""
    import psutil

    with session.start(plan_of(*GREEDY, "cluster.spares=1", "cluster.patience_s=1")) as cluster:
        pid = pid_of(cluster, 2)
        supervisor = psutil.Process(pid).ppid()

        def fault() -> None:
            os.kill(supervisor, signal.SIGSTOP)
            os.kill(pid, signal.SIGSTOP)

        try:
            assert ask(cluster, at=EARLY, fault=fault) == greedy
            assert f"local/{STAGES + 1}" in cluster._recovery.assignment.members
        finally:
            os.kill(supervisor, signal.SIGCONT)


@pytest.mark.parametrize("asked", [False, True])
def test_a_cluster_that_cannot_be_kept_up_ends_with_one_sentence(asked):
    """A rank is killed again as soon as it is there, with or without a request to decode."""
    with (  # noqa: PT012 - the block is the point
        pytest.raises(RankFailed, match=r"local/1.*and nothing was decided"),
        session.start(plan_of(*GREEDY)) as cluster,
    ):
        if asked:
            cluster.submit([1, 2, 3], cluster.plan.config.verify.sampling(0), max_new_tokens=9)
        seen = 0
        while True:
            cluster.poll()
            with Membership(cluster.url, cluster.namespace) as shared:
                pid = shared.alive(["local/1"]).get("local/1", seen)
            if pid != seen:
                os.kill(pid, signal.SIGKILL)
                seen = pid
