"""Connections between hosts that send one another weights."""

from __future__ import annotations

import errno
import io
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pipespec.cluster import weight_links
from pipespec.cluster.weight_links import (
    _HEAD,
    DATA,
    HANDSHAKE_S,
    WAIT,
    LinkFailed,
    WeightLink,
    WeightServer,
    _answer,
)
from pipespec.controller.certificate import Certificate
from pipespec.errors import ModelError

ADDRESS = "127.0.0.2"
BLOB = os.urandom(3 * 2**20)


def read(start: int, stop: int, *, waits: bool = False, missing: bool = False) -> Iterator[bytes]:
    if missing:
        raise ModelError("the file ends at byte 0; fetch it again")
    for at in range(start, stop, 2**18):
        if waits:
            yield b""
        yield BLOB[at : min(at + 2**18, stop)]


@pytest.fixture(scope="module")
def certificate() -> Certificate:
    return Certificate.make()


@pytest.fixture
def server(certificate: Certificate) -> Iterator[WeightServer]:
    server = WeightServer(ADDRESS, certificate, read)
    yield server
    server.close()


@pytest.fixture
def link(server: WeightServer, certificate: Certificate) -> Iterator[WeightLink]:
    link = WeightLink(server.address, certificate)
    yield link
    link.close()


@pytest.mark.parametrize("waits", [False, True])
def test_bytes_arrive_as_they_are_over_connections_that_are_kept(
    waits: bool, link: WeightLink
) -> None:
    for start, stop in ((0, len(BLOB)), (7, 11), (5, 5), (2**18 - 1, 2**19 + 1)):
        found = b"".join(link.read(stop - start, start=start, stop=stop, waits=waits))
        assert found == BLOB[start:stop]
    assert len(link._open) == 1
    (secured,) = link._open
    cipher = secured.cipher()
    assert cipher is not None and cipher[:2] == ("TLS_AES_256_GCM_SHA384", "TLSv1.3")


def test_several_threads_read_at_once(link: WeightLink) -> None:
    found: list[bytes] = []

    def fetch() -> None:
        found.append(b"".join(link.read(len(BLOB), start=0, stop=len(BLOB))))

    threads = [threading.Thread(target=fetch) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert found == [BLOB] * 4


def test_what_the_host_cannot_read_is_its_sentence(link: WeightLink) -> None:
    with pytest.raises(ModelError, match=r"^the file ends at byte 0; fetch it again$"):
        list(link.read(5, start=0, stop=5, missing=True))
    assert b"".join(link.read(5, start=0, stop=5)) == BLOB[:5]


def test_a_host_with_the_key_of_another_run_is_refused(server: WeightServer) -> None:
    other = WeightLink(server.address, Certificate.make())
    with pytest.raises(LinkFailed, match="CERTIFICATE_VERIFY_FAILED"):
        list(other.read(5, start=0, stop=5))
    other.close()


@pytest.mark.parametrize("how", ["no certificate", "another certificate"])
def test_a_client_without_the_key_is_refused(
    how: str, server: WeightServer, certificate: Certificate, tmp_path: Path
) -> None:
    """One that trusts any server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if how == "another certificate":
        files = Certificate.make().write(tmp_path)
        context.load_cert_chain(files.cert, files.key)
    with (
        context.wrap_socket(socket.create_connection(server.address, 30)) as client,
        pytest.raises(ssl.SSLError, match="ALERT"),
    ):
        client.recv(1)  # what it asks for might find the connection closed
    # The same client with the key.
    files = certificate.write(tmp_path)
    context.load_cert_chain(files.cert, files.key)
    with context.wrap_socket(socket.create_connection(server.address, 30)) as client:
        client.sendall(b'{"start": 0, "stop": 5}\n')
        assert client.recv(_HEAD.size) == _HEAD.pack(DATA, 5)


@dataclass
class Answered:
    """A connection on which frames have come."""

    frames: bytes

    def makefile(self, _mode: str) -> io.BytesIO:
        return io.BytesIO(self.frames)


def frame(kind: int, payload: bytes) -> bytes:
    return _HEAD.pack(kind, len(payload)) + payload


@pytest.mark.parametrize(
    "wrong", [frame(DATA, b"123456"), frame(WAIT, b"12"), frame(7, b"12"), frame(7, b"")], ids=str
)
def test_only_bytes_that_were_asked_for_are_taken(wrong: bytes) -> None:
    answered: Any = Answered(frame(WAIT, b"") + frame(DATA, b"abc") + wrong)
    chunks = _answer(answered, 8)
    assert next(chunks) == b"abc"
    with pytest.raises(ConnectionError, match="it sends something else than was asked for"):
        next(chunks)
    answered = Answered(frame(WAIT, b"") + frame(DATA, b"abc") + frame(DATA, b"12345"))
    assert b"".join(_answer(answered, 8)) == b"abc12345"


def test_clients_without_the_key_take_no_room_of_those_that_have_it(
    server: WeightServer, certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_links, "MOST_UNPROVEN", 2)
    monkeypatch.setattr(weight_links, "MOST_PROVEN", 3)
    link = WeightLink(server.address, certificate)
    reading = [link.read(len(BLOB), start=0, stop=len(BLOB)) for _ in range(3)]
    rest = [len(BLOB) - len(next(each)) for each in reading]  # each on a connection of its own
    for _ in range(2):
        with pytest.raises(LinkFailed) as failed:
            list(link.read(5, start=0, stop=5))
        assert failed.value.reached
    with ExitStack() as stack:
        others = [
            stack.enter_context(socket.create_connection(server.address, 30)) for _ in range(3)
        ]
        assert others[2].recv(1) == b""
        assert [sum(map(len, each)) for each in reading] == rest
    link.close()


def test_closing_ends_a_handshake(server: WeightServer) -> None:
    with socket.create_connection(server.address, HANDSHAKE_S / 2) as client:
        server.close()
        with suppress(ConnectionResetError):
            assert client.recv(1) == b""


@pytest.mark.parametrize("message", [b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096)])
def test_other_protocols_are_closed_and_disturb_nothing(
    message: bytes, server: WeightServer, link: WeightLink
) -> None:
    with socket.create_connection(server.address) as client:
        client.sendall(message)
        with suppress(OSError):  # it may be closed by now
            client.shutdown(socket.SHUT_WR)
        with suppress(ConnectionResetError):
            while client.recv(4096):  # at most a TLS alert
                pass
    assert b"".join(link.read(5, start=0, stop=5)) == BLOB[:5]


def test_it_listens_at_one_address_until_it_is_closed(
    server: WeightServer, link: WeightLink
) -> None:
    port = server.address[1]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    list(link.read(5, start=0, stop=5))
    server.close()
    for _ in range(2):  # the connection that was open, then a new one
        with pytest.raises(LinkFailed):
            list(link.read(5, start=0, stop=5))


def test_a_host_that_cannot_be_reached_is_a_clause(certificate: Certificate) -> None:
    link = WeightLink((ADDRESS, 9), certificate)
    with pytest.raises(LinkFailed, match=os.strerror(errno.ECONNREFUSED)):
        list(link.read(5, start=0, stop=5))
    link.close()
