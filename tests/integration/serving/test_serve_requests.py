"""Fields and headers of requests, from HTTP to a real cluster and back."""

import json
import re
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from pipespec.client import registry
from pipespec.controller.redis_connection import RedisConnection
from pipespec.controller.redis_keys import RedisKeys
from tests.helpers.sandbox import PATIENCE_S, Sandbox
from tests.helpers.serving import NAME, Server, serving

pytestmark = pytest.mark.slow
FIRST, SECOND = "first-key", "second-key"


@pytest.fixture(scope="module")
def private(place: Sandbox) -> Iterator[Server]:
    keys = ("--api-key", FIRST, "--api-key", SECOND)
    with serving(place, "--on", NAME, *keys) as server:
        yield server


def completed(server: Server, key: str = "", **fields: Any) -> dict[str, Any]:
    """The reply to a greedy completion of a few tokens."""
    body = {"max_tokens": 4, "temperature": 0} | fields
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    reply = server.http.post("/v1/completions", json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    return reply.json()


def cached(server: Server, key: str = "", **fields: Any) -> int:
    """How many tokens of a prompt were in KV already."""
    result = completed(server, key, **fields)["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert isinstance(result, int)
    return result


def long_prompt() -> str:
    """A new prompt, long enough to be shared."""
    return f"{uuid.uuid4()}: once upon a time there was a girl who went to the park with her dog."


def test_prefix_cache_is_shared_only_within_a_cache_salt(server):
    prompt = long_prompt()
    assert cached(server, prompt=prompt, cache_salt="one") < 16
    assert cached(server, prompt=prompt, cache_salt="one") > 16
    for salt in ({"cache_salt": "two"}, {}):
        assert cached(server, prompt=prompt, **salt) == 0
        assert cached(server, prompt=prompt, **salt) > 16
    assert cached(server, prompt=prompt, cache_salt=None) > 16, "null is as if it were left out"


def test_private_prefixes_are_not_shared_between_api_keys(server, private):
    prompt = long_prompt()
    assert cached(private, FIRST, prompt=prompt) == 0
    assert cached(private, FIRST, prompt=prompt) > 16
    assert cached(private, SECOND, prompt=prompt) == 0
    assert cached(private, SECOND, prompt=prompt, cache_salt="a") == 0
    assert cached(private, FIRST, prompt=prompt, cache_salt="a") == 0
    assert cached(private, FIRST, prompt=prompt, cache_salt="a") > 16
    assert cached(server, prompt=prompt) == 0
    # However the key is shown, it is the same.
    result = private.http.post(
        "/v1/completions", json={"prompt": prompt, "max_tokens": 1}, headers={"X-Api-Key": SECOND}
    ).json()
    assert result["usage"]["prompt_tokens_details"]["cached_tokens"] > 16


def test_redis_holds_nothing_comparable_with_an_api_key(place, private, monkeypatch):
    """Not even by who knows the key: the salt is made with a secret of the server."""
    monkeypatch.setenv("XDG_STATE_HOME", str(place.folder))
    running = registry.find(NAME)
    body = {"prompt": long_prompt(), "max_tokens": 400, "ignore_eos": True, "stream": True}
    headers = {"Authorization": f"Bearer {FIRST}"}
    with (
        RedisConnection(running.url) as pipe,
        private.http.stream("POST", "/v1/completions", json=body, headers=headers) as reply,
    ):
        shared = RedisKeys(running.namespace).shared(int(reply.headers["X-Pipespec-Request"]))
        asked, _ = json.loads(pipe.call("HGET", shared, "spec"))
    assert re.fullmatch("[0-9a-f]{64}", asked["cache_salt"])
    assert FIRST not in json.dumps(asked)


@pytest.mark.parametrize("key", [(), ("--api-key", FIRST)])
def test_reachable_server_without_api_key_warns_in_one_line(place, key):
    server = Server(place, "--on", NAME, "--host", "0.0.0.0", *key)
    assert server.http.get("/health").status_code == 200
    server.http.close()
    server.process.terminate()
    _, err = server.process.communicate(timeout=PATIENCE_S)
    expected = f"{server.url} may be reached from other machines and asks for no API key"
    assert err.count("\n") == err.count(expected) == int(not key)


def test_every_reply_has_a_request_id(server, private):
    good = {"prompt": "a", "max_tokens": 1}
    http = server.http
    replies = [
        http.get("/health"),
        http.get("/"),
        http.get("/page/main.js"),
        http.get("/metrics"),
        http.get("/nowhere"),
        http.put("/v1/models"),
        http.post("/v1/completions", json=good),
        http.post("/v1/completions", json=good | {"stream": True}),
        http.post("/v1/completions", json={"prompt": ""}),
        http.post("/v1/completions", content=b"{"),
        http.post("/v1/completions", json={"prompt": "a" * 40 * 2**20}),
        http.get("/health", headers={"Origin": "http://evil.test"}),
        http.get("/health", headers={"Host": "evil.test"}),
        private.http.get("/v1/models"),
    ]
    codes = [reply.status_code for reply in replies]
    assert codes == [200] * 4 + [404, 405, 200, 200, 400, 400, 413, 403, 403, 401]
    ids = [reply.headers["x-request-id"] for reply in replies]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch("req_[0-9a-f]{32}", each) for each in ids)


def test_only_valid_request_ids_of_clients_are_sent_back(server):
    def id_of(given: bytes) -> str:
        reply = server.http.get("/health", headers=[(b"X-Request-Id", given)])
        assert len(reply.headers.get_list("x-request-id")) == 1
        return str(reply.headers["x-request-id"])

    for given in (str(uuid.uuid4()), "req_1", "a:b/c=d@e+f.g-h", "x" * 128):
        assert id_of(given.encode()) == given
    for wrong in (b"", b"x" * 129, b"a b", b"<script>", b"\xe9", b"-a", b'"', b"a,b"):
        assert id_of(wrong).startswith("req_")
