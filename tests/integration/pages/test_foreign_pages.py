"""What web pages of other origins reach of a server, in a real browser beside a real cluster."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from tests.helpers.browser import needs_chromium
from tests.helpers.sandbox import Sandbox
from tests.helpers.serving import MODEL, NAME, Server, serving

pytestmark = [pytest.mark.slow, needs_chromium]
NUM_TOKENS = 400
LONG: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": NUM_TOKENS,
    "temperature": 0,
    "extra_body": {"ignore_eos": True},
}
# Every way in which a page may send a request without being asked for leave first, and what of
# the replies it can read.
ATTACK = """async ([server, requests]) => {
    const readable = [];
    const attempt = async (path, options) => {
        try {
            const reply = await fetch(server + path, options);
            if (reply.type !== "opaque") readable.push([path, reply.status]);
        } catch (refused) {}
    };
    for (const mode of ["cors", "no-cors"])
        for (let i = 1; i <= requests; i++)
            await attempt(`/requests/${i}/cancel`, {method: "POST", mode});
    for (let i = 1; i <= requests; i++) navigator.sendBeacon(`${server}/requests/${i}/cancel`, "");
    for (const path of ["/", "/health", "/v1/models", "/metrics", "/load", "/openapi.json"])
        await attempt(path, {});
    const body = JSON.stringify({prompt: "a", max_tokens: 1});
    await attempt("/v1/completions", {method: "POST", body});
    await attempt("/v1/completions", {
        method: "POST", body, headers: {"Content-Type": "application/json"},
    });
    const events = new EventSource(server + "/events");
    await new Promise((resolve) => {
        events.onmessage = events.onopen = () => { readable.push(["/events", 200]); resolve(); };
        events.onerror = resolve;
    });
    events.close();
    // A sandboxed frame has the origin "null".
    const frame = document.createElement("iframe");
    frame.sandbox = "allow-scripts";
    const done = new Promise((resolve) => { window.onmessage = resolve; });
    frame.srcdoc = `<script>Promise.allSettled([...Array(${requests})].map((_, i) => fetch(
        "${server}/requests/" + (i + 1) + "/cancel", {method: "POST", mode: "no-cors"}
    ))).then(() => parent.postMessage("done", "*"))</script>`;
    document.body.append(frame);
    await done;
    return readable;
}"""


@pytest.fixture(scope="module")
def server(place: Sandbox) -> Iterator[Server]:
    with serving(place, "--on", NAME, "--allowed-hosts", "lan.test") as server:
        yield server


class _Blank(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>a page</title><body></body>")

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[str]:
    """The address of somebody else's page."""
    http = HTTPServer(("127.0.0.1", 0), _Blank)
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    try:
        yield f"http://evil.test:{http.server_port}"
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


@contextmanager
def page_of(browser: Any, url: str) -> Iterator[Any]:
    context = browser.new_context()
    try:
        page = context.new_page()
        page.goto(url)
        yield page
    finally:
        context.close()


def lan(server: Server) -> str:
    """The server's address under a name that other machines use for it."""
    return server.url.replace("127.0.0.1", "lan.test")


def test_foreign_page_cancels_nothing_and_reads_nothing(server, browser, elsewhere):
    with server.openai() as client, page_of(browser, elsewhere) as page:
        stream = client.completions.create(prompt="Once", stream=True, **LONG)
        pieces = iter(stream)
        next(pieces)
        assert page.evaluate(ATTACK, [lan(server), 8]) == []
        assert page.evaluate(ATTACK, [server.url, 8]) == []
        assert [piece.choices[0].finish_reason for piece in pieces][-1] == "length"
