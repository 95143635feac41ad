"""A server with a scripted cluster: requests that wait, that fail, and that are too many."""

import asyncio
import json
import re
import signal
import stat
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest

from pipespec.client.registry import RunningCluster
from pipespec.controller.redis_connection import RedisConnection
from pipespec.core import GRAMMAR, NO_MEMORY, NOT_FINITE
from pipespec.errors import PipespecError
from pipespec.server import response_stream
from tests.helpers.log import head_of
from tests.helpers.scenes import NAMESPACE, Scene, cluster_of, play, run_server

ASKED: dict[str, Any] = {"prompt": "Once upon a time", "stream": True, "max_tokens": 5}


def test_waiting_stream_sends_keepalives(redis, demo, monkeypatch):
    monkeypatch.setattr(response_stream, "KEEPALIVE_S", 0.05)
    word = demo.tokenizer.encode(" king")[0]

    async def story(scene: Scene) -> None:
        async with scene.http.stream("POST", "/v1/completions", json=ASKED) as reply:
            lines = (line async for line in reply.aiter_lines() if line)
            assert [await anext(lines), await anext(lines)] == [": waiting"] * 2
            request, length = await scene.taken()
            scene.say(request, length, word)
            scene.finish(request, "length")
            received = [line async for line in lines if line != ": waiting"]
        *chunks, done = (line.removeprefix("data: ") for line in received)
        assert done == "[DONE]"
        texts = [json.loads(chunk)["choices"][0]["text"] for chunk in chunks]
        assert "".join(texts) == demo.tokenizer.decode([word])

    play(redis, demo, story)


def test_failure_during_a_stream_is_an_event_before_the_end(redis, demo):
    async def story(scene: Scene) -> None:
        async with scene.http.stream("POST", "/v1/completions", json=ASKED) as reply:
            request, length = await scene.taken()
            scene.say(request, length, 300)
            scene.finish(request, "cancelled")
            lines = [line async for line in reply.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        error = json.loads(lines[-2].removeprefix("data: "))["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert "cancelled by another client" in error["message"]
        for reason, status, kind, code in (
            ("cancelled", 500, "server_error", None),
            (GRAMMAR, 400, "invalid_request_error", "grammar_failed"),
            (NO_MEMORY, 500, "server_error", None),
            (NOT_FINITE, 500, "server_error", "not_finite"),
        ):
            whole = ASKED | {"stream": False}
            asking = asyncio.ensure_future(scene.http.post("/v1/completions", json=whole))
            request, _ = await scene.taken()
            scene.finish(request, reason)
            reply = await asking
            error = reply.json()["error"]
            assert (reply.status_code, error["type"], error["code"]) == (status, kind, code)
        assert "logits are not finite" in error["message"]
        assert (await scene.http.get("/load")).json() == {"server_load": 0}
        unknown = await scene.http.post("/requests/7/cancel")
        assert unknown.status_code == 404
        assert unknown.json()["error"]["message"] == "There is no request 7."

    play(redis, demo, story)


def test_full_queue_refuses_until_an_answer_starts(redis, demo):
    async def story(scene: Scene) -> None:
        async with scene.http.stream("POST", "/v1/completions", json=ASKED) as first:
            assert first.status_code == 200
            refused = await scene.http.post("/v1/completions", json=ASKED)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            error = refused.json()["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
            request, length = await scene.taken()
            scene.say(request, length, 300)
            lines = aiter(first.aiter_lines())
            await anext(lines)
            async with scene.http.stream("POST", "/v1/completions", json=ASKED) as second:
                assert second.status_code == 200
            # Whoever has left holds no place.
            while (await scene.http.get("/load")).json() != {"server_load": 1}:
                pass
            async with scene.http.stream("POST", "/v1/completions", json=ASKED) as third:
                assert third.status_code == 200

    play(redis, demo, story, max_queued_requests=1)


def test_access_log_has_a_line_for_each_request_and_no_text(redis, demo, capsys):
    async def story(scene: Scene) -> None:
        key = {"X-Api-Key": "sesame"}
        for ends in (True, False):
            async with scene.http.stream(
                "POST", "/v1/completions?secret", json=ASKED, headers=key
            ) as reply:
                request, length = await scene.taken()
                scene.say(request, length, 300, 301)
                if ends:
                    scene.finish(request, "length")
                    await reply.aread()
                else:
                    await anext(aiter(reply.aiter_lines()))
        while (await scene.http.get("/load", headers=key)).json() != {"server_load": 0}:
            pass
        await scene.http.get("/no%0Athing", headers=key | {"X-Request-Id": "mine"})
        await scene.http.get("/load", headers={"X-Api-Key": "wrong"})

    keys = {"api_keys": ("other", "sesame"), "key_names": ("key-1", "alice")}
    play(redis, demo, story, access_log=True, **keys)
    logged = capsys.readouterr().err.splitlines()
    lines = [line for line in logged if not re.search(r" /load 200 | /health ", line)]
    asked = r"POST /v1/completions 200 key=alice seconds=\d\.\d{3} request=\d+ prompt=5 answer=2"
    for line, expected in zip(
        lines,
        (
            rf"req_\w+ {asked} end=length",
            rf"req_\w+ {asked} end=abort",
            r"mine GET /no%0Athing 404 key=alice seconds=\d\.\d{3}",
            r"req_\w+ GET /load 401 key=- seconds=\d\.\d{3}",
        ),
        strict=True,
    ):
        assert re.fullmatch(rf"20[0-9T:.+-]+ {expected}", line), line


def test_token_ids_are_kept_in_the_folder_that_the_user_names(redis, demo, tmp_path):
    """But for those of a client that gives a salt of its own."""
    prompts = []

    async def story(scene: Scene) -> None:
        for more in ({}, {"cache_salt": "mine"}, {}):
            asking = asyncio.create_task(scene.http.post("/v1/completions", json=ASKED | more))
            request, length = await scene.taken()
            prompts.append(length)
            scene.say(request, length, 300, 301)
            scene.say(request, length + 2, 302)
            scene.finish(request, "length")
            assert (await asking).status_code == 200

    folder = tmp_path / "kept"
    play(redis, demo, story, answers=str(folder))
    (file,) = folder.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["answer"] for line in lines] == [[300, 301, 302]] * 2
    assert [len(line["prompt"]) for line in lines] == [prompts[0], prompts[2]]
    assert {line["target"] for line in lines} == {demo.target}


def test_requests_are_refused_until_the_cluster_is_ready(redis, demo):
    key = {"X-Api-Key": "sesame"}
    cluster = LateCluster()

    async def script(http: httpx2.AsyncClient) -> None:
        health = await http.get("/health")
        assert (health.status_code, health.headers["Retry-After"]) == (503, "1")
        for ask in (http.get("/v1/models"), http.post("/v1/completions", json=ASKED)):
            assert (await ask).status_code == 401
        for ask in (
            http.get("/v1/models", headers=key),
            http.post("/v1/completions", json=ASKED, headers=key),
            http.post("/metrics", headers=key),
            http.get("/no/such/route", headers=key),
        ):
            reply = await ask
            assert (reply.status_code, reply.headers["Retry-After"]) == (503, "1")
            assert reply.json()["error"] == {
                "message": "The cluster loads; try again in a moment.",
                "type": "server_error",
                "param": None,
                "code": "not_ready",
            }
        assert (await http.get("/metrics")).status_code == 401
        assert up(await http.get("/metrics", headers=key)) == 0
        with head_of(redis, NAMESPACE):
            cluster.running = cluster_of(redis, demo)
            while (await http.get("/health")).status_code != 200:
                pass
            assert up(await http.get("/metrics", headers=key)) == 1
            assert (await http.get("/v1/models", headers=key)).json()["data"][0]["id"] == "demo"
            signal.raise_signal(signal.SIGTERM)

    assert run_server(cluster.watch, script, api_keys=("sesame",)) == (None, [cluster.running])


def test_signal_ends_a_server_whose_cluster_is_loading():
    async def script(_: httpx2.AsyncClient) -> None:
        signal.raise_signal(signal.SIGTERM)

    assert run_server(LateCluster().watch, script) == (signal.SIGTERM, [])


def test_health_says_that_the_log_cannot_be_written(redis, demo):
    async def story(scene: Scene) -> None:
        with RedisConnection(redis.url) as pipe:
            for replicas, status in ((1, 503), (0, 200)):
                pipe.call("CONFIG", "SET", "min-replicas-to-write", replicas)
                reply = await scene.http.get("/health")
                assert reply.status_code == status
                assert status == 200 or "refuses writes" in reply.json()["error"]["message"]

    play(redis, demo, story)


@pytest.mark.parametrize("ready", [False, True])
def test_failing_cluster_ends_the_server_with_its_reason(redis, demo, ready):
    cluster = LateCluster(cluster_of(redis, demo) if ready else None)

    async def script(http: httpx2.AsyncClient) -> None:
        while (await http.get("/version")).status_code != (200 if ready else 503):
            pass
        cluster.error = PipespecError("It was too small.")

    with pytest.raises(PipespecError, match=r"^It was too small\.$"):
        run_server(cluster.watch, script)


@dataclass
class LateCluster:
    """A cluster that becomes ready, or fails, when the test says so."""

    running: RunningCluster | None = None
    error: PipespecError | None = None

    def watch(self) -> RunningCluster | None:
        if self.error is not None:
            raise self.error
        return self.running


def up(reply: httpx2.Response) -> float:
    """What a reply with figures says of the cluster."""
    lines = reply.raise_for_status().text.splitlines()
    (line,) = [line for line in lines if line.startswith("pipespec_cluster_up{")]
    return float(line.rsplit(" ", 1)[1])
