import os
import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from pipespec.cluster.weights.server import MOST_UNPROVEN, WeightServer, tls_context, url_of
from pipespec.controller.certificate import Certificate
from pipespec.engine.checkpoint.parts.parts_file import BLOCK_BYTES, PartsFile, place_of
from pipespec.engine.checkpoint.parts.sources import RangeSource, Unavailable
from pipespec.errors import ModelError

ADDRESS = "127.0.0.2"
NUM_BLOCKS = 3
BLOB = os.urandom((NUM_BLOCKS - 1) * BLOCK_BYTES + 7)
NAME = "a file & more.gguf"


@pytest.fixture(scope="module")
def certificate() -> Certificate:
    return Certificate.make()


@pytest.fixture
def server(certificate: Certificate, tmp_path: Path) -> Iterator[WeightServer]:
    (tmp_path / NAME).write_bytes(BLOB)

    files = {NAME: PartsFile(tmp_path / NAME)}
    server = WeightServer(ADDRESS, certificate, files.get)
    yield server
    server.shutdown()
    server.server_close()


def source(server: WeightServer, certificate: Certificate, name: str = NAME) -> RangeSource:
    url = url_of(server.url, name)
    context = tls_context(certificate, server=False)
    found = RangeSource("beta", {NAME: url}, context)
    found.wait = lambda _: None
    return found


def part(block: int) -> bytes:
    return BLOB[slice(*place_of(block, len(BLOB)))]


def read(of: RangeSource, block: int = 0) -> bytes:
    return bytes(of.read(NAME, place_of(block, len(BLOB)), len(BLOB)))


def test_several_threads_read_blocks_as_they_are(server, certificate):
    beta = source(server, certificate)
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda block: read(beta, block), [*range(NUM_BLOCKS)] * 2)]
    assert b"".join(found) == BLOB * 2


@pytest.mark.parametrize("name", ["another.gguf", "../" + NAME, "."])
def test_only_weight_files_of_the_start_are_sent(name, server, certificate):
    with pytest.raises(ModelError, match=rf"beta at {ADDRESS} answers 404"):
        read(source(server, certificate, name))


@pytest.mark.parametrize(
    "asked",
    [(0, len(BLOB)), (1, BLOCK_BYTES), (0, 1), (len(BLOB), len(BLOB)), (2 * BLOCK_BYTES, 2**99)],
)
def test_only_whole_blocks_are_sent(asked, server, certificate):
    with pytest.raises(ModelError, match=rf"beta at {ADDRESS} answers 416"):
        source(server, certificate).read(NAME, asked, len(BLOB))


@pytest.mark.parametrize("why", ["never fetched", "changed on the disk"])
def test_blocks_that_are_not_as_recorded_are_not_sent(why, certificate, tmp_path):
    file = PartsFile.create(tmp_path / NAME, len(BLOB))
    for block in range(3 if why.startswith("changed") else 2):
        file.write(block, part(block))
    with file.path.open("r+b") as stream:
        stream.seek(2 * BLOCK_BYTES)
        stream.write(b"wrong")
    beta = source(WeightServer(ADDRESS, certificate, {NAME: file}.get), certificate)
    with pytest.raises(Unavailable, match="answers 404"):
        read(beta, 2)
    assert read(beta, 1) == part(1)
    assert PartsFile(file.path).absent() == [2]


def test_a_host_with_the_key_of_another_run_is_refused(server):
    with pytest.raises(Unavailable, match="CERTIFICATE_VERIFY_FAILED"):
        read(source(server, Certificate.make()))


@pytest.mark.parametrize("how", ["no certificate", "another certificate", "the certificate"])
def test_a_client_without_the_key_is_refused(how, server, certificate):
    """One that trusts any server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if how != "no certificate":
        key = certificate if how == "the certificate" else Certificate.make()
        key.load_into(context)
    with context.wrap_socket(socket.create_connection(server.server_address, 30)) as client:
        if how != "the certificate":
            with pytest.raises(ssl.SSLError, match="ALERT"):
                client.recv(1)  # what it asks for might find the connection closed
            return
        path = url_of("", NAME)
        client.sendall(f"GET {path} HTTP/1.1\r\nRange: bytes=0-{BLOCK_BYTES - 1}\r\n\r\n".encode())
        assert client.recv(12) == b"HTTP/1.1 206"
        assert client.cipher()[:2] == ("TLS_AES_256_GCM_SHA384", "TLSv1.3")  # type: ignore[index]


@pytest.mark.parametrize("message", [b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096)])
def test_other_protocols_are_closed_and_disturb_nothing(message, server, certificate):
    with socket.create_connection(server.server_address) as client:
        client.sendall(message)
        with suppress(OSError):  # it may be closed by now
            client.shutdown(socket.SHUT_WR)
        with suppress(ConnectionResetError):
            while client.recv(4096):  # at most a TLS alert
                pass
    assert read(source(server, certificate)) == part(0)


def test_more_strangers_than_it_has_threads_are_closed_and_hosts_come_after(server, certificate):
    with ExitStack() as stack:
        for _ in range(MOST_UNPROVEN):
            stack.enter_context(socket.create_connection(server.server_address))
        one_more = stack.enter_context(socket.create_connection(server.server_address, 2))
        assert one_more.recv(1) == b"", "it is closed long before the others are given up"
    assert read(source(server, certificate)) == part(0)


def test_it_listens_at_one_address(server, certificate):
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.server_address[1]))
    assert read(source(server, certificate)) == part(0)


def test_a_host_that_cannot_be_reached_is_one_sentence(certificate):
    context = tls_context(certificate, server=False)
    beta = RangeSource("beta", {NAME: f"https://{ADDRESS}:9"}, context)
    with pytest.raises(Unavailable) as failed:
        read(beta)
    assert str(failed.value) == (
        f"beta at {ADDRESS} did not send {NAME}, though asked 2 times: [Errno 111] Connection "
        "refused; correct its address or interface, and let firewalls admit TCP to it"
    )
