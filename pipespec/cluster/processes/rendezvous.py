"""torchrun's rendezvous for a single node, inside its own process, for hosts that are started by
hand. torchrun's own kinds open a TCPStore on every address of the machine, and the dynamic one
unpickles what it finds there; this one keeps its store in memory, and nothing listens. `torchrun
--rdzv-backend=pipespec` finds it by the entry point group `torchrun.handlers`. The ranks meet
elsewhere (`pipespec.transport.distributed`)."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, cast

from pipespec.system.network_interfaces import LOOPBACK

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import (
        RendezvousHandler,
        RendezvousHandlerCreator,
        RendezvousInfo,
        RendezvousParameters,
    )

BACKEND = "pipespec"


class OneNode:
    """A `RendezvousHandler` of torch.distributed.elastic. It does not inherit from it: torch loads
    entry points while it imports that class."""

    use_agent_store = False

    def __init__(self, run_id: str):
        self._run_id = run_id
        self._closed = False

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Return at once, as the only node, with an address for `init_process_group`."""
        from torch._C._distributed_c10d import HashStore
        from torch.distributed.elastic.rendezvous import (
            RendezvousClosedError,
            RendezvousInfo,
            RendezvousStoreInfo,
        )

        if self._closed:
            raise RendezvousClosedError
        with socket.socket() as probe:  # bound and never listened on
            probe.bind((LOOPBACK, 0))
            place = RendezvousStoreInfo(LOOPBACK, int(probe.getsockname()[1]))
        return RendezvousInfo(HashStore(), rank=0, world_size=1, bootstrap_store_info=place)

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        self._closed = True
        return True


def create(parameters: RendezvousParameters) -> RendezvousHandler:
    """The handler of these parameters. Raises ValueError if they ask for several nodes."""
    if parameters.max_nodes != 1:
        raise ValueError(
            f"The rendezvous {BACKEND!r} is for one node, but --nnodes asks for "
            f"{parameters.max_nodes}; start torchrun once per host, each with --nnodes=1."
        )
    return cast("RendezvousHandler", OneNode(parameters.run_id))


def handler() -> RendezvousHandlerCreator:
    return create
