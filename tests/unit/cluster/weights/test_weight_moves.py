"""New assignments wait until their hosts have their weights."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from pipespec.cluster.decide import decide
from pipespec.cluster.deployment.deployment import Deployment
from pipespec.cluster.deployment.rank_assignment import WeightsPending
from pipespec.cluster.weights.moves import WeightMoves
from pipespec.cluster.weights.plan import parts_needed
from pipespec.config.compose import compose
from pipespec.errors import ConfigError, ModelError

NUM_LAYERS = 16  # of the demo's target


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    """A head, a stage on each of two hosts, and a spare on a third one."""
    names = ("alpha", "beta", "gamma")
    hosts = [
        {"name": name, "address": f"10.0.0.{index}", "devices": ["cpu"] * (1 + (index == 1))}
        for index, name in enumerate(names, 1)
    ]
    file = tmp_path / "hosts.yaml"
    file.write_text(yaml.safe_dump({"hosts": hosts, "draft": "alpha/0", "spares": 1}))
    return decide(compose([f"cluster={file}"]))


def test_an_assignment_waits_for_its_weights_and_no_longer(deployment: Deployment) -> None:
    begun, ready = threading.Event(), threading.Event()
    asked: list[Deployment] = []

    def distribute(changed: Deployment, **_: object) -> None:
        asked.append(changed)
        begun.set()
        assert ready.wait(60)

    moves = WeightMoves(deployment, distribute)
    for _ in range(3):
        with pytest.raises(WeightsPending):
            moves.plan({"beta/0"})
    assert begun.wait(60)
    ready.set()
    assert moves._thread is not None
    moves._thread.join(60)
    assert moves.plan({"beta/0"}) == deployment.assignment(deployment.without({"beta/0"}))
    (changed,) = asked
    assert [host.name for host in changed.hosts] == ["alpha", "gamma"]
    # The spare has the layers of the host that is gone.
    layers = {str(number) for number in range(NUM_LAYERS // 2, NUM_LAYERS)}
    assert layers <= parts_needed(changed, changed.hosts[1])["target"]
    assert not changed.fetched


def pend(moves: WeightMoves) -> None:
    """Wait until the weights of the hosts without beta have moved."""
    with pytest.raises(WeightsPending):
        moves.plan({"beta/0"})
    assert moves._thread is not None
    moves._thread.join(60)


def test_weights_that_cannot_be_moved_do_not_keep_the_epoch_from_beginning(
    deployment: Deployment,
) -> None:
    def distribute(*_: object, **__: object) -> None:
        raise ModelError("no host has them")

    moves = WeightMoves(deployment, distribute)
    pend(moves)
    assert moves.plan({"beta/0"}).workers == ("alpha/0", "alpha/1", "gamma/0")


def test_too_few_workers_are_refused_before_anything_moves(deployment: Deployment) -> None:
    moves = WeightMoves(deployment, lambda *_, **__: pytest.fail("nothing to move"))
    with pytest.raises(ConfigError):
        moves.plan({"alpha/1", "beta/0", "gamma/0"})


def test_one_machine_needs_no_moves() -> None:
    alone = decide(compose(["cluster.stages=2", "cluster.spares=1", "cluster.devices=[cpu]"]))
    moves = WeightMoves(alone, lambda *_, **__: pytest.fail("nothing to move"))
    assert moves.plan({"local/1"}).workers[0] == "local/0"


def test_what_is_said_while_weights_move_is_in_the_log(
    deployment: Deployment, caplog: pytest.LogCaptureFixture
) -> None:
    def distribute(_: Deployment, on_warning: Callable[[str], None]) -> None:
        on_warning("gamma cannot read weights from alpha.")

    moves = WeightMoves(deployment, distribute)
    pend(moves)
    assert caplog.messages == ["weights of the new layout: gamma cannot read weights from alpha."]
