"""On which GPU a rank's own calls go."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pipespec.cluster.worker import run_rank
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
        deployment=SimpleNamespace(devices=("cuda:1", "cuda:0", "cuda:1")),
        rank=2,
        member=0,
        members=("a",),
        core_shares=lambda: None,
        num_workers_on=lambda _: 1,
    )
    weights: Any = Loading()
    with pytest.raises(RankFailed):
        run_rank(held, weights, weights)
    assert order == ["cuda:1", "load"]
