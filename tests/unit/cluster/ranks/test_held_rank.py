import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipespec.cluster.decide import decide
from pipespec.cluster.deployment.deployment import ControllerAddress
from pipespec.cluster.deployment.rank_assignment import RankAssignment
from pipespec.cluster.ranks.held_rank import HeldRank
from pipespec.cluster.ranks.rank_components import measures_steps, scheduler_config, step_times_key
from pipespec.cluster.ranks.worker import run_rank
from pipespec.config.compose import compose
from pipespec.config.hosts import own_name
from pipespec.errors import RankFailed
from pipespec.system.cores import SHARES_CORES, CoreShares


def held(rank: int, *settings: str, stages: int = 1) -> HeldRank:
    config = compose([f"cluster.stages={stages}", "cluster.devices=[cpu]", *settings])
    deployment = decide(config)
    assignment = RankAssignment(deployment.workers, deployment.layers)
    return HeldRank(deployment, ControllerAddress("", ""), rank, 0, assignment, None)


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipespec.cluster.ranks.held_rank.num_cores", lambda: 4)
    monkeypatch.setenv(SHARES_CORES, "yes")


@pytest.mark.usefixtures("four_cores")
@pytest.mark.parametrize(("stages", "expected"), [(1, CoreShares(1, 3)), (2, CoreShares(1, 2))])
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_of_a_host_agree_on_its_cores(rank, stages, expected):
    assert held(rank, stages=stages).core_shares() == expected


@pytest.mark.usefixtures("four_cores")
def test_a_number_of_threads_is_that_of_every_rank():
    assert held(1, "cluster.threads=4").core_shares() == CoreShares(4, 4)
    assert held(1, "cluster.threads=2").core_shares() == CoreShares(2, 2)


@pytest.mark.usefixtures("four_cores")
def test_omp_num_threads_of_the_user_counts(monkeypatch):
    monkeypatch.delenv(SHARES_CORES)  # the agent found OMP_NUM_THREADS
    threads = torch.get_num_threads()
    assert held(1).core_shares() == CoreShares(threads, threads)


@pytest.mark.usefixtures("four_cores")
def test_ranks_of_other_hosts_take_no_cores():
    alone = held(0)
    (host,) = alone.deployment.hosts
    hosts = (replace(host, devices=("cpu",)), replace(host, name="other", devices=("cpu",)))
    apart = replace(
        alone,
        deployment=replace(alone.deployment, hosts=hosts),
        assignment=replace(alone.assignment, workers=(f"{own_name()}/0", "other/0")),
    )
    assert apart.core_shares() == CoreShares(4, 4)
    assert replace(apart, rank=1).core_shares().stage == 4


@pytest.mark.parametrize(
    ("settings", "overlaps"),
    [
        ([], None),  # as measured
        (["proposer.overlap=yes"], True),
        (["proposer.overlap=no"], False),
        (["policy=root"], True),  # there is no choice
        (["policy.row_cost=0.01"], True),
        (["emulate=fixed"], True),  # emulated hosts have cores of their own
    ],
)
def test_whether_the_draft_works_beside_the_stages_is_measured(settings, overlaps):
    deployment = held(0, *settings).deployment
    assert scheduler_config(deployment, 100).overlap is overlaps
    assert measures_steps(deployment.config) == (
        settings in ([], ["proposer.overlap=yes"], ["proposer.overlap=no"])
    )


def test_learnt_steps_are_those_of_one_model_and_layout():
    keys = [
        json.dumps(step_times_key(held(0, *settings).deployment))
        for settings in ([], ["policy=level"], ["cluster.stages=2"], ["proposer=suffix"])
    ]
    assert keys[0] == keys[1], "policies are not part of it"
    assert len({*keys}) == 3


def test_a_rank_makes_its_gpu_the_current_one_before_it_loads_its_model(monkeypatch):
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
        run_rank(held, weights)
    assert order == ["cuda:1", "load"]


def test_models_on_a_device_are_those_of_its_host():
    devices = {"a/0": "cuda:0", "a/1": "cuda:0", "b/0": "cuda:0"}
    deployment: Any = SimpleNamespace(device_of=devices.__getitem__)
    assignment: Any = RankAssignment((*devices,), ())
    rest: Any = None

    def on(rank: int) -> HeldRank:
        return HeldRank(deployment, rest, rank, 0, assignment, rest)

    assert [on(rank).num_models_on("cuda:0") for rank in range(3)] == [2, 2, 1]
