"""The process group of a tensor-parallel slice: processes of one host, over gloo and NCCL. The gloo
group is bound to the loopback interface, so nothing leaves the host. Partial results are gathered
over NCCL if each member has a CUDA device of its own, else over gloo."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, PrefixStore, Store

from pipespec.transport.distributed import (
    FOREVER,
    GlooWait,
    close_link,
    gloo_group,
    raises_rank_failed,
)

_TAG = 1
_LENGTH = 8  # bytes in front of a message that say how many follow
# The receiver posts a buffer of this size before it knows the length, so a message that fits takes
# one trip and a longer one takes two.
PIECE = 256 << 10


def can_use_nccl(devices: Sequence[str]) -> bool:
    """Whether NCCL can connect the devices: torch has it, and each is a GPU of its own."""
    distinct = {device.replace("cuda:0", "cuda") for device in devices}
    own = len(distinct) == len(devices) and all(each.startswith("cuda") for each in distinct)
    return own and dist.is_nccl_available()


class TPProcessGroup:
    """Member `rank` of `size`, which find one another through a store of their own. `device` is the
    CUDA device of this member alone, for NCCL; None: gather over gloo, on the host. Raises
    RankFailed if a member did not connect in time."""

    def __init__(self, store: Store, rank: int, size: int, device: str | None = None):
        self.rank, self.size = rank, size
        self._nccl: Any = None
        with raises_rank_failed("The members of a stage did not meet"):
            self._backend = gloo_group(store, rank, size, local=True)
        if device is not None:
            torch.cuda.set_device(device)
            # NCCL's own check would end the process; the launcher detects a group that hangs.
            os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
            kind: Any = dist.ProcessGroupNCCL
            self._nccl = kind(PrefixStore("nccl", store), rank, size, kind.Options())

    @property
    def supports_graphs(self) -> bool:
        """Whether a CUDA graph can contain `gather`."""
        return self._nccl is not None

    def gather(self, mine: Tensor) -> list[Tensor]:
        """Every member's tensor, by rank; all have the same shape and type. Raises RankFailed."""
        mine = mine.contiguous()
        if self._nccl is not None and mine.is_cuda:
            found = mine.new_empty(self.size, *mine.shape)
            with raises_rank_failed(f"Member {self.rank} lost the others of its stage"):
                self._nccl._allgather_base(found, mine).wait()  # on the device; the host continues
            return list(found.unbind())
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        options = AllgatherOptions()
        options.timeout = FOREVER
        with raises_rank_failed(f"Member {self.rank} lost the others of its stage"), GlooWait():
            self._backend.allgather([parts], [mine], options).wait()
        return parts

    def broadcast(self, message: Tensor) -> None:
        """Send bytes, uint8 `[length]`, from member 0 to all others. Raises RankFailed."""
        length = torch.tensor([len(message)]).view(torch.uint8)
        whole = torch.cat((length, message.cpu()))
        pieces = [piece for piece in (whole[:PIECE], whole[PIECE:]) if len(piece)]
        with raises_rank_failed("Member 0 lost the others of its stage"), GlooWait():
            sent = [
                self._backend.send([piece], other, _TAG)
                for other in range(1, self.size)
                for piece in pieces
            ]
            for work in sent:
                work.wait(FOREVER)

    def receive(self) -> Tensor:
        """The next broadcast of member 0, uint8 `[length]`. Raises RankFailed."""
        first = torch.empty(PIECE, dtype=torch.uint8)
        with raises_rank_failed(f"Member {self.rank} lost the first of its stage"), GlooWait():
            self._backend.recv([first], 0, _TAG).wait(FOREVER)
            length = int(first[:_LENGTH].view(torch.int64))
            message = first[_LENGTH : _LENGTH + length]
            if len(message) == length:
                return message
            rest = torch.empty(length - len(message), dtype=torch.uint8)
            self._backend.recv([rest], 0, _TAG).wait(FOREVER)
        return torch.cat((message, rest))

    def abort(self) -> None:
        """End the group, from any thread; see `DistributedTransport.abort`."""
        for other in range(self.size):
            if other != self.rank:
                close_link(self._backend, other)
        if self._nccl is not None:
            # It waits until no CUDA graph holds a collective of the group: the thread that it wakes
            # drops those as it leaves.
            threading.Thread(target=self._nccl.abort, name="nccl-abort", daemon=True).start()
