"""Starts that need the same folders."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from pipespec.cluster.weights.host import WeightHost
from pipespec.cluster.weights.peer import lock_folders
from pipespec.engine.checkpoint.parts.folder import FolderLock, Repository
from pipespec.engine.checkpoint.parts.opening import repository_of
from pipespec.system.folders import resource_dir

TARGET = resource_dir("demo") / "target"
ABSENT = "/models/nowhere"


class Host:
    """A host of this process, which lacks a model."""

    def __init__(self, name: str, repository: Repository, *parts: str) -> None:
        self.name, self.needs = name, {kind: set(parts) for kind in ("target", "draft")}
        self.own = WeightHost(lambda count: None)
        for kind in self.needs:
            known = {"path": ABSENT, "repository": asdict(repository)}
            assert not self.own.prepare(kind, parts=["0"], **known)

    def call(self, do: str, **arguments: Any) -> Any:
        return getattr(self.own, do)(**arguments)


@pytest.fixture
def repository() -> Repository:
    """As that of a folder that is not here."""
    return replace(repository_of(TARGET, as_folder=True), path=ABSENT)


@pytest.fixture
def hosts(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[Any]]:
    """Two hosts with a cache each; both models are in one folder there."""
    found = []
    for number, name in enumerate(("beta", "the launcher")):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
        found.append(Host(name, repository, str(number)))
    yield found
    for host in found:
        host.own.unlock()


@pytest.mark.parametrize("taken", [0, 1])
def test_a_start_that_waits_holds_nothing_and_says_so_once(
    taken: int, hosts: list[Any], repository: Repository, tmp_path: Path
) -> None:
    caches = (tmp_path / host.name / "pipespec" / "weights" for host in hosts)
    own = [cache / repository.folder_name for cache in caches]
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

    needs = [host.needs for host in hosts]
    lock_folders(hosts, sentences.append, pause)
    assert len(pauses) == len(set(pauses)) == 3
    (sentence,) = sentences
    assert sentence.startswith(f"{hosts[taken].name}: process ")
    assert sentence.endswith(f" fetches into {own[taken]}; waiting until it has ended.")
    assert [host.needs for host in hosts] == needs
    assert [FolderLock(each, "other", "gamma").owner for each in own] == [None, None]


def test_of_hosts_that_share_a_folder_the_first_fetches_for_all(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    hosts: list[Any] = [Host(name, repository, name) for name in ("beta", "gamma")]
    lock_folders(hosts, pytest.fail)
    needs = {"beta", "gamma"}
    assert [host.needs for host in hosts] == [{"target": needs, "draft": needs}, {}]
    assert not (repository.folder / "config.json").exists()  # nobody has written before
    blocks = [("target", "config.json", 0)]
    assert hosts[0].call("offer", kinds=["target"], blocks=blocks) == {"has": [], "own": []}
    assert (repository.folder / "config.json").exists()
    hosts[0].call("end")
    assert FolderLock(repository.folder, "other", "delta").owner == "delta"
