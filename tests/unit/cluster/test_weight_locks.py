"""Starts that need the same folders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipespec.cluster.byte_channel import LocalChannel
from pipespec.cluster.weight_distribution import lock_folders
from pipespec.cluster.weight_host import WeightHost
from pipespec.cluster.weight_peer import WeightPeer, on_this_machine
from pipespec.engine.checkpoint_parts.blueprint import Blueprint
from pipespec.engine.checkpoint_parts.folder_lock import FolderLock
from pipespec.engine.checkpoint_parts.parts_file import PartsFile
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
    return [cache / plan.repository.folder_name for cache in caches]


@pytest.mark.parametrize("taken", [0, 1])
def test_a_start_that_waits_holds_nothing_and_says_so_once(
    taken: int, peers: list[WeightPeer], plan: Blueprint, tmp_path: Path
) -> None:
    own = folders(plan, tmp_path)
    other = FolderLock(own[taken], "other", "gamma")
    assert other.owner == "gamma"
    sentences: list[str] = []
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        second = FolderLock(own[1 - taken], "other", "gamma")  # so two starts do not wait for good
        assert second.owner == "gamma"
        second.release()
        if len(pauses) == 3:
            other.release()

    owned = lock_folders([(peer, NEEDS) for peer in peers], sentences.append, pause)
    assert len(pauses) == len(set(pauses)) == 3
    (sentence,) = sentences
    assert sentence.startswith(f"{peers[taken].name}: process ")
    assert sentence.endswith(f" fetches into {own[taken]}; waiting until it has ended.")
    assert owned == {peer.name: NEEDS for peer in peers}
    assert [FolderLock(each, "other", "gamma").owner for each in own] == [None, None]


def test_of_hosts_that_share_a_folder_the_first_fetches_for_all(
    peers: list[WeightPeer], plan: Blueprint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    described = plan.as_json()
    described["repository"]["path"] = "/models/nowhere"
    for peer in peers:
        peer.call("prepare", kind="target", path="/x", blueprint=described, parts=["0"])
    asked = [(peer, {"target": {str(number)}}) for number, peer in enumerate(peers)]
    assert lock_folders(asked, pytest.fail) == {"beta": {"target": {"0", "1"}}}
    assert not (plan.path / "config.json").exists()  # nobody has written before the locks
    found = peers[0].call("offer", kind="target", parts=["0", "1"])
    (file,) = plan.headers
    assert found["has"][file] == [(0, len(plan.headers[file]), found["has"][file][0][2])]
    assert found["lacks"].keys() == {file}


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
        assert peer.call("lock", kind="target", run="run", host="alpha")["owner"] == "alpha"
        peer.end()
        assert FolderLock(plan.path, "other", "gamma").owner is None
    assert FolderLock(plan.path, "other", "gamma").owner == "gamma"


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
        assert host.lock(kind, "run", "beta")["owner"] == "beta"
    (file,) = plan.headers
    lacks = [
        host.offer(kind, [part])["lacks"][file] for kind, part in (("target", "0"), ("draft", "1"))
    ]
    for each in lacks:
        assert next(host.read("target", file, *each[0])) == b""
    other = next(
        each for each in PartsFile(plan.path / file).absent() if each not in lacks[0] + lacks[1]
    )
    with pytest.raises(ModelError, match="neither here nor fetched in this start"):
        next(host.read("draft", file, *other))
    with pytest.raises(ModelError, match="'mid' is no model of this start"):
        next(host.read("mid", file, 0, 1))
    host.unlock()
