"""A distribution of weights ends with its cluster, and with a signal, though a host hangs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipespec.cluster.decide import decide
from pipespec.cluster.deployment.deployment import Deployment
from pipespec.cluster.weights import distribution as weight_distribution
from pipespec.cluster.weights.distribution import distribute_weights
from pipespec.config.compose import compose
from pipespec.errors import HostFailed, RankFailed

PATIENCE_S = 60.0


class Peer:
    """A host that answers nothing until it is ended."""

    asked: threading.Event

    def __init__(self, name: str) -> None:
        self.name = name
        self.ended = threading.Event()

    def require_version(self) -> None:
        self.asked.set()
        assert self.ended.wait(PATIENCE_S)
        raise HostFailed(f"{self.name}: it has ended")

    def end(self) -> None:
        self.ended.set()


class Interrupted(Peer):
    """One during whose answer the user presses Ctrl-C."""

    def require_version(self) -> None:
        raise KeyboardInterrupt


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    hosts = [
        {"name": name, "address": f"10.0.0.{index}", "devices": ["cpu"]}
        for index, name in enumerate(("alpha", "beta", "gamma"), 1)
    ]
    file = tmp_path / "hosts.yaml"
    file.write_text(yaml.safe_dump({"hosts": hosts, "draft": "alpha/0"}))
    return decide(compose([f"cluster={file}"]))


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> dict[str, type[Peer]]:
    """The kind of each far host; the others hang."""
    kinds: dict[str, type[Peer]] = {}
    monkeypatch.setattr(Peer, "asked", threading.Event(), raising=False)

    @contextmanager
    def far(host: Any, *_: object) -> Iterator[Peer]:
        yield kinds.get(host.name, Peer)(host.name)

    monkeypatch.setattr(weight_distribution, "Peer", far)
    return kinds


@pytest.mark.usefixtures("hosts")
def test_the_end_of_a_cluster_stops_a_distribution(deployment: Deployment) -> None:
    over = threading.Event()
    with ThreadPoolExecutor() as pool:
        moved = pool.submit(distribute_weights, deployment, over=over)
        assert Peer.asked.wait(PATIENCE_S)
        over.set()
        with pytest.raises(HostFailed, match="it has ended"):
            moved.result(PATIENCE_S)
    with pytest.raises(RankFailed, match="The cluster has ended"):
        distribute_weights(deployment, over=over)


def test_a_signal_does_not_wait_for_a_host_that_hangs(
    deployment: Deployment, hosts: dict[str, type[Peer]]
) -> None:
    hosts["alpha"] = Interrupted
    with pytest.raises(KeyboardInterrupt):
        distribute_weights(deployment)
