"""torchrun's rendezvous of one node."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousParameters,
)

from pipespec.cluster.processes import rendezvous


def parameters(nodes: int = 1) -> RendezvousParameters:
    return RendezvousParameters(rendezvous.BACKEND, "", "run", nodes, nodes)


def test_one_node_completes_each_rendezvous_alone():
    handler = rendezvous.create(parameters())
    for _ in range(2):
        found = handler.next_rendezvous()
        assert (found.rank, found.world_size) == (0, 1)
        assert found.bootstrap_store_info.master_addr == "127.0.0.1"
        found.store.set("key", "value")
        assert found.store.get("key") == b"value"
    assert (handler.get_run_id(), handler.num_nodes_waiting()) == ("run", 0)
    assert handler.shutdown()
    assert handler.is_closed()
    with pytest.raises(RendezvousClosedError):
        handler.next_rendezvous()


def test_several_nodes_are_refused():
    with pytest.raises(ValueError, match="--nnodes asks for 3; start torchrun once per host"):
        rendezvous.create(parameters(3))


def test_torchrun_finds_the_backend_by_its_entry_point():
    (point,) = entry_points(group="torchrun.handlers", name=rendezvous.BACKEND)
    assert point.load()() is rendezvous.create
