"""Starts that need the same folders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipespec.cluster.weight_distribution import lock_folders
from pipespec.cluster.weight_peer import LocalPeer, Peer, on_this_machine
from pipespec.engine.checkpoint.parts.blueprint import Blueprint
from pipespec.engine.checkpoint.parts.folder import FolderLock
from pipespec.system.folders import resource_dir

TARGET = resource_dir("demo") / "target"
NEEDS = {"target": {"0"}}
ABSENT = "/models/nowhere"


@pytest.fixture
def plan() -> Blueprint:
    return Blueprint.of(TARGET, as_folder=True)


@pytest.fixture
def described(plan: Blueprint) -> dict[str, Any]:
    """As that of a folder that is not here."""
    found = plan.as_json()
    found["repository"]["path"] = ABSENT
    return found


def prepare(peer: Peer, described: dict[str, Any], *kinds: str) -> None:
    for kind in kinds or ("target",):
        known = {"path": ABSENT, "repository": described["repository"]}
        assert not peer.call("prepare", kind=kind, parts=["0"], **known)


@pytest.fixture
def peers(
    described: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[LocalPeer]]:
    """Two hosts with a cache each, which lack the model."""
    found = []
    for name in ("beta", "the launcher"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
        found.append(LocalPeer(name, None, lambda *_: None))
        prepare(found[-1], described)
    yield found
    for peer in found:
        peer.own.unlock()


@pytest.mark.parametrize("taken", [0, 1])
def test_a_start_that_waits_holds_nothing_and_says_so_once(
    taken: int, peers: list[LocalPeer], plan: Blueprint, tmp_path: Path
) -> None:
    caches = (tmp_path / name / "pipespec" / "parts" for name in ("beta", "the launcher"))
    own = [cache / plan.repository.folder_name for cache in caches]
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
    peers: list[LocalPeer],
    plan: Blueprint,
    described: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for peer in peers:
        prepare(peer, described, "target", "draft")  # two models in one folder
    asked = [
        (peer, {kind: {str(at)} for kind in ("target", "draft")}) for at, peer in enumerate(peers)
    ]
    parts = {"0", "1"}
    assert lock_folders(asked, pytest.fail) == {"beta": {"target": parts, "draft": parts}}
    assert not (plan.repository.folder / "config.json").exists()  # nobody has written before
    found = peers[0].call("offer", kind="target", blueprint=described, parts=["0", "1"])
    assert found["records"].keys() == found["lacks"].keys() == plan.headers.keys()


def test_the_locks_of_the_launcher_end_after_what_it_fetches(
    plan: Blueprint, described: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ending it only tells its threads to end."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = plan.repository.folder
    with on_this_machine("alpha", None, lambda *_: None) as peer:
        prepare(peer, described)
        assert peer.call("lock", kind="target", run="run", host="alpha")["owner"] == "alpha"
        peer.end()
        assert FolderLock(folder, "other", "gamma").owner is None
    assert FolderLock(folder, "other", "gamma").owner == "gamma"
