"""Starts that need the same folders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipespec.cluster.byte_channel import LocalChannel
from pipespec.cluster.weight_host import WeightHost
from pipespec.cluster.weight_locks import lock_folders
from pipespec.cluster.weight_peer import WeightPeer, on_this_machine
from pipespec.engine.checkpoint_parts.blueprint import Blueprint
from pipespec.engine.checkpoint_parts.folder_lock import RunLock
from pipespec.engine.checkpoint_parts.repository import ranges_of
from pipespec.errors import ModelError
from pipespec.system.folders import resource_dir

TARGET = resource_dir("demo") / "target"
NEEDS = {"target": {"0"}}


@pytest.fixture
def plan() -> Blueprint:
    return Blueprint.of(TARGET, as_folder=True)


@pytest.fixture
def peers(
    plan: Blueprint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[WeightPeer]]:
    """Two hosts with a cache each, which lack the model."""
    found, hosts = [], []
    described = plan.as_json()
    described["repository"]["path"] = "/models/nowhere"
    for name in ("beta", "the launcher"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
        hosts.append(WeightHost())
        hosts[-1].prepare("target", "/models/nowhere", described, ["0"])
        handlers = hosts[-1].handlers()
        found.append(WeightPeer(name, None, LocalChannel(handlers), hosts[-1].stop))
    yield found
    for host in hosts:
        host.unlock()


def folders(plan: Blueprint, tmp_path: Path) -> list[Path]:
    caches = (tmp_path / name / "pipespec" / "parts" for name in ("beta", "the launcher"))
    return [cache / plan.name for cache in caches]


@pytest.mark.parametrize("taken", [0, 1])
def test_a_start_that_waits_holds_nothing_and_says_so_once(
    taken: int, peers: list[WeightPeer], plan: Blueprint, tmp_path: Path
) -> None:
    own = folders(plan, tmp_path)
    other = RunLock(own[taken], "other", "gamma")
    assert other.owner == "gamma"
    sentences: list[str] = []
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        second = RunLock(own[1 - taken], "other", "gamma")  # so two starts do not wait for good
        assert second.owner == "gamma"
        second.release()
        if len(pauses) == 3:
            other.release()

    lock_folders([(peer, NEEDS) for peer in peers], sentences.append, pause)
    assert len(pauses) == len(set(pauses)) == 3
    (sentence,) = sentences
    assert sentence.startswith(f"{peers[taken].name}: process ")
    assert sentence.endswith(f" fetches into {own[taken]}; waiting until it has ended.")
    assert [peer.owners for peer in peers] == [{"target": peer.name} for peer in peers]
    assert [RunLock(each, "other", "gamma").owner for each in own] == [None, None]


def test_a_host_in_the_folder_of_another_one_offers_nothing_itself(
    plan: Blueprint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    described = plan.as_json()
    described["repository"]["path"] = "/models/nowhere"
    hosts = [WeightHost(), WeightHost()]
    for host, name in zip(hosts, ("the launcher", "beta"), strict=True):
        host.prepare("target", "/models/nowhere", described, ["0"])
        assert host.lock("target", "run", name) == {"owner": "the launcher"}
    assert not (plan.path / "config.json").exists()  # nobody has written before the locks
    found = [host.offer("target") for host in hosts]
    assert [each["lacks"].keys() for each in found] == [plan.headers.keys()] * 2
    assert found[0]["has"].keys() == plan.headers.keys()
    assert found[1]["has"] == {}
    for host in hosts:
        host.unlock()


def test_the_locks_of_the_launcher_end_after_what_it_fetches(
    plan: Blueprint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ending it only tells its threads to end."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    described = plan.as_json()
    described["repository"]["path"] = "/models/nowhere"
    with on_this_machine("alpha", None, {}) as peer:
        peer.call(
            "prepare", kind="target", path="/models/nowhere", blueprint=described, parts=["0"]
        )
        assert peer.lock("target", "run") is None
        peer.end()
        assert RunLock(plan.path, "other", "gamma").owner is None
    assert RunLock(plan.path, "other", "gamma").owner == "gamma"


def test_two_models_in_one_folder_are_fetched_by_the_same_host(
    plan: Blueprint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those who read what is fetched for either wait for it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("pipespec.cluster.weight_host.WAIT_S", 0)
    described = plan.as_json()
    described["repository"]["path"] = "/models/nowhere"
    host = WeightHost()
    for kind in ("target", "draft"):
        host.prepare(kind, "/models/nowhere", described, ["0"])
        assert host.lock(kind, "run", "beta") == {"owner": "beta"}
    assert host.offer("target") == host.offer("draft")
    (file,) = plan.headers
    first, second, third, *_ = ranges_of(plan.path / file).items()
    host.expect({"target": {file: [first[0]]}, "draft": {file: [second[0]]}})
    for _, (start, _) in (first, second):
        assert next(host.read("target", file, start, start + 1)) == b""
    with pytest.raises(ModelError, match="neither here nor fetched in this start"):
        next(host.read("draft", file, third[1][0], third[1][0] + 1))
    with pytest.raises(ModelError, match="'mid' is no model of this start"):
        next(host.read("mid", file, 0, 1))
    host.unlock()
