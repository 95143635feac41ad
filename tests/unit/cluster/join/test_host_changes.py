from dataclasses import replace

import pytest

from pipespec.cluster.decide import decide
from pipespec.cluster.deployment.deployment import Deployment
from pipespec.cluster.diagnostics.measure_hosts import MeasuredHost
from pipespec.cluster.join.host_changes import with_hosts, without_host
from pipespec.config.compose import compose
from pipespec.config.hosts import JOINED, Host, own_name
from pipespec.errors import ConfigError
from pipespec.placement.costs import Needs, Worker

NUM_LAYERS = 16  # of the demo's target
OWN = tuple(f"{own_name()}/{number}" for number in range(3))
BETA = Host("beta", "10.0.0.2", f"{JOINED}/run/socket", devices=("cpu", "cpu"))
# As fast as the others, which count as equal.
MEASURED = MeasuredHost(tuple(Worker(name, layer_ms=1.0) for name in BETA.workers), {})


@pytest.fixture(scope="module")
def deployment() -> Deployment:
    """A head and two stages on this machine."""
    return decide(compose(["cluster.stages=2", "cluster.devices=[cpu]"]))


def test_a_host_that_joins_gets_layers_and_the_head_stays(deployment):
    after = with_hosts(deployment, [(BETA, MEASURED)])
    assert after.workers == (*OWN, "beta/0", "beta/1")
    assert list(map(len, after.layers)) == [4, 4, 4, 4]
    assert after.devices == ("cpu",) * 5
    assignment = after.assignment()
    assert assignment.joined == (BETA,)


def test_a_slow_host_gets_fewer_layers(deployment):
    slow = MeasuredHost(tuple(Worker(name, layer_ms=3.0) for name in BETA.workers), {})
    sizes = list(map(len, with_hosts(deployment, [(BETA, slow)]).layers))
    assert sizes == [6, 6, 2, 2]


def test_a_host_with_too_little_memory_is_refused(deployment):
    problem = replace(deployment.placement.problem, needs=Needs((2**30,) * NUM_LAYERS))
    heavy = replace(deployment, placement=replace(deployment.placement, problem=problem))
    small = MeasuredHost(tuple(Worker(name, memory_bytes=1) for name in BETA.workers), {})
    with pytest.raises(ConfigError, match=r"GiB of memory are missing: beta/0"):
        with_hosts(heavy, [(BETA, small)])


def test_what_a_host_held_is_divided_among_the_others_when_it_leaves(deployment):
    gamma = replace(BETA, name="gamma", devices=("cpu",))
    one = MeasuredHost((Worker("gamma/0"),), {})
    both = with_hosts(with_hosts(deployment, [(BETA, MEASURED)]), [(gamma, one)])
    after = without_host(both, BETA)
    assert after.workers == (*OWN, "gamma/0")
    assert sum(map(len, after.layers)) == NUM_LAYERS
    assert after.joined == (gamma,)
    alone = without_host(after, gamma)
    assert (alone.workers, alone.hosts) == (deployment.workers, deployment.hosts)
    assert list(map(len, alone.layers)) == [8, 8]


def test_dtypes_stay_those_of_the_first_layout(deployment):
    """A text would differ if a host with a CPU made a cluster of GPUs compute in float32."""
    host = replace(deployment.hosts[0], devices=("cuda:0", "cuda:1", "cuda:2"))
    gpus = replace(deployment, hosts=(host,))
    assert gpus.dtype == "bfloat16"
    assert with_hosts(gpus, [(BETA, MEASURED)]).dtype == "bfloat16"
