"""Hosts that join over sockets: who is let in, and the programs that the launcher runs on them."""

from __future__ import annotations

import json
import os
import queue
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import replace

import pytest

from pipespec.cli import host_admission
from pipespec.cli.invite import JoinOptions
from pipespec.cluster import host_session, join_client, join_link, join_server, ssh
from pipespec.cluster.deployment import Deployment, decide
from pipespec.cluster.host_changes import MeasuredHost
from pipespec.cluster.host_session import HostSession
from pipespec.cluster.join_client import Admission, JoinedHost, enter
from pipespec.cluster.join_link import JOIN, JoinLink
from pipespec.cluster.join_server import JoinServer, ask_for_invitation
from pipespec.cluster.join_token import Token, fingerprint_of, id_of
from pipespec.config.compose import compose
from pipespec.config.hosts import LOCAL
from pipespec.controller.certificate import Certificate
from pipespec.errors import HostFailed
from pipespec.placement.costs import Worker
from tests.helpers.listening import listening
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


def join(token: Token, name: str = "beta") -> tuple[Admission, JoinLink]:
    return enter(token, name, ["cpu"], None)


@pytest.fixture
def joined(cluster: Cluster) -> Iterator[tuple[JoinedHost, HostSession, list[str]]]:
    """A host of the cluster, its session, and the sentences that it received."""
    said: list[str] = []
    with JoinedHost(*join(cluster.token()), said.append) as host:
        thread = threading.Thread(target=host.run)
        thread.start()
        yield host, cluster.sessions.get(timeout=PATIENCE_S), said
        host.leave()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def refused(token: Token, why: str) -> None:
    with pytest.raises(HostFailed, match=why):
        join(token)


def test_a_token_lets_in_one_host_and_its_replay_none(cluster: Cluster) -> None:
    token = cluster.token()
    admission, link = join(token)
    assert admission.name == "beta"
    assert cluster.sessions.get(timeout=PATIENCE_S).host.devices == ("cpu",)
    refused(token, "does not let this host in: this invitation was used already")
    assert cluster.sessions.empty()
    link.close()


def test_an_expired_token_lets_no_host_in(cluster: Cluster) -> None:
    token = cluster.token()
    cluster.now = MINUTE
    refused(token, "this invitation has expired")
    assert cluster.sessions.empty()


def test_an_altered_token_lets_no_host_in_even_if_its_checksum_is_right(cluster: Cluster) -> None:
    token = cluster.token()
    for number in (0, 7, 19):
        secret = bytearray(token.secret)
        secret[number] ^= 1
        changed = Token.decode(replace(token, secret=bytes(secret)).encode())
        refused(changed, "not one of this cluster")
    fingerprint = bytes([token.fingerprint[0] ^ 1, *token.fingerprint[1:]])
    refused(replace(token, fingerprint=fingerprint), "another certificate")
    assert cluster.sessions.empty()
    join(token)[1].close()  # it was not used up


def test_a_client_that_knows_the_id_of_an_invitation_without_its_secret_is_refused(
    cluster: Cluster,
) -> None:
    token = cluster.token()
    link, _ = join_link.connect(token)
    wrong = bytes(len(token.secret))
    hello = link.receive(PATIENCE_S)
    assert hello is not None
    link.send({"for": JOIN, "id": id_of(token.secret), "nonce": "1"})
    answer = link.receive(PATIENCE_S)
    assert answer is not None
    nonces = hello["nonce"] + "1"
    # The launcher's own proof is of no use to a client that returns it.
    for proof in (join_link.proof(wrong, "host", JOIN, nonces, token.fingerprint), answer["proof"]):
        with suppress(OSError):
            link.send({"proof": proof, "host": {}})
    with suppress(OSError):
        assert link.receive(PATIENCE_S) is None
    link.close()
    assert cluster.sessions.empty()
    join(token)[1].close()


def test_a_host_says_nothing_about_itself_to_an_interloper(cluster: Cluster) -> None:
    """Whose certificate a forged token names, and who passes on all that is said."""
    token, own = cluster.token(), Certificate.make()
    received: list[dict[str, object]] = []
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server((ADDRESS, 0)))

        def stand_between() -> None:
            plain, _ = listener.accept()
            host = join_link.accept(plain, join_link.server_context(own))
            true, _ = join_link.connect(token)
            with closing(host), closing(true), suppress(OSError):
                host.send(true.receive(PATIENCE_S) or {})
                received.append(host.receive(PATIENCE_S) or {})
                true.send(received[-1])
                host.send(true.receive(PATIENCE_S) or {})
                received.append(host.receive(PATIENCE_S) or {})

        thread = threading.Thread(target=stand_between)
        thread.start()
        seen = fingerprint_of(ssl.PEM_cert_to_DER_cert(own.cert))
        forged = replace(token, port=listener.getsockname()[1], fingerprint=seen)
        refused(forged, "does not know the secret")
        thread.join(PATIENCE_S)
    assert [set(each) for each in received] == [{"for", "id", "nonce"}, set()]
    assert cluster.sessions.empty()


def test_another_version_is_refused_before_the_token_is_used(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = cluster.token()
    with monkeypatch.context() as patch:
        # The launcher and the host are one process here: they ask in this order.
        versions = iter(["0.1.0, code 1", "0.1.0, code 2"])
        patch.setattr(join_link, "own_version", lambda: next(versions))
        refused(token, r"pipespec here is 0\.1\.0, code 2, .* install the same on all hosts")
    join(token)[1].close()


def test_connections_without_a_token_are_closed(cluster: Cluster) -> None:
    where = (cluster.server.address, cluster.server.port)
    for greeting in (b"", b"\0" * 100, b"GET / HTTP/1.1\r\n\r\n"):
        with (
            socket.create_connection(where, PATIENCE_S) as stranger,
            suppress(OSError),  # it may have closed already
        ):
            stranger.sendall(greeting)
            stranger.shutdown(socket.SHUT_WR)
            assert len(stranger.recv(100)) <= 7  # an alert of TLS
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    deep, long = b"[" * 10_000 + b"\n", b"1" * 2**18
    for said in (b"{}\n", b"\n", deep, long, b'{"for": 1, "id": [], "nonce": null}\n'):
        with (
            socket.create_connection(where, PATIENCE_S) as plain,
            context.wrap_socket(plain) as stranger,
            stranger.makefile("rb") as lines,
        ):
            assert set(json.loads(lines.readline())) == {"version", "nonce"}
            with suppress(OSError):
                stranger.sendall(said)
                assert lines.readline() == b""
    assert cluster.sessions.empty()
    join(cluster.token())[1].close()


def test_a_name_that_is_taken_gets_a_number(cluster: Cluster) -> None:
    links = [join(cluster.token(), name) for name in ("alpha", "beta", "beta", LOCAL)]
    names = [admission.name for admission, _ in links]
    assert names == ["alpha-2", "beta", "beta-2", f"{LOCAL}-2"]
    for _, link in links:
        link.close()


def test_an_address_that_is_none_is_refused_before_the_token_is_used(cluster: Cluster) -> None:
    token = cluster.token()
    with pytest.raises(HostFailed, match=r"address is '10\.0\.0\.256', which .* --address"):
        enter(token, "beta", ["cpu"], "10.0.0.256")
    join(token)[1].close()


def test_a_host_that_leaves_before_the_cluster_begins_is_waited_for_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deployment = decide(compose(["cluster.stages=2", "cluster.devices=[cpu]"]))
    monkeypatch.setattr(
        host_admission, "measured", lambda host, *_: MeasuredHost((Worker(host.workers[0]),), {})
    )
    tokens: queue.SimpleQueue[Token] = queue.SimpleQueue()
    left = threading.Event()

    def on_log(name: str, sentence: str) -> None:
        if name == "waiting":
            tokens.put(Token.decode(sentence.split()[-1]))
        elif (name, sentence) == ("early", "it has left before the cluster began"):
            left.set()

    made = host_admission.HostAdmission(
        JoinOptions(hosts=3), replace(deployment, open_to=ADDRESS), on_log
    )
    found: list[Deployment] = []
    problem = deployment.placement.problem
    with made.server, ExitStack() as stack:
        thread = threading.Thread(
            target=lambda: found.append(made.await_hosts(deployment, problem))
        )
        thread.start()
        early = join(tokens.get(timeout=PATIENCE_S), "early")[1]
        early.send({"leave": True})
        assert left.wait(PATIENCE_S)
        for name in ("beta", "gamma"):
            link = join(tokens.get(timeout=PATIENCE_S), name)[1]
            stack.callback(link.close)
        thread.join(PATIENCE_S)
    assert [host.name for host in found[0].joined] == ["beta", "gamma"]
    early.close()


# --- programs ------------------------------------------------------------------------------------


def test_a_program_runs_on_the_host_as_if_over_ssh(
    joined: tuple[JoinedHost, HostSession, list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, session, _ = joined
    monkeypatch.setattr(join_client, "PROGRAMS", ("tests.helpers.echo",))
    data = os.urandom(3 * 2**20)
    line = ssh.command(session.host, "tests.helpers.echo", "7")
    done = subprocess.run(line, input=data, capture_output=True, timeout=PATIENCE_S)
    assert done.stdout == data
    assert done.stderr == b"echoed\n"
    assert done.returncode == 7


def test_a_program_ends_with_the_process_that_started_it(
    joined: tuple[JoinedHost, HostSession, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, session, _ = joined
    monkeypatch.setattr(join_client, "PROGRAMS", ("tests.helpers.echo",))
    line = ssh.command(session.host, "tests.helpers.echo", "0")
    pipe = subprocess.PIPE
    with subprocess.Popen(line, stdin=pipe, stdout=pipe) as process:
        assert process.stdin and process.stdout
        process.stdin.write(b"hello")
        process.stdin.flush()
        assert process.stdout.read(5) == b"hello"
        assert host._programs
        process.kill()
    until(lambda: not host._programs, PATIENCE_S)


def test_only_programs_of_pipespec_run_on_the_host(
    joined: tuple[JoinedHost, HostSession, list[str]],
) -> None:
    _, session, _ = joined
    with pytest.raises(HostFailed, match="No module named timeit for hosts that join"):
        ssh.run_module(session.host, "timeit", timeout=PATIENCE_S)


def test_a_program_on_a_host_that_has_left_fails_with_the_remedy(cluster: Cluster) -> None:
    admission, link = join(cluster.token())
    with JoinedHost(admission, link, lambda _: None) as host:
        thread = threading.Thread(target=host.run)
        thread.start()
        session = cluster.sessions.get(timeout=PATIENCE_S)
        host.leave()
        thread.join(PATIENCE_S)
    until(lambda: not cluster.server._sessions)
    with pytest.raises(HostFailed, match=r"^beta: it has left; run `pipespec join` there again"):
        ssh.run_module(session.host, "pipespec.cluster.agent", timeout=PATIENCE_S)
    with pytest.raises(join_link.Refused, match="this host has left"):
        admission.connect(join_link.RETURN)


def test_a_host_whose_connection_breaks_comes_back_by_itself(
    joined: tuple[JoinedHost, HostSession, list[str]],
) -> None:
    _, session, said = joined
    first = session._link
    assert first is not None
    first.end()
    until(lambda: session._link not in (None, first), PATIENCE_S)
    session.tell("welcome back")
    until(lambda: said == ["welcome back"], PATIENCE_S)
    assert session.lost_s == 0


def test_a_host_that_was_told_to_stay_does_not_leave_when_its_connection_breaks(
    joined: tuple[JoinedHost, HostSession, list[str]],
) -> None:
    host, session, said = joined
    # Else the launcher of this test would let it go at once.
    changed, session.changed = session.changed, threading.Event()
    host.leave()
    until(lambda: session.leaving, PATIENCE_S)
    session.leaving = False
    session.keep("it cannot leave yet: b holds too little memory")
    until(lambda: not host.leaving, PATIENCE_S)
    assert said == ["it cannot leave yet: b holds too little memory"]
    first = session._link
    assert first is not None
    first.end()
    until(lambda: session._link not in (None, first), PATIENCE_S)
    session.tell("welcome back")
    until(lambda: "welcome back" in said, PATIENCE_S)
    assert not session.leaving
    session.changed = changed


def test_hosts_are_let_go_when_the_cluster_ends() -> None:
    cluster, said = Cluster(), list[str]()
    with cluster.server:
        admission, link = join(cluster.token())
        with JoinedHost(admission, link, said.append) as host:
            thread = threading.Thread(target=host.run)
            thread.start()
            cluster.sessions.get(timeout=PATIENCE_S).leaving = True
            cluster.server.__exit__()
            thread.join(PATIENCE_S)
    assert said == ["the cluster has ended"]


def test_hosts_join_at_one_address_of_the_machine(cluster: Cluster) -> None:
    ours = [each for each in listening([os.getpid()]) if each.port == cluster.server.port]
    assert {each.address for each in ours if each.kind == "tcp"} == {ADDRESS}


def test_both_ends_show_that_they_live(
    joined: tuple[JoinedHost, HostSession, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection over which nothing was said for that long counts as broken."""
    host, session, _ = joined
    link, ours = session._link, host._link
    monkeypatch.setattr(host_session, "SILENCE_S", 2 * join_server.SIGN_OF_LIFE_S)
    monkeypatch.setattr(join_client, "SILENCE_S", 2 * join_server.SIGN_OF_LIFE_S)
    end = time.monotonic() + 4 * join_server.SIGN_OF_LIFE_S
    until(lambda: time.monotonic() > end)
    assert (session._link, host._link) == (link, ours)
