import os
import queue
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import IO
from unittest import mock

import asyncssh
import pytest

from pipespec.cli import host_admission
from pipespec.cli.invite import JoinOptions, ask_for_invitation
from pipespec.cluster.decide import decide
from pipespec.cluster.deployment.deployment import Deployment
from pipespec.cluster.diagnostics.measure_hosts import MeasuredHost
from pipespec.cluster.host_link import join_server, joined_host, loop, programs
from pipespec.cluster.host_link.connection import Connection
from pipespec.cluster.host_link.host_session import HostSession
from pipespec.cluster.host_link.join_server import JoinServer
from pipespec.cluster.host_link.joined_host import JoinedHost
from pipespec.cluster.host_link.loop import NO_CONNECTION
from pipespec.cluster.host_link.remote_program import RemoteProgram
from pipespec.cluster.host_link.token import Token
from pipespec.config.compose import compose
from pipespec.errors import HostFailed
from pipespec.placement.costs import Worker
from tests.helpers.listening import listening
from tests.helpers.processes import run_module
from tests.helpers.waiting import until

ADDRESS = "127.0.0.2"
MINUTE = 60.0
PATIENCE_S = 60.0


class Cluster:
    """A launcher that looks after hosts until they leave, without giving them anything to do."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sessions: queue.SimpleQueue[HostSession] = queue.SimpleQueue()
        self.server = JoinServer(ADDRESS, 0, self._look_after, ["alpha"], lambda: self.now)

    def _look_after(self, session: HostSession) -> None:
        self.sessions.put(session)
        while not session.leaving:
            session.changed.wait(PATIENCE_S)
            session.changed.clear()
        session.dismiss("this host has left the cluster", failed=False)

    def token(self) -> Token:
        """A new one, made as another process of this user would have it made."""
        return Token.decode(ask_for_invitation(self.server.path, MINUTE))


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    with cluster.server:
        yield cluster


def join(token: Token, name: str = "beta") -> JoinedHost:
    return JoinedHost(token, name, ["cpu"], None)


@contextmanager
def running(host: JoinedHost) -> Iterator[list[str]]:
    """The sentences that a host receives while it runs; it leaves with the block."""
    said: list[str] = []
    with host:
        thread = threading.Thread(target=host.run, args=(said.append,))
        thread.start()
        yield said
        host.leave()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


@pytest.fixture
def joined(cluster: Cluster) -> Iterator[tuple[JoinedHost, HostSession, list[str]]]:
    """A host of the cluster, its session, and the sentences that it received."""
    host = join(cluster.token())
    with running(host) as said:
        yield host, cluster.sessions.get(timeout=PATIENCE_S), said


def refused(token: Token, why: str) -> None:
    with pytest.raises(HostFailed, match=why):
        join(token)


def test_a_token_lets_in_one_host_and_its_replay_none(cluster):
    token = cluster.token()
    with join(token) as host:
        assert host.name == "beta"
        assert cluster.sessions.get(timeout=PATIENCE_S).host.devices == ("cpu",)
        refused(token, "this invitation was used already, .* `pipespec invite` prints another")
    assert cluster.sessions.empty()


def test_an_expired_token_lets_no_host_in(cluster):
    token = cluster.token()
    cluster.now = MINUTE
    refused(token, "this invitation has expired")
    assert cluster.sessions.empty()


def test_an_altered_token_lets_no_host_in_even_if_its_checksum_is_right(cluster):
    token = cluster.token()
    for number in (0, 7, 19):
        secret = bytearray(token.secret)
        secret[number] ^= 1
        changed = Token.decode(replace(token, secret=bytes(secret)).encode())
        refused(changed, "is not one of this cluster")
    fingerprint = bytes([token.fingerprint[0] ^ 1, *token.fingerprint[1:]])
    refused(
        replace(token, fingerprint=fingerprint), "another key than the cluster that made this token"
    )
    assert cluster.sessions.empty()
    with join(token):
        pass  # it was not used up


def test_a_host_says_nothing_about_itself_to_another_launcher(cluster):
    """One that stands in the place of the launcher, and accepts every host."""
    token, sessions = cluster.token(), list[str]()

    async def let_in(connection: asyncssh.SSHClientConnection) -> None:
        sessions.append((await connection.run("control", input="{}\n")).stdout)

    class Interloper(asyncssh.SSHClient):
        def validate_host_public_key(self, *_: object) -> bool:
            return True

    async def stand_between() -> asyncssh.SSHAcceptor:
        return await asyncssh.listen_reverse(
            ADDRESS,
            0,
            acceptor=let_in,
            client_factory=Interloper,
            client_keys=[asyncssh.generate_private_key("ssh-ed25519")],
            known_hosts=b"",
            username="pipespec",
            config=[],
        )

    listener = loop.call(stand_between())
    refused(replace(token, port=listener.get_port()), "another key than the cluster")
    loop.soon(listener.close)
    assert not sessions
    assert cluster.sessions.empty()


def test_another_version_is_refused_before_the_token_is_used(cluster, monkeypatch):
    token = cluster.token()
    with monkeypatch.context() as patch:
        patch.setattr(join_server, "own_version", lambda: "0.1.0, code 1")
        patch.setattr(joined_host, "own_version", lambda: "0.1.0, code 2")
        refused(token, r"pipespec here is 0\.1\.0, code 2, .* install the same on all hosts")
    with join(token):
        pass


def test_connections_without_a_token_are_closed(cluster):
    where = (cluster.server.address, cluster.server.port)
    greeting = b"SSH-2.0-stranger\r\n"
    for said in (b"", b"\0" * 100, b"GET / HTTP/1.1\r\n\r\n", greeting + b"\0" * 100, b"1" * 2**18):
        with (
            socket.create_connection(where, PATIENCE_S) as stranger,
            suppress(OSError),  # it may have closed already
        ):
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(2**16):
                pass
    until(lambda: not cluster.server.unproven, PATIENCE_S)
    assert cluster.sessions.empty()
    with join(cluster.token()):
        pass


def test_more_connections_than_may_be_unproven_are_closed(cluster, monkeypatch):
    monkeypatch.setattr(join_server, "MOST_UNPROVEN", 2)
    where = (cluster.server.address, cluster.server.port)
    with ExitStack() as stack:
        for _ in range(2):
            stranger = stack.enter_context(socket.create_connection(where, PATIENCE_S))
            assert stranger.recv(4) == b"SSH-"
        with socket.create_connection(where, PATIENCE_S) as third, suppress(ConnectionError):
            assert third.recv(4) == b""
        refused(cluster.token(), "is no launcher of pipespec")
    until(lambda: not cluster.server.unproven, PATIENCE_S)
    with join(cluster.token()):
        pass


def test_a_name_that_is_taken_gets_a_number(cluster):
    with ExitStack() as stack:
        names = [
            stack.enter_context(join(cluster.token(), name)).name
            for name in ("alpha", "beta", "beta")
        ]
    assert names == ["alpha-2", "beta", "beta-2"]


def test_an_address_that_is_none_is_refused_before_the_token_is_used(cluster):
    token = cluster.token()
    with pytest.raises(HostFailed, match=r"address is '10\.0\.0\.256', which .* --address"):
        JoinedHost(token, "beta", ["cpu"], "10.0.0.256")
    with join(token):
        pass


class Admission:
    """Admits so many hosts, as if they were measured, until the cluster can begin."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, hosts: int) -> None:
        measured = lambda host, *_: MeasuredHost((Worker(host.workers[0]),), {})  # noqa: E731
        monkeypatch.setattr(host_admission, "measured", measured)
        self.tokens: queue.SimpleQueue[Token] = queue.SimpleQueue()
        self.left = threading.Event()
        deployment = decide(compose(["cluster.stages=2", "cluster.devices=[cpu]"]))
        self.made = host_admission.HostAdmission(
            JoinOptions(hosts=hosts), replace(deployment, open_to=ADDRESS), self.on_log
        )
        self.found: list[Deployment] = []
        wait = lambda: self.made.await_hosts(deployment, deployment.placement.problem)  # noqa: E731
        self.thread = threading.Thread(target=lambda: self.found.append(wait()))

    def on_log(self, name: str, sentence: str) -> None:
        if name == "waiting":
            self.tokens.put(Token.decode(sentence.split()[-1]))
        elif (name, sentence) == ("early", "it has left before the cluster began"):
            self.left.set()


def test_a_host_that_leaves_before_the_cluster_begins_is_waited_for_no_more(monkeypatch):
    admission = Admission(monkeypatch, hosts=3)
    with admission.made.server, ExitStack() as stack:
        admission.thread.start()
        stack.enter_context(join(admission.tokens.get(timeout=PATIENCE_S), "early")).leave()
        assert admission.left.wait(PATIENCE_S)
        for name in ("beta", "gamma"):
            stack.enter_context(join(admission.tokens.get(timeout=PATIENCE_S), name))
        admission.thread.join(PATIENCE_S)
    assert [host.name for host in admission.found[0].joined] == ["beta", "gamma"]


def test_a_host_that_comes_again_under_its_name_joins_anew(monkeypatch):
    attended: queue.SimpleQueue[tuple[str, bool]] = queue.SimpleQueue()

    def look_after(session: HostSession, *_: object, joined: bool) -> None:
        attended.put((session.host.name, joined))
        session.dismiss("it was away", failed=True)

    monkeypatch.setattr(host_admission, "look_after_host", look_after)
    admission = Admission(monkeypatch, hosts=2)
    with admission.made.server as server:
        admission.thread.start()
        with join(admission.tokens.get(timeout=PATIENCE_S)):
            admission.thread.join(PATIENCE_S)
            admission.made.begin(mock.Mock())
            assert attended.get(timeout=PATIENCE_S) == ("beta", True)
        with join(Token.decode(server.invite(MINUTE))):
            assert attended.get(timeout=PATIENCE_S) == ("beta", False)


def test_a_program_runs_on_the_host_as_if_over_ssh(joined, monkeypatch):
    monkeypatch.setattr(joined_host, "PROGRAMS", ("tests.helpers.echo",))
    _, session, _ = joined
    data = os.urandom(3 * 2**20)
    with tempfile.TemporaryFile() as errors:
        program = programs.start_module(session.host, "tests.helpers.echo", "7", stderr=errors)
        with program.stdout as stdout, ThreadPoolExecutor(1) as pool:
            answer = pool.submit(stdout.read)
            with program.stdin as stdin:
                stdin.write(data)
            assert answer.result() == data
        assert program.wait(PATIENCE_S) == 7
        errors.seek(0)
        assert errors.read() == b"echoed\n"


@pytest.fixture
def talking(
    monkeypatch: pytest.MonkeyPatch, joined: tuple[JoinedHost, HostSession, list[str]]
) -> Iterator[tuple[RemoteProgram, IO[bytes]]]:
    """A program on the host that has answered, and its errors."""
    monkeypatch.setattr(joined_host, "PROGRAMS", ("tests.helpers.echo",))
    _, session, _ = joined
    with tempfile.TemporaryFile() as errors:
        program = programs.start_module(session.host, "tests.helpers.echo", "0", stderr=errors)
        with program.stdin as stdin, program.stdout as stdout:
            stdin.write(b"hello")
            stdin.flush()
            assert stdout.read(5) == b"hello"
            yield program, errors


def test_a_program_ends_when_the_launcher_hangs_up(joined, talking):
    (host, _, _), (program, _) = joined, talking
    assert host._running
    program.kill()
    assert program.wait(PATIENCE_S) == -signal.SIGKILL
    until(lambda: not host._running, PATIENCE_S)


def test_a_program_ends_with_its_connection(joined, talking):
    (host, session, _), (program, errors) = joined, talking
    broken(session)
    assert program.wait(PATIENCE_S) == NO_CONNECTION
    assert program.stdout.read() == b""
    errors.seek(0)
    error = programs.failure(session.host, "m", program.wait(), errors.read())
    assert str(error).startswith("beta: the connection was lost; run `pipespec join` there again")
    until(lambda: not host._running, PATIENCE_S)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers find a silent host sooner than usual."""
    monkeypatch.setattr(join_server, "SILENCE_S", 3)


@pytest.mark.usefixtures("impatient")
def test_a_silent_host_is_found(joined, talking, monkeypatch):
    """Its connection is open, but answers nothing, as that of a host without power."""
    (host, session, _), (program, errors) = joined, talking
    connect = joined_host.JoinedHost._connect
    monkeypatch.setattr(joined_host.JoinedHost, "_connect", failing)
    loop.soon(host._connection.set_keepalive, 0)  # this side does not look
    loop.soon(host._connection._transport.pause_reading)
    began = time.monotonic()
    assert program.wait(PATIENCE_S) == NO_CONNECTION
    assert time.monotonic() - began < join_server.SILENCE_S + 3
    errors.seek(0)
    assert b"not responding" in errors.read()
    assert session.lost_s < 3
    monkeypatch.setattr(joined_host.JoinedHost, "_connect", connect)
    loop.soon(host._connection.abort)  # it comes back


async def failing(*_: object) -> None:
    raise HostFailed("it has no network")


def test_only_programs_of_pipespec_run_on_the_host(joined):
    _, session, _ = joined
    with pytest.raises(HostFailed, match="No module named timeit for hosts that join"):
        run_module(session.host, "timeit")


def test_a_program_on_a_host_that_has_left_fails_with_the_remedy(cluster):
    with running(join(cluster.token())):
        session = cluster.sessions.get(timeout=PATIENCE_S)
    until(lambda: not cluster.server._sessions)
    with pytest.raises(HostFailed, match=r"^beta: it has left; run `pipespec join` there again"):
        run_module(session.host, "pipespec.cluster.processes.agent")


def broken(session: HostSession) -> Connection:
    """The connection of a host, which is cut."""
    first = session._connection
    loop.soon(first[0].abort)
    return first


def test_a_host_that_was_told_to_stay_does_not_leave_when_its_connection_breaks(joined):
    host, session, said = joined
    # Else the launcher of this test would let it go at once.
    changed, session.changed = session.changed, threading.Event()
    host.leave()
    until(lambda: session.leaving, PATIENCE_S)
    session.leaving = False
    session.tell("it cannot leave yet: b holds too little memory", stays=True)
    until(lambda: not host.leaving, PATIENCE_S)
    assert said == ["it cannot leave yet: b holds too little memory"]
    first = broken(session)
    until(lambda: session._connection not in (None, first), PATIENCE_S)
    session.tell("welcome back")
    until(lambda: "welcome back" in said, PATIENCE_S)
    assert not session.leaving
    session.changed = changed


def test_a_host_that_was_dismissed_is_not_let_in_again(cluster):
    with join(cluster.token()) as host:
        session = cluster.sessions.get(timeout=PATIENCE_S)
        session.dismissed = session.leaving = True  # it was dismissed while it was away
        session.changed.set()
        until(lambda: not cluster.server._sessions)
        broken(session)
        with pytest.raises(HostFailed, match="this host has left, or was never let in"):
            host.run(lambda _: None)


def test_hosts_are_let_go_when_the_cluster_ends():
    cluster = Cluster()
    with cluster.server, join(cluster.token()) as host:
        said: list[str] = []
        thread = threading.Thread(target=host.run, args=(said.append,))
        thread.start()
        cluster.sessions.get(timeout=PATIENCE_S).leaving = True
        cluster.server.__exit__()
        thread.join(PATIENCE_S)
    assert said == ["the cluster has ended"]


def test_hosts_join_at_one_address_of_the_machine(cluster):
    ours = [each for each in listening([os.getpid()]) if each.port == cluster.server.port]
    assert {each.address for each in ours if each.kind == "tcp"} == {ADDRESS}
