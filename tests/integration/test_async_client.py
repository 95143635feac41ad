"""Clients: slow readers, cancellation, and a cluster that goes and returns."""

import asyncio
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, closing
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from pipespec.client import async_client, registry, sync_client
from pipespec.client.async_client import MOST_ENTRIES, MOST_EVENTS, AsyncAnswer, Followed, attach
from pipespec.client.model_info import ModelInfo
from pipespec.client.registry import Owner, RunningCluster
from pipespec.controller import async_request_log
from pipespec.controller.async_request_log import AsyncRedisConnection, AsyncRequestLog
from pipespec.controller.embedded_redis import EmbeddedRedis
from pipespec.controller.log_records import Accepted, Event, Finished
from pipespec.controller.rank_controller import Controller
from pipespec.controller.redis_connection import ANSWER_TIMEOUT_S, RedisConnection
from pipespec.controller.redis_keys import RedisKeys
from pipespec.core import Request, SamplingParams
from pipespec.errors import ControllerError, RankFailed, Unreachable
from pipespec.system.process_identity import since_boot
from pipespec.timing.stats import empty_report
from tests.helpers import dialects
from tests.helpers.log import accept, head_of, take
from tests.helpers.waiting import soon
from tools.rig.log import events_of

pytestmark = pytest.mark.anyio
NAME, NAMESPACE = "lab", "async-client"
PROMPT = (5, 6, 7)
ASKED = {"prompt": PROMPT, "max_new_tokens": 9}
LONG_S = 60.0


@pytest.fixture
def head(redis: EmbeddedRedis) -> Iterator[Controller]:
    with head_of(redis, NAMESPACE) as controller:
        yield controller


@pytest.fixture
def running(
    redis: EmbeddedRedis, demo: ModelInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> RunningCluster:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return replace(dialects.entry_of(demo), url=redis.url, namespace=NAMESPACE)


def ended() -> Owner:
    """A process that is no more."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = replace(Owner.this(), pid=process.pid, created=since_boot(psutil.Process(process.pid)))
    process.communicate()
    return owner


async def all_of(followed: AsyncAnswer) -> list[tuple[int, Event]]:
    """The events until all requests have finished."""
    received: list[tuple[int, Event]] = []
    while len(followed):
        received += await followed.next(LONG_S)
    return received


async def ask(followed: AsyncAnswer) -> int:
    return await followed.submit(PROMPT, SamplingParams(), max_new_tokens=2000)


def end(head: Controller, request: int, *tokens: int) -> None:
    """The head decides these tokens and ends a request; returns when Redis knows."""
    if tokens:
        accept(head, request, 3, tokens)
    head.finish(request, "stop")
    head.tokens(request)


async def test_a_slow_reader_loses_no_event_and_delays_no_other(head, running):
    async with attach(running, LONG_S) as client, client.follow() as followed:
        slow = await ask(followed)
        for i in range(1500):
            accept(head, slow, 3 + i, [i])
        end(head, slow)
        async with client.follow() as other:
            # A later request is answered before the slow reader has taken anything.
            quick = await ask(other)
            end(head, quick)
            assert await other.next(LONG_S) == [(quick, Finished("stop"))]
        assert followed.open[slow].waiting <= MOST_EVENTS + MOST_ENTRIES
        received = [event for _, event in await all_of(followed)]
        assert received == [*(Accepted(3 + i, (i,)) for i in range(1500)), Finished("stop")]


async def test_request_submitted_during_a_read_is_followed_at_once(head, running, monkeypatch):
    monkeypatch.setattr(async_client, "HEARTBEAT_S", LONG_S)
    async with attach(running, LONG_S) as client, client.follow() as followed:
        await ask(followed)
        for _ in range(3):  # each time the read that waits is another
            request, began = await ask(followed), time.monotonic()
            end(head, request, 20)
            received: list[tuple[int, Event]] = []
            while len(received) < 2:
                received += await followed.next(LONG_S)
            assert received == [(request, Accepted(3, (20,))), (request, Finished("stop"))]
            assert time.monotonic() - began < LONG_S / 2


@pytest.mark.usefixtures("head")
async def test_many_requests_do_not_make_a_client_look_at_the_cluster_each_time(redis, running):
    far = replace(running, owner=replace(Owner.this(), machine="elsewhere"))
    began = time.monotonic()
    async with attach(far, LONG_S) as client, client.follow() as followed:
        for _ in range(50):
            await ask(followed)
    with closing(RedisConnection(redis.url)) as pipe:
        ran = pipe.call("INFO", "commandstats").decode()
    looks = re.search(r"cmdstat_exec:calls=(\d+)", ran)
    assert int(looks[1] if looks else 0) <= (time.monotonic() - began) / async_client.HEARTBEAT_S


async def test_leaving_cancels_only_requests_that_have_not_finished(head, running):
    async with attach(running, LONG_S) as client:
        async with client.follow() as followed:
            first, second = await ask(followed), await ask(followed)
            end(head, first)
            await followed.next(LONG_S)
        # And who leaves while the request is on its way.
        async with client.follow() as followed:
            asking = asyncio.ensure_future(ask(followed))
            await asyncio.sleep(0)
            asking.cancel()
            await asyncio.wait([asking])
    ends = [events_of(running.url, NAMESPACE, one)[-1] for one in (first, second, second + 1)]
    assert ends == [Finished("stop"), Finished("cancelled"), Finished("cancelled")]


async def test_leaving_does_not_wait_for_a_cluster_that_is_away(running):
    with ExitStack() as ending:
        redis = ending.enter_context(EmbeddedRedis())
        here = replace(running, url=redis.url)
        async with attach(here, 10 * LONG_S) as client:
            async with client.follow() as followed:
                await ask(followed)
                ending.close()
            # Its cancellation finds no Redis, and tries again.
            await soon(lambda: not client.log._pipe.connected)
            began = time.monotonic()
    assert time.monotonic() - began < 2 * ANSWER_TIMEOUT_S


async def test_a_cluster_that_has_ended_is_waited_for_as_long_as_the_patience(head, running):
    gone = replace(running, owner=ended())
    async with attach(gone, patience=0.2) as client, client.follow() as followed:
        await ask(followed)
        said = "'lab' on here ended before the request was finished"
        with pytest.raises(RankFailed, match=said):
            await all_of(followed)
        assert client.away
    assert head.tokens(1) == ()


async def test_requests_go_on_when_their_redis_was_a_replica_for_a_while(redis, head, running):
    """As when another server takes over: it ends the reads that wait."""
    with closing(RedisConnection(redis.url)) as admin:
        async with attach(running, LONG_S) as client, client.follow() as followed:
            request = await ask(followed)
            accept(head, request, 3, [8])
            head.tokens(request)
            assert await followed.next(LONG_S) == [(request, Accepted(3, (8,)))]
            admin.call("REPLICAOF", "127.0.0.1", "1")
            await soon(lambda: client.away)
            admin.call("REPLICAOF", "NO", "ONE")
            end(head, request)
            assert await all_of(followed) == [(request, Finished("stop"))]


def test_what_ends_the_reader_is_raised_to_all_who_wait(redis, running):
    """Here an administrator of the user's Redis takes the right to read away."""

    async def wait(followed: AsyncAnswer) -> None:
        with pytest.raises(ControllerError, match="no permissions"):
            await all_of(followed)

    async def story() -> None:
        async with attach(running, LONG_S) as client, AsyncExitStack() as stack:
            waiting = []
            for _ in range(2):
                followed = await stack.enter_async_context(client.follow())
                await ask(followed)
                waiting.append(asyncio.ensure_future(wait(followed)))
            admin.call("ACL", "SETUSER", "default", "-xread")
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.gather(*waiting)
                with pytest.raises(ControllerError, match="no permissions"):
                    await ask(followed)

    admin = RedisConnection(redis.url)
    with closing(admin), pytest.raises(ControllerError, match="no permissions"):
        asyncio.run(story())


async def test_requests_continue_on_a_cluster_that_is_restarted_with_its_data(running, tmp_path):
    data = tmp_path / "data"
    with EmbeddedRedis(data=data) as first, head_of(first, NAMESPACE) as head:
        stack = attach(replace(running, url=first.url, owner=ended()), LONG_S)
        client = await stack.__aenter__()
        followed = AsyncAnswer(client)
        request = await ask(followed)
        accept(head, request, 3, [8])
        head.tokens(request)
        assert await followed.next(LONG_S) == [(request, Accepted(3, (8,)))]
    with (
        EmbeddedRedis(data=data) as second,
        registry.claim(NAME),
        head_of(second, NAMESPACE) as head,
    ):
        again = replace(running, url=second.url)
        registry.publish(again)
        end(head, request, 8, 9)  # decoded again
        received = await all_of(followed)
        assert received == [(request, Accepted(4, (9,))), (request, Finished("stop"))]
        assert client.running == again
        await stack.__aexit__(None, None, None)


async def test_another_cluster_of_the_same_name_fails_the_requests(head, running):
    gone = replace(running, owner=ended())
    with EmbeddedRedis() as other, head_of(other, NAMESPACE) as new, registry.claim(NAME):
        registry.publish(replace(running, url=other.url))
        async with attach(gone, LONG_S) as client:
            async with client.follow() as followed:
                await ask(followed)
                with pytest.raises(RankFailed, match="ended before"):
                    await all_of(followed)
            async with client.follow() as followed:
                request = await ask(followed)
                end(new, request)
                assert await followed.next(LONG_S) == [(request, Finished("stop"))]
    assert head.tokens(1) == ()


async def test_times_of_a_machine_with_another_clock_are_moved_by_the_least_delay(head, running):
    """So that they are those of this machine's clock, the way of the first token included."""
    far = replace(running, owner=replace(Owner.this(), machine="elsewhere"), num_ranks=1)
    now, moved = [0], []
    async with attach(far, LONG_S, clock=lambda: now[0]) as client:
        for now[0], there_ns in ((1000, 100), (2000, 1500), (9000, 2000)):
            async with client.follow() as followed:
                request = await ask(followed)
                head.report(request, {"token_ns": [there_ns]})
                end(head, request, 8)
                await all_of(followed)
            (report,) = await client.reports(request)
            moved += report["token_ns"]
    assert moved == [1000, 2000, 2500]


async def test_reports_that_were_lost_are_blank(head, running):
    """After a fault: the ranks of an earlier epoch have taken theirs along."""
    async with attach(replace(running, epoch=0, num_ranks=2), LONG_S) as client:
        async with client.follow() as followed:
            request = await ask(followed)
            head.report(request, {"token_ns": [5]})
            end(head, request)
            await all_of(followed)
        own, lost = await client.reports(request)
    assert own["token_ns"] == [5]
    assert lost == empty_report(1)


async def test_a_cluster_that_ends_while_a_slow_reader_reads_on_is_reported():
    class EndingClient:
        async def wake(self) -> None:
            """There is room again."""
            answer.fail(2, RankFailed("the cluster ended"))

    answer = AsyncAnswer(EndingClient())  # type: ignore[arg-type]
    for request in (1, 2):
        answer.open[request] = Followed(answer, b"")
    for _ in range(MOST_EVENTS):
        answer.push(1, Accepted(0, (5,)))
    assert len(await answer.next()) == MOST_EVENTS
    with pytest.raises(RankFailed, match="the cluster ended"):
        await answer.next()


async def test_a_cluster_that_ends_between_two_reads_ends_no_answer_early():
    answer = AsyncAnswer(None)  # type: ignore[arg-type]
    answer.open[1] = Followed(answer, b"")
    answer.push(1, Accepted(0, (5,)))
    assert await answer.next() == [(1, Accepted(0, (5,)))]
    answer.fail(1, RankFailed("the cluster ended"))  # while the reader is busy
    assert len(answer) == 1
    with pytest.raises(RankFailed, match="the cluster ended"):
        await answer.next()


async def test_an_answer_that_was_taken_whole_is_not_interrupted_any_more():
    answer = AsyncAnswer(None)  # type: ignore[arg-type]
    answer.open[1] = Followed(answer, b"")
    finished = Finished("length")
    answer.push(1, finished)
    assert await answer.next() == [(1, finished)]
    answer.interrupt(RankFailed("the server ends"))  # while its last piece is being sent
    assert len(answer) == 0


def test_a_request_that_is_not_in_the_log_does_not_hold_the_others_up(head, running):
    known = head.enqueue(**ASKED)
    end(head, known)
    with sync_client.attach(running, LONG_S) as client, client.follow() as answers:
        with client.follow() as unknown:
            client.run(unknown.add(99))
            client.run(answers.add(known))
            with pytest.raises(RankFailed, match="ended before the request was finished"):
                client.run(unknown.next(LONG_S))
        assert client.run(answers.next(LONG_S)) == [(known, Finished("stop"))]


async def test_a_call_cancelled_halfway_does_not_disturb_the_next(redis, head):
    log = AsyncRequestLog(redis.url, namespace=NAMESPACE, patience=LONG_S)
    (first,) = await log.enqueue([Request(0, **ASKED)], 99)
    for turns in range(1, 20):  # of the loop, before it is cancelled
        asking = asyncio.ensure_future(log.look())
        for _ in range(turns):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking])
    (second,) = await log.enqueue([Request(0, **ASKED)], 99)
    assert second == first + 1
    taken = take(head)
    assert taken.id == first
    await log.close()


async def test_a_redis_that_accepts_a_connection_but_says_nothing_is_given_up(monkeypatch):
    """As one that hangs does, or what stands before it: the greeting is not answered either."""
    monkeypatch.setattr(async_request_log, "ANSWER_TIMEOUT_S", 0.2)
    silent = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1")
    port = silent.sockets[0].getsockname()[1]
    connection = AsyncRedisConnection(f"redis://:secret@127.0.0.1:{port}/0")
    with pytest.raises(Unreachable, match=r"did not answer within 0\.2 seconds"):
        await asyncio.wait_for(connection.call("PING"), LONG_S)
    assert not connection.connected
    silent.close()


async def test_conversations_are_kept_within_a_bound(redis, running, monkeypatch):
    monkeypatch.setattr(async_request_log, "MAX_CONVERSATION_BYTES", 100)
    async with attach(running, patience=LONG_S) as client:
        log = client.log
        assert await log.conversation("one") is None
        await log.keep_conversation("one", b"a" * 40)
        await log.keep_conversation("one", b"lost reply")  # sent again, kept once
        await log.keep_conversation("two", b"b" * 40)
        assert await log.conversation("one") == b"a" * 40
        await log.keep_conversation("three", b"c" * 90)
        await log.keep_conversation("four", b"d" * 101)
        found = [await log.conversation(name) for name in ("one", "two", "three", "four")]
        assert found == [None, None, b"c" * 90, None]
    keys = RedisKeys(NAMESPACE)
    with closing(RedisConnection(redis.url)) as pipe:
        assert pipe.call("GET", keys.conversation_bytes) == b"90"
        assert pipe.call("LRANGE", keys.conversation_order, 0, -1) == [b"90 three"]
        names = (keys.conversation_bytes, keys.conversation_order, f"{keys.conversations}:three")
        for name in names:
            assert 0 < pipe.call("TTL", name) <= async_request_log.KEEP_CONVERSATION_S
