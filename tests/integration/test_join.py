"""A host joins a cluster of another one and leaves it, in the middle of requests.

The hosts are two network namespaces; the one that joins does not see the models.
"""

import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from pipespec.client.model_info import ModelInfo
from pipespec.engine.checkpoint.parts import parts_file
from pipespec.system.folders import resource_dir
from pipespec.system.network_interfaces import LOOPBACK
from tests.helpers.listening import assert_private, listening
from tests.helpers.waiting import until
from tools.rig.cluster import reference
from tools.rig.joining import PATIENCE_S, PROMPT, Answer, Command, JoinableCluster
from tools.rig.testbed import Testbed, missing

if (lacking := missing()) is not None:
    pytest.skip(lacking, allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
LENGTHS = (40, 56, 72)
SMALL_BLOCKS = Path(__file__).parents[1] / "helpers" / "small_blocks"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    models = tmp_path_factory.mktemp("models")
    for name in ("target", "draft"):
        shutil.copytree(resource_dir("demo") / name, models / name)
    return models


@pytest.fixture(scope="module")
def cluster(models: Path) -> Iterator[JoinableCluster]:
    with pytest.MonkeyPatch.context() as patch, Testbed(hosts=2, with_ssh=False) as bed:
        patch.setenv("PYTHONPATH", str(SMALL_BLOCKS))
        patch.setattr(parts_file, "BLOCK_BYTES", 2**15)  # as there
        with JoinableCluster(bed, models, "cluster.patience_s=3") as cluster:
            yield cluster
        assert cluster.up.wait() == 0, cluster.up.lines
        assert not bed.processes("a"), "nothing is left"
        assert not bed.processes("b")


@pytest.fixture(scope="module")
def expected(cluster: JoinableCluster) -> list[int]:
    served: ModelInfo = cluster.running.served
    return reference(cluster.models / "target", [served.encode(PROMPT)], max(LENGTHS))[0]


def check(answers: Sequence[Answer], expected: Sequence[int]) -> None:
    """Every text is what Hugging Face decodes."""
    assert len(answers) >= len(LENGTHS)
    assert all(answer.tokens == expected[: answer.length] for answer in answers)


def join(cluster: JoinableCluster) -> Command:
    """Host b, once it gets its weights."""
    host = cluster.join(cluster.token())
    host.await_line("It gets the weights")
    return host


def test_texts_stay_the_same_while_a_host_joins_and_leaves(cluster, expected):
    token = cluster.token()
    host = cluster.join(token)
    host.await_line("It gets the weights")
    with cluster.asking(LENGTHS) as answers:
        line = host.await_line("It computes layer")
    check(answers, expected)
    assert (cluster.status().epoch, cluster.status().joined) == (2, 4)
    # It has its layers, the one with which it was measured, and those with which they, the header
    # and what is at the end of the file share a block: up to three beside each end.
    numbers = list(map(int, re.findall(r"\d+", line.partition("(")[0])))
    own = set(range(numbers[0], numbers[-1] + 1))
    layers = {int(name.split(".")[2]) for name in cluster.fetched() if ".layers." in name}
    assert own <= layers
    assert len(layers) <= min(len(own) + 11, 15)

    seen = listening(pid for name in cluster.bed.hosts for pid in cluster.bed.processes(name))
    assert_private(seen, {LOOPBACK, *map(cluster.bed.address, cluster.bed.hosts)})

    # The token was used.
    again = cluster.join(token)
    assert again.wait() == 1
    assert "this invitation was used already" in again.lines[-1]

    with cluster.asking(LENGTHS) as answers:
        host.interrupt()
        host.await_line("This host has left the cluster")
    check(answers, expected)
    assert host.wait() == 0
    status = cluster.status()
    assert (status.epoch, status.joined, status.faults) == (3, 3, {})
    assert not [line for line in cluster.up.lines if "lost" in line]  # both changes were wanted


@pytest.mark.long
def test_a_host_may_leave_while_it_joins(cluster, expected):
    epoch = cluster.status().epoch
    with cluster.asking(LENGTHS) as answers:
        host = join(cluster)
        host.interrupt()
        assert host.wait() == 0
    check(answers, expected)
    status = cluster.status()
    assert (status.joined, status.faults) == (3, {})
    assert status.epoch <= epoch + 2


@pytest.mark.long
def test_a_host_whose_measuring_is_stopped_may_leave(cluster):
    host = cluster.join(cluster.token())
    host.await_line("The host is measured")
    probe = next(
        each
        for each in map(psutil.Process, cluster.bed.processes("b"))
        if "pipespec.cluster.diagnostics.probe" in each.cmdline()
    )
    probe.suspend()
    host.interrupt()
    assert host.wait() == 0
    assert not probe.is_running()
    assert cluster.status().joined == 3


@pytest.mark.long
def test_texts_stay_the_same_when_a_host_that_has_joined_is_killed(cluster, expected):
    host = join(cluster)
    host.await_line("It computes layer")
    with cluster.asking(LENGTHS) as answers:
        host.process.kill()
        until(lambda: cluster.status().joined == 3, PATIENCE_S)
        cluster.up.await_line("b: it was away for")
    check(answers, expected)
    # It may come back, with the weights that it has got.
    before = cluster.fetched()
    with cluster.asking(LENGTHS) as answers:
        host = join(cluster)
        host.await_line("It computes layer")
    check(answers, expected)
    assert cluster.fetched() >= before
    host.interrupt()
    assert host.wait() == 0


@pytest.mark.long
def test_a_cluster_waits_for_hosts_that_it_cannot_do_without(models, expected):
    with (
        Testbed(hosts=2, with_ssh=False) as bed,
        JoinableCluster(bed, models, "cluster.stages=1", "--hosts", "2") as cluster,
    ):
        host = cluster.join(cluster.up.await_line("pipespec join p").split()[-1])
        host.await_line("It computes layer")
        with cluster.asking(LENGTHS) as answers:
            host.interrupt()
            host.await_line("This host has left the cluster")
        check(answers, expected)
        assert host.wait() == 0
        assert cluster.status().joined == 2
