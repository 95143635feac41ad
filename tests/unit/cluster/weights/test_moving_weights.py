import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipespec.cluster.decide import decide
from pipespec.cluster.deployment.deployment import Deployment
from pipespec.cluster.deployment.rank_assignment import WeightsPending
from pipespec.cluster.host_link import calls
from pipespec.cluster.host_link.calls import lines_of
from pipespec.cluster.weights import distribution, host
from pipespec.cluster.weights.distribution import Peer as FarPeer
from pipespec.cluster.weights.distribution import WeightMoves, distribute_weights
from pipespec.cluster.weights.host import WeightHost
from pipespec.cluster.weights.plan import parts_needed
from pipespec.cluster.weights.server import url_of
from pipespec.config.compose import compose
from pipespec.config.hosts import Host as ConfiguredHost
from pipespec.config.hosts import own_name
from pipespec.controller.certificate import Certificate
from pipespec.engine.checkpoint.partial_checkpoint import repository_of
from pipespec.engine.checkpoint.parts.folder import entries, remove
from pipespec.errors import ConfigError, HostFailed, ModelError, RankFailed
from pipespec.system.folders import resource_dir
from pipespec.system.versions import own_version

NUM_LAYERS = 16  # of the demo's target
PATIENCE_S = 60.0


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    """A head, a stage on each of two hosts, and a spare on a third one."""
    hosts = [
        {"name": name, "address": f"10.0.0.{index}", "devices": ["cpu"] * (1 + (index == 1))}
        for index, name in enumerate(("alpha", "beta", "gamma"), 1)
    ]
    file = tmp_path / "hosts.yaml"
    file.write_text(yaml.safe_dump({"hosts": hosts, "draft": "alpha/0", "spares": 1}))
    return decide(compose([f"cluster={file}"]))


class Peer:
    """A host that answers nothing until it is ended, or during whose answer the user presses
    Ctrl-C."""

    interrupted: set[str] = set()  # noqa: RUF012
    asked = threading.Event()

    def __init__(self, name: str) -> None:
        self.name, self.parts, self.ended = name, set[str](), threading.Event()

    def call(self, do: str, **_: Any) -> None:
        if self.name in self.interrupted:
            raise KeyboardInterrupt
        self.asked.set()
        assert self.ended.wait(PATIENCE_S)
        raise HostFailed(f"{self.name}: it has ended, before {do}")

    def end(self) -> None:
        self.ended.set()


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def far(host: Any, *_: object) -> Iterator[Peer]:
        yield Peer(host.name)

    monkeypatch.setattr(distribution, "Peer", far)


@pytest.mark.usefixtures("hanging")
def test_the_end_of_a_cluster_stops_a_distribution(deployment):
    over = threading.Event()
    with ThreadPoolExecutor() as pool:
        moved = pool.submit(distribute_weights, deployment, over=over)
        assert Peer.asked.wait(PATIENCE_S)
        over.set()
        with pytest.raises(RankFailed, match="The cluster has ended"):
            moved.result(PATIENCE_S)


@pytest.mark.usefixtures("hanging")
def test_a_signal_does_not_wait_for_a_host_that_hangs(deployment, monkeypatch):
    monkeypatch.setattr(Peer, "interrupted", {"alpha"})
    with pytest.raises(KeyboardInterrupt):
        distribute_weights(deployment)


def test_lines_end_with_their_pipe_or_once_the_other_side_gives_no_sign_of_life(monkeypatch):
    monkeypatch.setattr(calls, "SILENCE_S", 0.01)
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as stream, os.fdopen(writer, "wb", buffering=0) as sink:
        sink.write(b"\none\n\na long ")
        lines = lines_of(stream)
        assert next(lines) == b"one"
        sink.write(b"line\n")
        assert [*lines] == [b"a long line"]  # silence
        sink.write(b"x\n")
        sink.close()
        assert [*lines_of(stream)] == [b"x"]


def test_a_host_listens_at_a_name_that_it_alone_can_resolve(monkeypatch):
    monkeypatch.setattr(host, "resolve", {"beta.internal": "127.0.0.1"}.__getitem__)
    made = Certificate.make()
    listening = WeightHost(lambda count: None).listen("beta.internal", None, asdict(made))
    assert listening.startswith("https://127.0.0.1:")


@pytest.mark.parametrize("said", [{"result": True}, {"error": "KeyError"}])
def test_a_host_that_does_not_tell_its_version_has_another_one(said, tmp_path):
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\necho '{json.dumps(said)}'\nread _\n")
    program.chmod(0o700)
    far = ConfiguredHost("beta", "127.0.0.2", "local", python=str(program))
    with (
        FarPeer(far, Certificate.make()) as peer,
        pytest.raises(HostFailed, match=r"^beta: pipespec there is .*; install the same on all"),
    ):
        peer.call("prepare")


def test_what_a_login_script_prints_is_ignored(tmp_path):
    lines = ("Welcome", "3", "{}", json.dumps({"version": own_version()}), '{"result": 7}')
    program = tmp_path / "python"
    said = "".join(f"echo '{each}'\n" for each in lines)
    program.write_text(f"#!/bin/sh\n{said}read _\n")
    program.chmod(0o700)
    far = ConfiguredHost("beta", "127.0.0.2", "local", python=str(program))
    with FarPeer(far, Certificate.make()) as peer:
        assert peer.call("prepare") == 7


def test_what_another_process_has_fetched_into_the_folder_is_not_fetched(tmp_path, monkeypatch):
    """Of hosts that share a file system, and of starts at once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    whole = resource_dir("demo") / "target"
    repository = asdict(replace(repository_of(whole, as_folder=True), path="/models/nowhere"))
    moved: list[int] = []
    alpha, *hosts = (WeightHost(moved.append) for _ in range(3))
    assert alpha.describe(str(whole)) is not None
    made = Certificate.make()
    url = alpha.listen("127.0.0.1", None, asdict(made))
    wanted = ("config.json", 0)
    source = {wanted[0]: url_of(url, wanted[0])}, [wanted]
    for each in hosts:
        assert not each.prepare(repository, ["0"])
        assert each.offer([wanted], [wanted]) == []
    assert not [entry for entry in entries() if entry.whole_bytes]  # it is not finished
    for each in hosts:
        assert each.fetch({"alpha": source}, asdict(made)) == {}
        assert each.offer([wanted], [wanted]) == [wanted]
    assert moved == [(whole / wanted[0]).stat().st_size]
    (entry,) = entries()
    assert entry.whole_bytes
    remove(entry)  # a distribution notices what is not here any more
    assert hosts[0].offer([wanted], [wanted]) == []
    (entry,) = entries()
    assert not entry.whole_bytes


@pytest.mark.parametrize("fails", [False, True])
def test_an_assignment_waits_for_its_weights_unless_they_cannot_be_moved(fails, deployment, caplog):
    ready, asked = threading.Event(), list[Deployment]()

    def distribute(changed: Deployment) -> None:
        asked.append(changed)
        assert ready.wait(PATIENCE_S)
        if fails:
            raise ModelError("no host has them")

    moves = WeightMoves(deployment, distribute)
    for _ in range(3):
        with pytest.raises(WeightsPending):
            moves.plan({"beta/0"})
    ready.set()
    moves._thread.join(PATIENCE_S)
    assert moves.plan({"beta/0"}) == deployment.assignment(deployment.without({"beta/0"}))
    (changed,) = asked
    assert [host.name for host in changed.hosts] == ["alpha", "gamma"]
    # The spare has the layers of the host that is gone.
    layers = {str(number) for number in range(NUM_LAYERS // 2, NUM_LAYERS)}
    assert layers <= parts_needed(changed, changed.hosts[1])["target"]
    assert not changed.fetched
    assert caplog.messages == ["weights of the new layout: no host has them"] * fails


def test_nothing_moves_for_too_few_workers_or_on_one_machine(deployment):
    moves = WeightMoves(deployment, lambda *_, **__: pytest.fail("nothing to move"))
    with pytest.raises(ConfigError):
        moves.plan({"alpha/1", "beta/0", "gamma/0"})
    alone = decide(compose(["cluster.stages=2", "cluster.spares=1", "cluster.devices=[cpu]"]))
    moves.use(alone)
    assert moves.plan({f"{own_name()}/1"}).workers[0] == f"{own_name()}/0"
