"""A Redis that ends and comes back: what it kept, and who goes on without seeing it."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from pipespec.controller import data_folder, epoch_control
from pipespec.controller.async_request_log import AsyncRequestLog
from pipespec.controller.data_folder import KeptModel, check_model, write_model
from pipespec.controller.embedded_redis import EmbeddedRedis
from pipespec.controller.log_records import Finished
from pipespec.controller.rank_controller import Controller
from pipespec.controller.redis_connection import RedisConnection, check_server
from pipespec.controller.task_graph import compute, step_graph
from pipespec.core import Request, SamplingParams
from pipespec.errors import ConfigError, ControllerError, Unreachable
from tests.helpers.log import accept, head_of, take
from tests.helpers.redis_tls import Between, redis_server
from tests.helpers.waiting import until
from tools.rig import testbed
from tools.rig.log import client_of
from tools.rig.requests import RequestClient
from tools.rig.testbed import Testbed

NAMESPACE = "restart"
LOOPBACK = "127.0.0.1"
LONG_S = 30.0
ASKED = {"prompt": (5, 6, 7), "max_new_tokens": 9}


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(port=0) as server:
        yield server


@pytest.fixture
def user(server: EmbeddedRedis) -> Iterator[RequestClient]:
    epoch_control.begin_epoch(server.url, NAMESPACE)
    with client_of(server.url, NAMESPACE) as client:
        yield client


def ask(user: RequestClient) -> int:
    """The number of a request that was put in the queue."""
    return user.submit(sampling=SamplingParams(), **ASKED)


def queued(controller: Controller) -> list[int]:
    """Takes all requests off the queue; their ids."""
    return [request.id for request in iter(lambda: take(controller, wait=False), None)]


def kill(server: EmbeddedRedis) -> None:
    """Ends the server as a crash would; returns when it is gone."""
    process = os.pidfd_open(server.pid)
    os.kill(server.pid, signal.SIGKILL)
    os.waitid(os.P_PIDFD, process, os.WEXITED | os.WNOWAIT)
    os.close(process)


def test_a_server_outlives_the_thread_that_restarted_it(server):
    """The recovery's thread ends before the cluster does."""
    recovering = threading.Thread(target=server.restart)
    recovering.start()
    recovering.join()
    pipe = RedisConnection(server.url)
    for _ in range(100):
        pipe.call("PING")
    pipe.close()
    assert server.alive()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, None])
def test_a_restarted_server_is_the_same_one(server, number):
    """After a crash, when it hangs, and while it runs well."""
    known = server.url, server.url_at(LOOPBACK)
    pipe = RedisConnection(server.url)
    for value in range(1000):
        pipe.call("SET", "last", value)
    pid = server.pid
    if number == signal.SIGKILL:
        kill(server)
        assert not server.alive()
    elif number:
        os.kill(pid, number)
    server.restart()
    assert server.alive()
    assert server.pid != pid
    assert known == (server.url, server.url_at(LOOPBACK))
    for url in known:
        again = RedisConnection(url)
        assert again.call("GET", "last") == b"999"
        again.close()
    with pytest.raises(Unreachable, match=r"The connection to Redis at .* was lost\."):
        pipe.call("PING")


@pytest.mark.parametrize("with_tls", [True, False], ids=["built_with", "built_without"])
def test_data_password_certificate_and_port_outlive_the_server(tmp_path, with_tls):
    data = tmp_path / 'a "folder"'
    with redis_server(with_tls=with_tls):
        assert_kept(data)


def assert_kept(data: Path) -> None:
    with EmbeddedRedis(addresses=[LOOPBACK], data=data) as first:
        RedisConnection(first.url).call("SET", "kept", "yes")
        url, password = first.url_at(LOOPBACK), first.url.partition("=")[2]
    with EmbeddedRedis(data=data):
        pass  # a life without other hosts forgets nothing
    with EmbeddedRedis(addresses=[LOOPBACK], data=data) as second:
        assert second.url_at(LOOPBACK) == url
        assert RedisConnection(url).call("GET", "kept") == b"yes"
    assert data.stat().st_mode & 0o777 == 0o700
    readable = [file for file in data.rglob("*") if file.is_file()]
    assert all(file.stat().st_mode & 0o077 == 0 for file in readable)
    assert [file.name for file in readable if password.encode() in file.read_bytes()] == [
        "server.json"
    ]


@pytest.mark.long
def test_the_file_does_not_grow_from_start_to_start(tmp_path):
    """It is written anew when it has doubled since the start, so many lives would each add some."""
    much = 200_000

    def size() -> int:
        """Of the append-only file, which Redis 7 splits into several."""
        found = 0
        for file in tmp_path.rglob("appendonly*.*"):
            with suppress(FileNotFoundError):  # it was replaced meanwhile
                found += file.stat().st_size
        return found

    (tmp_path / "temp-rewriteaof-bg-123.aof").touch()  # of a server that was killed meanwhile
    for _ in range(2):
        with EmbeddedRedis(data=tmp_path) as server:
            until(lambda: size() < much)
            pipe = RedisConnection(server.url)
            for _ in range(10):
                pipe.call("SET", "last", "x" * (much // 10))
            until(lambda: size() > much)  # it may wait for the disk
            kill(server)
    with EmbeddedRedis(data=tmp_path) as server:
        assert RedisConnection(server.url).call("STRLEN", "last") == much // 10
    left = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert {"server.json", "server.lock"} < left
    assert not [name for name in left if name.startswith("temp-")]


@pytest.mark.parametrize("kept", [True, False])
def test_partial_files_of_a_killed_server_are_removed_when_it_starts_again(tmp_path, kept):
    with EmbeddedRedis(data=tmp_path if kept else None) as server:
        with RedisConnection(server.url) as pipe:
            folder = Path(pipe.call("CONFIG", "GET", "dir")[1].decode())
        (folder / "appendonlydir").mkdir(exist_ok=True)
        names = ("temp-rewriteaof-1.aof", "temp-rewriteaof-bg-2.aof", "temp-3.rdb")
        left = [folder / name for name in (*names, "appendonlydir/temp-appendonly.aof.manifest")]
        for file in left:
            file.touch()
        server.restart()
        assert not [file for file in left if file.exists()]


def test_requests_to_another_model_are_not_taken_up(tmp_path):
    small = KeptModel("/models/a (float32)", 100)
    check_model(tmp_path, small, "do this")  # nothing is kept
    write_model(tmp_path, small)
    for same in (small, KeptModel(small.target, 101)):
        check_model(tmp_path, same, "do this")
    said = "keeps requests to /models/a .float32., but this cluster is of /models/b; do this"
    with pytest.raises(ConfigError, match=f"^'{tmp_path}' {said}\\.$"):
        check_model(tmp_path, KeptModel("/models/b", 100), "do this")
    with pytest.raises(ConfigError, match=r"of 100 tokens, but model\.context is 99"):
        check_model(tmp_path, KeptModel(small.target, 99), "do this")
    (tmp_path / "model.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"model\.json', which names .* cannot be read .*do this"):
        check_model(tmp_path, small, "do this")


def test_a_port_that_clients_know_is_not_given_up(tmp_path):
    with EmbeddedRedis(port=0, data=tmp_path) as first:
        port = first.port
    with (
        socket.create_server((LOOPBACK, port)),
        pytest.raises(ControllerError, match=rf"{port}, which is in use: .* controller\.port"),
        EmbeddedRedis(port=0, data=tmp_path),
    ):
        pass


def test_a_folder_is_for_one_server(tmp_path, monkeypatch):
    monkeypatch.setattr(data_folder, "LOCK_TIMEOUT_S", 0)
    with EmbeddedRedis(data=tmp_path) as first:
        with pytest.raises(ConfigError, match="another running cluster"):
            EmbeddedRedis(data=tmp_path).__enter__()
        assert check_server(first.url)


def test_a_server_whose_starter_is_gone_still_holds_its_folder(tmp_path):
    """Until the server has ended too, nobody else writes to its file."""
    with EmbeddedRedis(data=tmp_path) as server:
        held = {
            os.readlink(f"/proc/{server.pid}/fd/{n}") for n in os.listdir(f"/proc/{server.pid}/fd")
        }
    assert str(tmp_path / "server.lock") in held


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("appendonly.aof", "no command of Redis'\n", "cannot be read: remove that folder"),
        *(
            ("server.json", text, r"server\.json .* remove it")
            for text in ("", "[]", '{"password": 3, "port": null}', '{"pass": "s3cret"}')
        ),
    ],
)
def test_damaged_data_are_named_and_not_repeated(tmp_path, file, text, said):
    (tmp_path / file).write_text(text)
    with pytest.raises(ConfigError, match=said) as refusal:
        EmbeddedRedis(data=tmp_path).__enter__()
    assert "s3cret" not in str(refusal.value)


def test_a_folder_that_cannot_be_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"controller\.data .*file/data"):
        EmbeddedRedis(data=tmp_path / "file" / "data").__enter__()


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("192.0.2.1", "192.0.2.1, which is not an address of this machine"),
        ("0.0.0.0", "every network"),
        ("no-such-host.invalid", "'no-such-host.invalid' is not an address"),
    ],
)
def test_an_address_that_redis_cannot_have_is_named(address, said):
    with pytest.raises(ConfigError, match=said):
        EmbeddedRedis(addresses=[address]).__enter__()


def test_only_the_given_addresses_can_be_reached():
    with EmbeddedRedis(addresses=["127.0.0.2"]) as server:
        assert check_server(server.url_at("127.0.0.2"))
        with pytest.raises(Unreachable, match="refused the connection"):
            check_server(server.url_at("127.0.0.3"))


def test_the_task_graph_is_not_kept(server):
    """It is of no use after a restart, and would fill the file."""
    with head_of(server, NAMESPACE) as controller:
        controller.submit(step_graph(2, 0))
        controller.complete([compute(0, 0)])
        request = controller.enqueue(**ASKED)
        accept(controller, request, 3, [8])
    server.restart()
    pipe = RedisConnection(server.url)
    names = {name.decode() for name in pipe.call("KEYS", "*")}
    assert any(name.endswith(":events") for name in names)
    assert not any(":graph" in name for name in names)


def test_a_reader_with_a_timeout_is_not_held_up_while_redis_is_away(server, user):
    with user.follow() as followed:
        request = user.run(followed.submit(sampling=SamplingParams(), **ASKED))
        assert user.run(followed.next(0.01)) == []
        kill(server)
        assert [user.run(followed.next(0.01)) for _ in range(3)] == [[]] * 3
        server.restart()
        with head_of(server, NAMESPACE) as controller:
            controller.finish(request, "stop")
        assert user.run(followed.next(LONG_S)) == [(request, Finished("stop"))]


def test_a_reader_gives_up_when_redis_stays_away(server):
    epoch_control.begin_epoch(server.url, NAMESPACE)
    with client_of(server.url, NAMESPACE, patience=0.2) as user:
        request = ask(user)
        kill(server)
        with pytest.raises(Unreachable, match=r"redis\.sock refused the connection"):
            list(user.events(request))
        with pytest.raises(Unreachable):
            ask(user)


def test_client_continues_after_the_restart(server, user):
    """Whether it was idle meanwhile or asked while Redis was away."""
    first = ask(user)
    server.restart()
    second = ask(user)
    kill(server)
    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(ask, user)
        server.restart()
        third = asking.result(60)
    with head_of(server, NAMESPACE) as controller:
        assert queued(controller) == [first, second, third]
        controller.report(first, {"rank": 0, "token_ns": []})
    server.restart()
    assert user.reports(first) == [{"rank": 0, "token_ns": []}]


class Losing(Between):
    """Loses the first reply to a transition, and the connection with it."""

    asked = lost = False

    def hear(self, data: bytes, *, reply: bool) -> None:
        self.asked |= b"EVALSHA" in data
        if reply and self.asked and not self.lost:
            self.lost = True
            raise OSError("the reply is lost")


def test_a_request_whose_reply_was_lost_is_not_asked_twice():
    async def ask_twice(url: str) -> list[int]:
        log = AsyncRequestLog(url, namespace=NAMESPACE, patience=LONG_S)
        try:
            return [(await log.enqueue([Request(0, **ASKED)], 99))[0] for _ in range(2)]
        finally:
            await log.close()

    with EmbeddedRedis(port=0, tls=False) as server, Losing(server.port) as between:
        epoch_control.begin_epoch(server.url, NAMESPACE)
        url = server.url_at(LOOPBACK).replace(f":{server.port}", f":{between.port}")
        asked = asyncio.run(ask_twice(url))
        assert between.lost
        with head_of(server, NAMESPACE) as controller:
            assert queued(controller) == asked


def test_a_rank_does_not_come_back(server):
    """Its epoch has ended: what it had sent may be lost."""
    rank = head_of(server, NAMESPACE)
    request = rank.enqueue(**ASKED)
    server.restart()
    for call, arguments in ((take, (rank,)), (rank.tokens, (request,)), (rank.close_queue, ())):
        with pytest.raises(Unreachable):
            call(*arguments)
    rank.close()


SERVE = """
import sys
from pipespec.controller import epoch_control
from pipespec.controller.embedded_redis import EmbeddedRedis
from pipespec.controller.rank_controller import Controller
with EmbeddedRedis(addresses=[sys.argv[1]]) as server:
    with Controller(
        server.url, namespace="n", epoch=epoch_control.begin_epoch(server.url, "n"), rank=0
    ) as head:
        head.enqueue(prompt=(1,), max_new_tokens=1)
    print(server.url_at(sys.argv[1]), flush=True)
    sys.stdin.read()
"""
LISTEN = """
import sys
from pipespec.controller.rank_controller import Controller
from pipespec.controller.task_graph import prune
from pipespec.errors import Unreachable
from tools.rig.log import client_of
url, kind = input(), sys.argv[1]
try:
    if kind == "rank":
        with Controller(url, namespace="n", epoch=1, rank=1) as rank:
            print("listening", flush=True)
            rank.wait(prune(1, 0))
    else:
        with client_of(url, "n", patience=0) as client, client.follow() as followed:
            client.run(followed.add(1))
            print("listening", flush=True)
            while True:
                client.run(followed.next())
except Unreachable as error:
    print(error)
"""


@pytest.mark.parametrize("kind", ["rank", pytest.param("reader", marks=pytest.mark.long)])
def test_listener_notices_a_cut_link(kind):
    """Nobody has anything to send, and the wait itself has no end."""
    if reason := testbed.missing():
        pytest.skip(reason)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with Testbed(hosts=2) as bed:
        serve = [sys.executable, "-c", SERVE, bed.address("a")]
        listen = [sys.executable, "-c", LISTEN, kind]
        with bed.popen("a", serve, **pipes) as redis, bed.popen("b", listen, **pipes) as listener:
            listener.stdin.write(redis.stdout.readline())
            listener.stdin.flush()
            assert listener.stdout.readline() == "listening\n"
            bed.cut("a", "b")
            said, _ = listener.communicate(timeout=30)
            redis.communicate()
    assert f"Redis at {bed.address('a')}:" in said
