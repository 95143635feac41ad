"""`pipespec serve` without --on: a cluster and its server as one command."""

import asyncio
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import openai
import pytest

from pipespec.cli import detach
from pipespec.cli.detach import Launcher
from pipespec.cli.main import main
from pipespec.client import registry
from pipespec.errors import ConfigError, Unreachable
from pipespec.system.folders import resource_dir
from tests.helpers.listening import listening
from tests.helpers.sandbox import PATIENCE_S, Sandbox
from tests.helpers.serving import MODEL, Server
from tests.helpers.waiting import until
from tools.rig import http_server
from tools.rig.http_streams import open_stream

pytestmark = pytest.mark.slow
SETTINGS = ("cluster.stages=2", "cluster.devices=[cpu]", "model.context=1024")
NAME = "default"
PROMPT = "Once upon a time there was a king who"
KEY = "a-key-that-nobody-logs"
LOADS = rf"{NAME}: the cluster loads; until it is ready http://127\.0\.0\.1:\d+ answers 503"
ASKED: dict[str, Any] = {"prompt": PROMPT, "model": MODEL, "temperature": 0.8}


async def read_all(
    server: Server, bodies: list[dict[str, Any]], at: int = 0, fault: Callable[[], None] = int
) -> list[str]:
    """The texts of streams that are read at once; `fault` is called once each has had `at`
    events."""
    connect = http_server.ServerAddress(server.announced["url"]).connect
    headers = {"X-Api-Key": KEY}
    opening = (open_stream(connect, "/v1/completions", body, headers) for body in bodies)
    streams = await asyncio.gather(*opening)
    while any(stream.num_events < at and not stream.ended.done() for stream in streams):
        await asyncio.sleep(0.02)
    assert not at or not any(stream.ended.done() for stream in streams), "ask for more tokens"
    await asyncio.to_thread(fault)
    await asyncio.gather(*(stream.ended for stream in streams))
    assert all(stream.complete for stream in streams)
    return [stream.text for stream in streams]


def complete() -> int:
    """The epoch of the cluster, once it has all its ranks; 0: not yet."""
    with suppress(ConfigError, Unreachable):  # it is recovering
        running = registry.find(NAME)
        if not running.owner.gone and len(http_server.rank_pids(running)) == running.num_ranks:
            return http_server.current_epoch(running)
    return 0


@pytest.mark.long
@pytest.mark.timeout(600)  # it starts two clusters
def test_streams_survive_killed_head_redis_and_launcher(place, long):
    server = Server(place, "--api-key", KEY, *SETTINGS)
    server.http.headers["X-Api-Key"] = KEY
    assert (server.announced["name"], server.announced["models"]) == (NAME, [MODEL])
    drawn = {"temperature": 0.8, "max_tokens": 96, "ignore_eos": True, "stream": True}
    bodies = [{"prompt": PROMPT, "seed": seed, **drawn} for seed in range(8 if long else 4)]
    undisturbed = asyncio.run(read_all(server, bodies))
    assert len(set(undisturbed)) == len(bodies)
    first = registry.find(NAME)

    def kill_launcher() -> None:
        os.kill(first.owner.pid, signal.SIGKILL)
        until(lambda: server.http.get("/health").status_code == 503)
        assert server.http.post("/v1/completions", json=ASKED).status_code == 503

    for kill in (  # a stage: test_serve.py
        lambda: os.kill(http_server.rank_pids(first)[0], signal.SIGKILL),
        lambda: os.kill(http_server.redis_pid(first), signal.SIGKILL),
        kill_launcher,
    ):
        until(complete)
        epoch = complete()
        assert asyncio.run(read_all(server, bodies, 4, kill)) == undisturbed
        until(complete)
        assert complete() != epoch
    assert registry.find(NAME).owner != first.owner
    # The server listens at the announced port alone; the Redis of the cluster is a Unix socket.
    port = int(server.url.rsplit(":", 1)[1])
    mine = {(found.address, found.port) for found in listening([server.process.pid])}
    assert mine == {("127.0.0.1", port)}
    assert server.end() == 0
    until(lambda: not place.processes())
    assert place.files() == []
    said = server.process.stderr.read() + place.log(NAME)
    assert "the cluster's launcher has ended; it is started again" in said
    assert place.log(NAME).count("is ready") > 1, "what was before the start is kept"
    assert KEY not in said
    assert PROMPT not in said


def test_cluster_that_cannot_start_is_one_sentence(place):
    code, out, err = place.run("serve", "--port", "0", "model.target=/no/such/folder")
    assert (code, out) == (2, "")
    assert err.startswith("pipespec: there is no model /no/such/folder")
    assert err.count("\n") == 1
    assert place.files() == []


@pytest.mark.long
@pytest.mark.timeout(400)
def test_repeatedly_failing_launcher_is_given_up(place, tmp_path, monkeypatch, capsys):
    place.enter(monkeypatch)
    monkeypatch.setattr(detach, "PAUSES_S", (0.0, 0.1, 0.2))
    model = tmp_path / "model"
    shutil.copytree(resource_dir("demo"), model)
    pair = [f"model.target={model / 'target'}", f"model.draft={model / 'draft'}"]
    launcher = Launcher(NAME, ["cluster.stages=1", "model.context=64", *pair], ours=True)
    first = launcher.await_ready()
    assert launcher.watch() == first
    model.rename(tmp_path / "away")
    os.kill(first.owner.pid, signal.SIGKILL)
    until(lambda: launcher.ended)
    with pytest.raises(ConfigError, match=f"there is no model {model}") as failed:
        until(launcher.watch)
    again = f"{NAME}: the cluster's launcher has ended; it is started again"
    assert capsys.readouterr().err.splitlines() == [
        *(f"{NAME}: The cluster's launcher was ended by SIGKILL.", again),
        *(f"{NAME}: {failed.value}", again),
    ]
    launcher.end()
    until(lambda: not place.processes())
    # Nobody has ended it, so what was unfinished is there.
    assert [file for file in place.files() if file.startswith(NAME)] == [f"{NAME}.data"]
    assert main(["down", NAME]) == 0
    assert capsys.readouterr().out == f"{NAME} had ended already; its files are removed.\n"
    assert place.files() == []


@pytest.mark.long
@pytest.mark.timeout(400)
def test_launcher_that_cannot_be_started_again_at_once_is_started_later(place, monkeypatch, capsys):
    place.enter(monkeypatch)
    monkeypatch.setattr(detach, "PAUSES_S", (0.0, 0.1, 0.2))
    launcher = Launcher(NAME, ["cluster.stages=1", "model.context=64"], ours=True)
    first = launcher.await_ready()
    os.kill(first.owner.pid, signal.SIGKILL)
    until(lambda: launcher.ended)
    start, refused = subprocess.Popen, iter([OSError(errno.ENOMEM, "no memory")])

    def start_later(*arguments: Any, **options: Any) -> Any:
        if (error := next(refused, None)) is not None:
            raise error
        return start(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", start_later)
    until(launcher.watch)
    assert launcher.await_ready().owner.pid != first.owner.pid
    assert "launcher cannot be started ([Errno 12] no memory)." in capsys.readouterr().err
    launcher.end()
    until(lambda: not place.processes())


@pytest.mark.long
@pytest.mark.timeout(400)
def test_down_ends_the_servers_and_their_cluster(place):
    server = Server(place, "cluster.stages=1", "model.context=1024")
    beside = Server(place, "--on", NAME)
    asked = {"prompt": "Once upon a time", "max_tokens": 1000, "extra_body": {"ignore_eos": True}}
    answer = iter(beside.openai().completions.create(model=MODEL, stream=True, **asked))
    next(answer)
    (seen,) = json.loads(place.run("status", "--json")[1])["clusters"]
    assert [each["rank"] for each in seen["processes"]] == [0, 1]
    assert {each["host"] for each in seen["processes"]} == {seen["host"]}
    mine = {process.pid for process in place.processes()}
    assert {each["pid"] for each in seen["processes"]} < mine

    code, out, err = place.run("down", NAME)

    assert (code, out, err) == (0, f"{NAME} has ended, and its server too.\n", "")
    with pytest.raises(openai.APIError, match="The server is shutting down"):
        list(answer)
    for each in (server, beside):
        assert "was asked to end" in each.process.communicate(timeout=PATIENCE_S)[1]
        assert each.process.returncode == 0
    until(lambda: not place.processes())
    assert place.files() == []


@pytest.mark.long
@pytest.mark.timeout(400)
def test_down_during_a_restart_pause_ends_the_server(place, monkeypatch):
    place.enter(monkeypatch)
    server = Server(place, "cluster.stages=1", "model.context=64")
    os.kill(registry.find(NAME).owner.pid, signal.SIGKILL)
    # The first start again comes at once; the second, which does not last either, a second later.
    until(lambda: registry.held(NAME) is not None)
    code, out, _ = place.run("down", NAME)
    assert (code, out) == (0, f"{NAME} has ended, and its server too.\n")
    assert server.process.wait(PATIENCE_S) in (0, 128 + signal.SIGTERM)
    until(lambda: not place.processes())


def test_signal_while_loading_leaves_nothing_behind(place):
    process = place.start("serve", "--port", "0", *SETTINGS)
    assert re.fullmatch(LOADS, process.stderr.readline().strip())
    until(lambda: registry.entries())
    process.terminate()
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out, err) == (128 + signal.SIGTERM, "", "")
    until(lambda: not place.processes())
    assert place.files() == []


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Sandbox, Server]]:
    with Sandbox(tmp_path_factory.mktemp("small")) as place:
        yield (
            place,
            Server(place, "cluster.stages=1", "model.context=64", "decode.max_new_tokens=2"),
        )


@pytest.mark.long
@pytest.mark.timeout(400)
def test_openapi_describes_requests_and_statuses(small, tmp_path):
    """Schemathesis asks what /openapi.json allows, and what it does not: no 5xx, and every status
    is described. What several fields together allow no description says."""
    url = f"{small[1].url}/openapi.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "run", url, "--no-color"),
            *("--max-examples", "3", "--generation-deterministic", "--request-timeout", "60"),
            *("--exclude-checks", "positive_data_acceptance"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    paths = small[1].http.get("/openapi.json").json()["paths"]
    assert f"Tested: {sum(map(len, paths.values()))}" in done.stdout


def test_killed_server_takes_its_cluster_along(small):
    place, server = small
    server.process.kill()
    until(lambda: not place.processes(), what="processes were left")
    # An entry of a killed one counts for nothing.
    assert [name for name in place.files() if not name.startswith(NAME)] == []
