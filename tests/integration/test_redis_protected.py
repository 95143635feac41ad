"""What protects the private server's port for other hosts when no setting says anything."""

import asyncio
import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import trustme
from redis.connection import parse_url

import pipespec
from pipespec.controller import epoch_control, tls_proxy
from pipespec.controller.async_request_log import AsyncRequestLog
from pipespec.controller.certificate import Certificate
from pipespec.controller.embedded_redis import EmbeddedRedis
from pipespec.controller.rank_controller import Controller
from pipespec.controller.redis_connection import RedisConnection, check_server
from pipespec.core import Request
from pipespec.errors import ControllerError, Unreachable
from pipespec.system.process_identity import is_stopped
from tests.helpers.listening import listening
from tests.helpers.log import accept
from tests.helpers.redis_tls import Between, redis_server
from tests.helpers.waiting import until

REPOSITORY = Path(pipespec.__file__).parent.parent
LOOPBACK = "127.0.0.1"
HOST = "127.0.0.2"
ASKED = {"prompt": (31337, 27182, 16180), "max_new_tokens": 5}
PROMPT = b"31337"
ANSWER = b"14142"
NOT_OURS = "shows a certificate that is not of this cluster"


@pytest.fixture(scope="module", params=[True, False], ids=["built_with_tls", "built_without"])
def server(request: pytest.FixtureRequest) -> Iterator[EmbeddedRedis]:
    """One that listens for other hosts, and has been told nothing of TLS."""
    with redis_server(with_tls=request.param), EmbeddedRedis(addresses=[HOST]) as server:
        yield server


def password(server: EmbeddedRedis) -> str:
    return server.url.partition("password=")[2]


def moved(url: str, port: int) -> str:
    """The URL with another place."""
    before, _, rest = url.partition("@")
    return f"{before}@{LOOPBACK}:{port}?{rest.partition('?')[2]}"


async def enqueue(url: str) -> int:
    """As a client in an event loop does."""
    log = AsyncRequestLog(url, namespace="protected", patience=0)
    try:
        return (await log.enqueue([Request(0, **ASKED)], 99))[0]
    finally:
        await log.close()


def ask(url: str) -> None:
    """A prompt and an answer, as a rank and a client say them."""
    epoch = epoch_control.begin_epoch(url, "protected")
    with Controller(url, namespace="protected", epoch=epoch, rank=0) as controller:
        request = controller.enqueue(**ASKED)
        accept(controller, request, 3, [int(ANSWER)])
        assert controller.tokens(request) == (int(ANSWER),)
        assert asyncio.run(enqueue(url)) == request + 1


def test_redis_notices_a_host_that_is_gone_without_a_word(server):
    """Linux shows which timer runs for a connection, 2 being that of probes."""
    url = parse_url(server.url_at(LOOPBACK))
    pipe = RedisConnection(server.url_at(LOOPBACK))
    assert pipe.call("PING") == b"PONG"

    def timers() -> set[str]:
        lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
        ours = f"0100007F:{url['port']:04X}"
        fields = [line.split() for line in lines]
        connected = [each for each in fields if each[1] == ours and each[3] == "01"]
        return {each[5].partition(":")[0] for each in connected}

    until(lambda: timers() == {"02"})
    pipe.close()


def test_nothing_that_redis_holds_can_be_read_from_packets(server):
    with Between(server.port) as relay:
        ask(moved(server.url_at(LOOPBACK), relay.port))
        assert len(relay.kept) > 2000
        for secret in (password(server).encode(), PROMPT, ANSWER, b"protected", b"EVALSHA"):
            assert secret not in relay.kept


def test_all_of_it_can_be_read_without_tls():
    """So the test before looks where there is something to see."""
    with EmbeddedRedis(addresses=[HOST], tls=False) as server, Between(server.port) as relay:
        url = server.url_at(LOOPBACK)
        assert url.startswith("redis://")
        ask(moved(url, relay.port))
        for secret in (password(server).encode(), PROMPT, ANSWER, b"protected", b"EVALSHA"):
            assert secret in relay.kept


def test_the_port_speaks_tls_1_3_alone(server):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection((HOST, server.port)) as plain:
        secure = context.wrap_socket(plain)
        assert secure.version() == "TLSv1.3"
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with (
        socket.create_connection((HOST, server.port)) as plain,
        pytest.raises(ssl.SSLError, match=r"(?i)alert|eof"),
    ):
        context.wrap_socket(plain)
    with pytest.raises(Unreachable):
        check_server(f"redis://:{password(server)}@{HOST}:{server.port}", timeout=1)


def test_a_password_is_needed_all_the_same(server):
    url = server.url_at(HOST)
    with pytest.raises(Unreachable, match="refused the user name or password"):
        check_server(url.replace(password(server), "wrong"))
    with pytest.raises(Unreachable, match="refused the user name or password"):
        check_server(url.replace(f":{password(server)}@", ""))


def middle(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """The certificate of a man in the middle."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if kind == "like ours":
        Certificate.make().load_into(context)
        return context
    authority = trustme.CA()
    authority.issue_cert(LOOPBACK).configure_cert(context)
    authority.cert_pem.write_to_path(tmp_path / "system.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "system.pem"))
    return context


@pytest.mark.parametrize("kind", ["like ours", "of an authority that the system trusts"])
def test_a_man_in_the_middle_learns_nothing(server, kind, tmp_path, monkeypatch):
    with Between(server.port, middle(tmp_path, kind, monkeypatch)) as relay:
        url = moved(server.url_at(LOOPBACK), relay.port)
        with pytest.raises(Unreachable, match=NOT_OURS):
            ask(url)
        with pytest.raises(Unreachable, match=NOT_OURS):
            asyncio.run(enqueue(url))
        until(lambda: relay.visitors == 2)
        assert relay.kept == b"", "not even the password was sent"


def test_the_certificate_passes_the_strict_checks_of_newer_pythons(server):
    """Those of `ssl.create_default_context` from Python 3.13 on."""
    trusted = parse_url(server.url_at(HOST))["ssl_ca_data"]
    context = ssl.create_default_context(cadata=trusted)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_STRICT | ssl.VERIFY_X509_PARTIAL_CHAIN
    with (
        socket.create_connection((HOST, server.port)) as plain,
        context.wrap_socket(plain) as secure,
    ):
        assert secure.getpeercert(binary_form=True) == ssl.PEM_cert_to_DER_cert(trusted)


def test_certificates_in_a_url_that_are_none_are_said(server):
    url = f"{server.url_at(HOST).partition('?')[0]}?ssl_ca_data=none"
    with pytest.raises(Unreachable, match="TLS"):
        check_server(url)
    with pytest.raises(Unreachable, match="TLS"):
        asyncio.run(enqueue(url))


@pytest.mark.parametrize("clock", ["1971-01-01", "2100-01-01"])
def test_the_clocks_of_the_hosts_need_not_agree(server, clock):
    library = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
    if library is None:
        pytest.skip("needs libfaketime (apt install libfaketime)")
    code = "import sys, time; from pipespec.controller.redis_connection import check_server; "
    code += "check_server(sys.stdin.read()); print(time.gmtime().tm_year)"
    told = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "LD_PRELOAD": str(library), "FAKETIME": f"@{clock} 12:00:00"},
        input=server.url_at(HOST),
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
    )
    assert (told.returncode, told.stdout.strip()) == (0, clock[:4]), told.stderr


def test_the_key_is_for_this_user_and_goes_with_the_server():
    with EmbeddedRedis(addresses=[HOST]) as server:
        folder = Path(server.url.removeprefix("unix://").partition("?")[0]).parent
        files = [file for file in folder.iterdir() if file.is_file()]
        held = [file for file in files if b"PRIVATE KEY" in file.read_bytes()]
        assert [file.name for file in held] == ["key.pem"]
        assert held[0].stat().st_mode & 0o077 == 0
        assert "PRIVATE" not in server.url_at(HOST)
    assert not folder.exists()
    with EmbeddedRedis() as server:
        folder = Path(server.url.removeprefix("unix://").partition("?")[0]).parent
        assert not list(folder.glob("*.pem")), "no other host connects"


@pytest.fixture
def fronted() -> Iterator[EmbeddedRedis]:
    with redis_server(with_tls=False), EmbeddedRedis(addresses=[HOST]) as server:
        yield server


def proxy_pid(server: EmbeddedRedis) -> int:
    assert server.proxy_pid is not None, "this server was built with TLS"
    return server.proxy_pid


def test_a_redis_without_tls_listens_on_no_port(fronted):
    assert {each.kind for each in listening([fronted.pid])} == {"unix"}
    assert {(each.kind, each.address) for each in listening([proxy_pid(fronted)])} == {
        ("tcp", LOOPBACK), ("tcp", HOST)
    }  # fmt: skip
    assert {each.port for each in listening([proxy_pid(fronted)])} == {fronted.port}
    command = Path(f"/proc/{proxy_pid(fronted)}/cmdline").read_bytes()
    assert password(fronted).encode() not in command


def test_a_proxy_that_is_stopped_for_a_moment_is_kept(fronted):
    pid = proxy_pid(fronted)
    for _ in range(2):
        os.kill(pid, signal.SIGSTOP)
        until(lambda: is_stopped(pid))
        assert not fronted.front_failed()
        os.kill(pid, signal.SIGCONT)
        until(lambda: not is_stopped(pid))
        assert not fronted.front_failed()


def test_a_proxy_that_hangs_before_it_is_ready_is_ended(tmp_path, monkeypatch):
    hanging = tmp_path / "python"
    hanging.write_text("#!/bin/sh\nexec sleep 600\n")
    hanging.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(hanging))
    monkeypatch.setattr(tls_proxy, "START_TIMEOUT_S", 1.0)
    before = psutil.Process().children()
    with (
        tls_proxy.listener_at(LOOPBACK, 0) as listener,
        pytest.raises(ControllerError, match="did not start: it was not ready within 1 seconds"),
    ):
        tls_proxy.start([listener], tmp_path / "redis.sock", listener.fileno())
    assert psutil.Process().children() == before


def test_a_proxy_that_cannot_start_is_said(tmp_path):
    with (
        tls_proxy.listener_at(LOOPBACK, 0) as listener,
        pytest.raises(ControllerError, match=r"TLS process .* did not start: .*No such file"),
    ):  # there is no certificate beside the socket
        tls_proxy.start([listener], tmp_path / "redis.sock", listener.fileno())


def test_much_data_passes_whole_and_in_order(fronted):
    pipe = RedisConnection(fronted.url_at(HOST), timeout=60)
    value = os.urandom(1 << 20) * 24
    for number in range(3):
        pipe.send("SET", f"key{number}", value)
    for number in range(200):
        pipe.send("ECHO", str(number))
    pipe.flush()
    for number in range(3):
        pipe.send("GET", f"key{number}")
    assert [pipe.read() == value for _ in range(3)] == [True] * 3
    pipe.close()


def test_client_without_a_handshake_delays_no_other(fronted):
    silent = [socket.create_connection((HOST, fronted.port)) for _ in range(100)]
    assert check_server(fronted.url_at(HOST))
    for each in silent:
        each.close()


def test_redis_notices_a_client_that_disconnects(fronted):
    own = RedisConnection(fronted.url)
    visitors = [RedisConnection(fronted.url_at(HOST)) for _ in range(5)]
    assert own.call("CLIENT", "LIST").count(b"\n") == 6
    for visitor in visitors:
        visitor.close()
    until(lambda: own.call("CLIENT", "LIST").count(b"\n") == 1)
