"""`pipespec serve` without --on: a cluster and its server as one command."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import chaos_streams, http_server
from benchmarks.chaos_streams import PROMPT
from pipespec.cli import detach
from pipespec.cli.detach import Launcher
from pipespec.cli.main import main
from pipespec.client import registry
from pipespec.errors import ConfigError
from pipespec.system.resources import resource_dir
from tests.helpers.imports import slow_imports
from tests.helpers.listening import listening
from tests.helpers.place import PATIENCE_S, Place
from tests.helpers.serving import MODEL, Server
from tests.helpers.waiting import until

pytestmark = pytest.mark.slow
SETTINGS = ("cluster.stages=2", "cluster.devices=[cpu]", "model.context=1024")
NAME = "default"
KEY = "a-key-that-nobody-logs"
LOADS = rf"{NAME}: the cluster loads; until it is ready http://127\.0\.0\.1:\d+ answers 503"
ASKED: dict[str, Any] = {"prompt": PROMPT, "model": MODEL, "temperature": 0.8}


@pytest.mark.timeout(600)  # it starts two clusters
def test_streams_outlive_what_dies_behind_the_server_and_nothing_is_left_at_the_end(
    place: Place,
) -> None:
    server = Server(place, "--api-key", KEY, *SETTINGS)
    server.http.headers["X-Api-Key"] = KEY
    assert (server.told["name"], server.told["models"]) == (NAME, [MODEL])
    door, keys = http_server.Place(server.told["url"]).door, {"X-Api-Key": KEY}
    asked = chaos_streams.bodies(streams=16, tokens=40)
    undisturbed = asyncio.run(chaos_streams.ask_all(door, asked, headers=keys))
    for kind in ("head", "redis"):  # a stage: test_serve.py
        streams = chaos_streams.struck(door, asked, kind, at=4, name=NAME, headers=keys)
        assert [each.text for each in streams] == [each.text for each in undisturbed]

    def refused() -> None:
        chaos_streams.kill("launcher", NAME)
        until(lambda: server.http.get("/health").status_code == 503)
        assert server.http.post("/v1/completions", json=ASKED).status_code == 503

    first = registry.find(NAME).owner
    streams = asyncio.run(chaos_streams.ask_all(door, asked, at=4, strike=refused, headers=keys))
    assert [each.text for each in streams] == [each.text for each in undisturbed]
    assert registry.find(NAME).owner != first
    assert len({each.text for each in streams}) == len(streams)
    # Where it is told, and nowhere else; the Redis of the cluster is a Unix socket.
    port = int(server.url.rsplit(":", 1)[1])
    mine = {(found.address, found.port) for found in listening([server.process.pid])}
    assert mine == {("127.0.0.1", port)}
    assert server.end() == 0
    until(lambda: not place.processes())
    assert left(place) == []
    assert server.process.stderr is not None
    said = server.process.stderr.read() + place.log(NAME)
    assert "the cluster's launcher has ended; it is started again" in said
    assert KEY not in said
    assert PROMPT not in said


def left(place: Place) -> list[str]:
    """What lies there, but for what torch keeps of its own."""
    return [name for name in place.files() if not name.startswith("torchinductor_")]


def test_a_cluster_that_cannot_start_is_one_sentence(place: Place) -> None:
    code, out, err = place.run("serve", "--port", "0", "model.target=/no/such/folder")
    assert (code, out) == (2, "")
    loads, failed = err.splitlines()
    assert re.fullmatch(LOADS, loads)
    assert failed.startswith("pipespec: ")
    assert "/no/such/folder" in failed
    assert left(place) == []


@pytest.mark.timeout(400)
def test_a_launcher_that_fails_again_and_again_is_given_up_and_what_it_kept_can_be_removed(
    place: Place,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in place.environment.items():
        monkeypatch.setenv(name, value)
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
    with pytest.raises(ConfigError, match=f"there is no model folder {model}") as failed:
        until(launcher.watch)
    again = f"{NAME}: the cluster's launcher has ended; it is started again"
    assert capsys.readouterr().err.splitlines() == [
        *(f"{NAME}: The cluster's launcher was ended by SIGKILL.", again),
        *(f"{NAME}: {failed.value}", again),
    ]
    launcher.end()
    until(lambda: not place.processes())
    # Nobody has ended it, so what was unfinished is there.
    assert [file for file in left(place) if file.startswith(NAME)] == [f"{NAME}.data"]
    assert main(["down", NAME]) == 0
    assert capsys.readouterr().out == f"{NAME} had ended already; what it left is removed.\n"
    assert left(place) == []


def test_an_end_while_it_loads_leaves_nothing(place: Place) -> None:
    process = place.start("serve", "--port", "0", *SETTINGS)
    assert process.stderr is not None
    assert re.fullmatch(LOADS, process.stderr.readline().strip())
    until(lambda: registry.entries())
    process.terminate()
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out, err) == (128 + signal.SIGTERM, "", "")
    until(lambda: not place.processes())
    assert left(place) == []


# --- one that says little, for several tests --------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Place, Server]]:
    place = Place(tmp_path_factory.mktemp("small"), uuid.uuid4().hex)
    server = Server(place, "cluster.stages=1", "model.context=64", "decode.max_new_tokens=2")
    yield place, server
    place.kill()


def test_it_imports_no_torch(small: tuple[Place, Server]) -> None:
    place, server = small
    port = server.url.rsplit(":", 1)[1]
    # The port is taken: everything was imported by then.
    argv = ("serve", "--on", NAME, "--port", port)
    assert slow_imports(*argv, code=2, environment=place.environment) == ["fastapi"]


@pytest.mark.timeout(400)
def test_the_description_is_true(small: tuple[Place, Server], tmp_path: Path) -> None:
    """Schemathesis asks what /openapi.json allows, and what it does not: no 5xx, and every reply
    has a shape that is described. What several fields together allow no description says."""
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
    assert "Tested: 12" in done.stdout


def test_killed_it_takes_its_cluster_along(small: tuple[Place, Server]) -> None:
    place, server = small
    server.process.kill()
    until(lambda: not place.processes(), what="processes were left")
    # An entry of a killed one counts for nothing.
    assert [name for name in left(place) if not name.startswith(NAME)] == []
