"""Hundreds of generated requests to a real server: none is a fault of its, and none stalls others.

They are drawn from one seed (`tests.helpers.http_cases`) and sent one after another, each on a
connection of its own, while a second client asks for /health all the time.
"""

import errno
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import pytest

from tests.helpers.http_cases import COMPLETIONS, KEY, Case, cases
from tests.helpers.sandbox import Sandbox
from tests.helpers.serving import Server
from tests.helpers.stalls import Stall, longest, watching

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
COUNT, LONG_COUNT, SEED = 150, 1000, 35
NAME = "default"
SETTINGS = ("cluster.stages=1", "cluster.devices=[cpu]", "model.context=64", "model.dtype=float32")
CONTROL = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0.9, "seed": 3}
# A reply that takes longer does not come.
REPLY_S = 30.0
# A failure in the words of each dialect.
FAILED = re.compile(
    rb'"type":"(server_error|api_error)"|"code":"server_error"| 200 .*\{"error":"', re.S
)
# How long a request may keep the server from answering others, beyond what the machine does idle.
STALL_S = 0.05
BASELINE_S = 2.0
# A stall that was caused by a request is there each time that it is sent.
TIMES = 3
SHOWN, SUSPECTS = 10, 30
# Of the reply proper: "100 Continue" may come before it.
STATUS = re.compile(rb"(?:HTTP/1\.1 1\d\d .*\r\n\r\n)?HTTP/1\.[01] (\d{3}) ")


@dataclass
class Sent:
    """A case and what came of it; `status` None: nothing, or no HTTP."""

    case: Case
    status: int | None
    reply: bytes
    began_ns: int
    ended_ns: int

    def __str__(self) -> str:
        return f"{self.status} to {self.case.name}: {self.reply[-300:]!r}"


@dataclass
class Fuzzed:
    """The run of all cases.

    Attributes:
        texts: of the control request, before and after.
        baseline_s: the longest stall before the first case.
        stalls: the cases that stalled the server, and for how long, the longest first.
        log: what server and cluster wrote.
        running: whether the server still ran.
    """

    sent: list[Sent] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    baseline_s: float = 0.0
    stalls: list[tuple[float, Case]] = field(default_factory=list)
    log: str = ""
    running: bool = False


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory, long: bool) -> Iterator[Fuzzed]:
    with Sandbox(tmp_path_factory.mktemp("fuzz")) as place:
        server = Server(place, "--api-key", KEY, *SETTINGS)
        server.http.headers["X-Api-Key"] = KEY
        yield send_all_cases(place, server, LONG_COUNT if long else COUNT)


def send_all_cases(place: Sandbox, server: Server, count: int) -> Fuzzed:
    """Send so many cases and end the server."""
    made, written = Fuzzed(), []
    stderr = server.process.stderr
    # A full pipe would block a server that logs much.
    reader = threading.Thread(target=lambda: written.extend(stderr))
    reader.start()
    made.texts.append(control(server))
    with watching(server.url, server.process.pid) as stalls:
        time.sleep(BASELINE_S)
        began_ns = time.monotonic_ns()
        for case in cases(count, SEED):
            made.sent.append(send(server, case))
    made.baseline_s = longest(stalls, 0, began_ns)
    made.stalls = stalled(server, stalls, made)
    made.texts.append(control(server))
    made.running = server.process.poll() is None
    server.end()
    reader.join()
    made.log = "".join(written) + place.log(NAME)
    return made


def control(server: Server) -> str:
    reply = server.http.post(COMPLETIONS, json=CONTROL).raise_for_status()
    return str(reply.json()["choices"][0]["text"])


def shut(connection: socket.socket) -> None:
    """Send no more."""
    try:
        connection.shutdown(socket.SHUT_WR)
    except OSError as error:  # the server has closed the connection; this is no ConnectionError
        if error.errno != errno.ENOTCONN:
            raise


def send(server: Server, case: Case) -> Sent:
    """Send a case and read until the server closes the connection, or the first reply is whole."""
    host, port = server.url.removeprefix("http://").split(":")
    began_ns, reply = time.monotonic_ns(), bytearray()
    with socket.create_connection((host, int(port)), timeout=REPLY_S) as connection:
        # It may refuse before it has read all, and close the connection.
        with suppress(ConnectionError):
            connection.sendall(case.sent)
            if case.half:
                shut(connection)
        with suppress(ConnectionError, TimeoutError):
            while piece := connection.recv(1 << 16):
                reply += piece
    found = STATUS.match(reply)
    status = int(found[1]) if found else None
    return Sent(case, status, bytes(reply), began_ns, time.monotonic_ns())


def stalled(server: Server, stalls: list[Stall], made: Fuzzed) -> list[tuple[float, Case]]:
    """The cases that stall the server, each time that they are sent."""
    found = [(longest(stalls, sent.began_ns, sent.ended_ns), sent.case) for sent in made.sent]
    for _ in range(TIMES - 1):
        found = [(s, case) for s, case in found if s > STALL_S + made.baseline_s]
        found = sorted(found, key=lambda suspect: -suspect[0])[:SUSPECTS]
        with watching(server.url, server.process.pid) as stalls:
            again = [send(server, case) for _, case in found]
        found = [
            (min(stall_s, longest(stalls, sent.began_ns, sent.ended_ns)), case)
            for (stall_s, case), sent in zip(found, again, strict=True)
        ]
    return [(s, case) for s, case in found if s > STALL_S + made.baseline_s]


def told(items: list[Any]) -> str:
    return "\n".join([f"{len(items)}:", *map(str, items[:SHOWN])])


def test_no_request_gets_a_server_error(fuzzed: Fuzzed) -> None:
    assert len(fuzzed.sent) in (COUNT, LONG_COUNT)
    wrong = [
        sent
        for sent in fuzzed.sent
        # Also of streams, which have begun with 200.
        if ((sent.status or 0) >= HTTPStatus.INTERNAL_SERVER_ERROR or FAILED.search(sent.reply))
        # Documented: the cluster does not answer now; it says when to ask again.
        and not (sent.status == HTTPStatus.SERVICE_UNAVAILABLE and b"retry-after" in sent.reply)
    ]
    assert not wrong, told(wrong)


def test_every_complete_request_is_answered(fuzzed: Fuzzed) -> None:
    silent = [sent for sent in fuzzed.sent if sent.status is None and not sent.case.half]
    assert not silent, told(silent)


def test_refusals_have_a_reason_in_one_sentence(fuzzed: Fuzzed) -> None:
    wrong = []
    for sent in fuzzed.sent:
        head, _, body = sent.reply.partition(b"\r\n\r\n")
        if sent.status == HTTPStatus.BAD_REQUEST and b"application/json" in head:
            error = json.loads(body)["error"]
            message = error if isinstance(error, str) else error["message"]  # Ollama's
            wrong += [] if message.strip().endswith((".", "?", "!")) else [message]
    assert not wrong, told(wrong)


def test_neither_tracebacks_nor_keys_are_logged(fuzzed: Fuzzed) -> None:
    assert "Traceback" not in fuzzed.log, fuzzed.log[-3000:]
    assert KEY not in fuzzed.log


def test_cluster_generates_the_same_text_afterwards(fuzzed: Fuzzed) -> None:
    assert fuzzed.running
    before, after = fuzzed.texts
    assert before == after


def test_no_request_stalls_another_client(fuzzed: Fuzzed) -> None:
    slow = [f"{stall_s * 1e3:.0f} ms: {case.name}" for stall_s, case in fuzzed.stalls]
    limit_ms = (STALL_S + fuzzed.baseline_s) * 1e3
    assert not slow, f"limit {limit_ms:.0f} ms; {told(slow)}"
