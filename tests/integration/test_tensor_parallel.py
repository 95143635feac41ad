"""Drafts and stages of several workers, which compute every layer together."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipespec.cluster.decide import decide
from pipespec.controller.cluster_status import read_status
from pipespec.controller.log_records import Accepted
from pipespec.controller.membership import Membership
from pipespec.core import SamplingParams
from pipespec.extras.bench.comparison import composed
from pipespec.system.folders import resource_dir
from tests.helpers.proposers import POLICIES
from tests.helpers.waiting import until
from tools.rig.cluster import reference
from tools.rig.requests import Running, running

TOKENS = 24
OFTEN = ("policy=best_first",)
WAYS = (
    *OFTEN,
    *(
        " ".join(settings)
        for policy, settings in POLICIES.items()
        if f"policy={policy}" not in OFTEN
    ),
)
# The head and three stages.
DEVICES = "[[cpu, cpu], [cpu, cpu], cpu, [cpu, cpu]]"
HOSTS = f"hosts: [{{name: box, address: 127.0.0.1, ssh: local, devices: {DEVICES}}}]\ndraft: box/0"
WORKERS = [f"box/{number}" for number in range(7)]
OF_THE_DRAFT, FOLLOWER, LEADER = WORKERS[1], WORKERS[3], WORKERS[5]
SETTINGS = (
    "cluster.patience_s=600",
    "model.dtype=float32",
    "model.context=256",
    "scheduler.max_num_seqs=4",
    "decode.prefill_chunk=32",
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    file = tmp_path_factory.mktemp("hosts") / "box.yaml"
    file.write_text(HOSTS)
    with running(decide(composed((f"cluster={file}", *SETTINGS), WAYS))) as made:
        yield made


@pytest.fixture(scope="module")
def prompts(cluster: Running) -> list[list[int]]:
    lines = (Path(__file__).parent.parent / "data" / "prompts.jsonl").read_text().splitlines()
    return [cluster.client.served.encode(json.loads(line)["prompt"][:200]) for line in lines[:8]]


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> list[list[int]]:
    return reference(resource_dir("demo") / "target", prompts, TOKENS)


def answers(
    cluster: Running,
    prompts: list[list[int]],
    policy: str = "",
    fault: Callable[[], None] = lambda: None,
) -> list[list[int]]:
    """What is answered to all of them at once; `fault` happens once the first has begun."""
    client, found, begun = cluster.client, [], False
    numbers = [
        client.submit(
            prompt, SamplingParams(), max_new_tokens=TOKENS, eos=client.served.eos, policy=policy
        )
        for prompt in prompts
    ]
    for number in numbers:
        tokens: list[int] = []
        for event in client.events(number):
            if isinstance(event, Accepted):
                tokens += event.tokens
                if not begun:
                    begun = True
                    fault()
        found.append(tokens)
    return found


def pids(cluster: Running) -> dict[str, int]:
    """The processes of all workers."""
    with Membership(cluster.cluster.url, cluster.cluster.namespace) as shared:
        until(lambda: len(shared.alive(WORKERS)) == len(WORKERS))
        return shared.alive(WORKERS)


def test_members_of_a_stage_are_the_next_workers_of_the_host(cluster):
    assignment = cluster.cluster.state.assignment
    assert assignment.workers == ("box/0", "box/2", "box/4", "box/5")
    assert assignment.followers == (("box/1",), ("box/3",), (), ("box/6",))
    seen = read_status(cluster.cluster.url, cluster.cluster.namespace)
    assert [seen.computing[rank]["devices"] for rank in range(4)] == [2, 2, 1, 2]


@pytest.mark.parametrize(
    "way", [way if way in OFTEN else pytest.param(way, marks=pytest.mark.long) for way in WAYS]
)
def test_each_text_is_that_of_the_whole_target(cluster, prompts, expected, way):
    assert answers(cluster, prompts, way) == expected


@pytest.mark.parametrize(
    ("worker", "how"),
    [
        (FOLLOWER, signal.SIGSTOP),
        *(
            pytest.param(worker, how, marks=pytest.mark.long)
            for worker in WORKERS
            for how in (signal.SIGKILL, signal.SIGSTOP)
        ),
    ],
)
def test_the_same_text_though_a_member_is_lost(cluster, prompts, expected, worker, how):
    """The others keep their weights."""
    before, faults = pids(cluster), len(cluster.cluster.faults)
    fault = lambda: os.kill(before[worker], how)  # noqa: E731
    assert answers(cluster, prompts, fault=fault) == expected
    until(lambda: len(cluster.cluster.faults) > faults, what="nobody noticed")
    until(lambda: pids(cluster)[worker] != before[worker], what="nobody took its place")
    others = {name: pid for name, pid in before.items() if name != worker}
    assert others.items() <= pids(cluster).items(), "the others keep their weights"
    assert answers(cluster, prompts[:1]) == expected[:1]
