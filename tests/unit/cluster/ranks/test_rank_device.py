"""On which GPU a rank's own calls go."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pipespec.cluster.deployment.rank_assignment import RankAssignment
from pipespec.cluster.ranks.held_rank import HeldRank
from pipespec.cluster.ranks.worker import run_rank
from pipespec.errors import RankFailed


def test_a_rank_makes_its_gpu_the_current_one_before_it_loads_its_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Self-tests launch kernels and capture graphs while it loads."""
    order: list[Any] = []
    monkeypatch.setattr("torch.cuda.set_device", order.append)

    class Loading:
        def of(self, *_: object, **__: object) -> None:
            order.append("load")
            raise RankFailed("the device is lost")

        def drop(self) -> None: ...

    held: Any = SimpleNamespace(
        deployment=SimpleNamespace(devices=("cuda:1", "cuda:0", "cuda:1"), layers=(range(1),) * 3),
        rank=2,
        member=0,
        members=("a",),
        core_shares=lambda: None,
        num_models_on=lambda _: 1,
    )
    weights: Any = Loading()
    with pytest.raises(RankFailed):
        run_rank(held, weights, weights)
    assert order == ["cuda:1", "load"]


def test_the_mid_size_model_counts_where_it_is() -> None:
    """It is loaded after the draft, and both take their share of the device."""
    devices = {"a/0": "cuda:0", "a/1": "cuda:1", "b/0": "cuda:0"}
    deployment: Any = SimpleNamespace(
        mid=object(), devices=["cuda:0", "cuda:1", "cuda:0"], device_of=devices.__getitem__
    )
    assignment: Any = RankAssignment((*devices,), ())
    rest: Any = None

    def held(rank: int) -> HeldRank:
        return HeldRank(deployment, rest, rank, 0, assignment, rest)

    assert held(0).num_models_on("cuda:0") == 2
    assert held(1).num_models_on("cuda:1") == 1
    assert held(2).num_models_on("cuda:0") == 1  # of another host
    deployment.mid = None
    assert held(0).num_models_on("cuda:0") == 1
