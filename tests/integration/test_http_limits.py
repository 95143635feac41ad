"""What clients may send, and hold open, before and after their key is checked."""

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from pipespec.client import registry
from pipespec.client.model_info import ModelInfo
from pipespec.controller.embedded_redis import EmbeddedRedis
from tests.helpers.log import head_of
from tests.helpers.sandbox import PATIENCE_S, Sandbox
from tests.helpers.scenes import NAMESPACE, cluster_of
from tests.helpers.serving import Server, serving

pytestmark = pytest.mark.slow
NAME = "lab"
# As large models have, so that nothing here is refused for its length alone.
CONTEXT = 131072
KEY = "sesame"
MOST_HEADERS = 8192


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, demo: ModelInfo) -> Iterator[Sandbox]:
    """A cluster that servers take to be up: its registry entry, its Redis and a test's head."""
    folder = tmp_path_factory.mktemp("limits")
    with pytest.MonkeyPatch.context() as patch, EmbeddedRedis() as redis:
        patch.setenv("XDG_STATE_HOME", str(folder))
        with head_of(redis, NAMESPACE), registry.claim(NAME), Sandbox(folder) as place:
            registry.publish(cluster_of(redis, replace(demo, context=CONTEXT)))
            yield place


@pytest.fixture(scope="module")
def guarded(place: Sandbox) -> Iterator[Server]:
    """A server with a key and short timeouts."""
    limits = ("--limit", "header_timeout=1", "--limit", "body_timeout=1")
    limits = (*limits, "--limit", f"max_header_bytes={MOST_HEADERS}")
    with serving(place, "--on", NAME, "--api-key", KEY, *limits) as server:
        yield server


def connected(server: Server) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


def sent(server: Server, *parts: bytes) -> bytes:
    """All that a server says to what is sent, until it ends the connection."""
    said = b""
    # It may end the connection while more is sent.
    with connected(server) as connection, suppress(BrokenPipeError, ConnectionResetError):
        for part in parts:
            connection.sendall(part)
        while more := connection.recv(2**16):
            said += more
    return said


def heard(connection: socket.socket, end: bytes) -> bytes:
    """What a server says up to this end."""
    said = b""
    while end not in said:
        said += connection.recv(2**16)
    return said


def sentence(reply: bytes) -> str:
    """The message of the one reply that was sent."""
    head, _, body = reply.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    assert head.count(b"HTTP/1.1 ") == 1
    result: dict[str, Any] = json.loads(body)["error"]
    assert result.keys() == {"message", "type", "param", "code"}
    return str(result["message"])


START = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"
BODY = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"X-Api-Key: sesame\r\n"
)


@pytest.mark.parametrize(
    "parts",
    [
        [START, b"X-Long: ", *[b"a" * 2**16] * 200],
        [START, *[b"X-Many: a\r\n" * 1000] * 200],
        [START + b"X-Exact: " + b"a" * MOST_HEADERS + b"\r\n\r\n"],
        [b"GET /", *[b"a" * 2**16] * 200],
        [b"GET /health?", b"a" * MOST_HEADERS, b" HTTP/1.1\r\nHost: a\r\n\r\n"],
    ],
    ids=["a long header", "many headers", "one byte too many", "no end of a URL", "a long URL"],
)
def test_headers_beyond_the_limit_are_refused(guarded: Server, parts: list[bytes]) -> None:
    reply = sent(guarded, *parts)
    if reply:  # a client that still sends may miss it
        assert reply.startswith(b"HTTP/1.1 431 ")
        assert f"more than {MOST_HEADERS} bytes" in sentence(reply)
    assert parts[1:3] or reply


def test_trailers_beyond_the_limit_end_the_connection(guarded: Server) -> None:
    begun = BODY + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n"
    for parts in ([b"X-Long: ", *[b"a" * 2**16] * 200], [b"X-Many: a\r\n" * 1000] * 200):
        began = time.perf_counter()
        reply = sent(guarded, begun, *parts)
        assert not reply or reply.startswith(b"HTTP/1.1 431 ")
        assert time.perf_counter() - began < 1.5


def test_body_of_many_small_chunks_ends_the_connection(guarded: Server) -> None:
    begun = BODY + b"Transfer-Encoding: chunked\r\n\r\n"
    reply = sent(guarded, begun, b"1\r\na\r\n" * 3000)
    assert reply.startswith(b"HTTP/1.1 400 ")
    whole = begun + b"20\r\n%b\r\n" % (b" " * 32) * 500 + b"0\r\n\r\n"
    with connected(guarded) as connection:
        connection.sendall(whole)
        assert b"is no JSON" in heard(connection, b"}}")


def test_reply_to_a_body_that_is_not_read_arrives(guarded: Server) -> None:
    """Also if the client closes the connection after it, and sends all of the body first."""
    begun = BODY.replace(b"sesame", b"wrong") + b"Connection: close\r\n"
    reply = sent(guarded, begun + b"Content-Length: 8000000\r\n\r\n", *[b"a" * 10**6] * 8)
    assert reply.startswith(b"HTTP/1.1 401 ")
    assert "API key" in sentence(reply)


def test_incomplete_request_times_out(guarded: Server) -> None:
    begun = (BODY + b"Content-Length: 100\r\n\r\n{", b"", START, b"\r\n\r\n")
    with ThreadPoolExecutor(len(begun)) as clients:
        replies = [*clients.map(partial(sent, guarded), begun)]
    assert all(reply.startswith(b"HTTP/1.1 408 ") for reply in replies)
    assert "The body has not come within 1 s" in sentence(replies[0])
    for reply in replies[1:]:
        assert "No complete request has come within 1 s." in sentence(reply)
    with connected(guarded) as connection:  # which is kept alive
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        heard(connection, b"}")
        connection.sendall(START)
        assert connection.recv(2**16).startswith(b"HTTP/1.1 408 ")


def test_body_of_a_refused_request_times_out(guarded: Server) -> None:
    """The reply to a wrong key comes at once; what is sent after it holds nothing open."""
    begun = BODY.replace(b"sesame", b"wrong") + b"Content-Length: 1000000000\r\n\r\n"
    with connected(guarded) as connection:
        connection.sendall(begun)
        assert connection.recv(2**16).startswith(b"HTTP/1.1 401 ")
        began = time.perf_counter()
        with suppress(BrokenPipeError, ConnectionResetError):
            while time.perf_counter() - began < PATIENCE_S:
                connection.sendall(b"a" * 1000)
        assert time.perf_counter() - began < 10


def test_websocket_request_is_refused_in_one_sentence(guarded: Server) -> None:
    upgrade = b"Connection: Upgrade\r\nUpgrade: %s\r\nSec-WebSocket-Version: 13\r\n\r\n"
    reply = sent(guarded, START + upgrade % b"websocket")
    assert reply.startswith(b"HTTP/1.1 400 ")
    assert "does not speak WebSocket" in sentence(reply)
    # Who offers another version of HTTP is answered in this one.
    with connected(guarded) as connection:
        connection.sendall(START.replace(b"/v1/models", b"/health") + upgrade % b"h2c")
        assert connection.recv(100).startswith(b"HTTP/1.1 200 ")


@contextmanager
def idle(server: Server, count: int) -> Iterator[None]:
    """Connections on which half a request was sent."""
    with ExitStack() as stack:
        for _ in range(count):
            connection = stack.enter_context(closing(connected(server)))
            with suppress(BrokenPipeError, ConnectionResetError):  # it has made place already
                connection.sendall(START)
        yield


@pytest.mark.long
def test_idle_connections_of_an_address_are_evicted_for_its_next(place: Sandbox) -> None:
    most = ("--limit", "max_connections_per_address=4")
    asked = {"prompt": "a", "stream": True}
    with serving(place, "--on", NAME, *most) as server, ExitStack() as stack:
        server.http.close()
        with idle(server, 20), connected(server) as connection:
            connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
        # Streams make no place.
        body = json.dumps(asked).encode()
        for _ in range(4):
            connection = stack.enter_context(connected(server))
            head = BODY + b"Content-Length: %d\r\n\r\n" % len(body)
            connection.sendall(head + body)
            assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
        reply = sent(server, b"GET /health HTTP/1.0\r\n\r\n")
        assert reply.startswith(b"HTTP/1.1 503 ")
        assert "Too many connections" in sentence(reply)


def test_too_few_descriptors_are_refused_before_anything_starts(place: Sandbox) -> None:
    process = place.start("serve", "--on", NAME, "--port", "0", files=90)
    _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode != 0
    assert "may open 90 files, but a server needs 108 at least" in said
    assert said.count("\n") == 1


def test_client_without_key_cannot_fill_the_log(place: Sandbox) -> None:
    with serving(place, "--on", NAME, "--api-key", "sesame") as server:
        for _ in range(30):
            sent(server, b"nonsense\r\n\r\n")
            sent(server, START + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
            assert server.http.get("/v1/models").status_code == 401
        server.end()
        lines = server.process.stderr.read().splitlines()
    assert len(lines) <= 1, lines
