from importlib.metadata import entry_points

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from pipespec.cluster.processes import rendezvous


def test_several_nodes_are_refused():
    with pytest.raises(ValueError, match="--nnodes asks for 3; start torchrun once per host"):
        rendezvous.create(RendezvousParameters(rendezvous.BACKEND, "", "run", 3, 3))


def test_torchrun_finds_the_backend_by_its_entry_point():
    (point,) = entry_points(group="torchrun.handlers", name=rendezvous.BACKEND)
    assert point.load()() is rendezvous.create
