"""The members of a tensor-parallel slice: processes of one host, over gloo and NCCL.

A group of its own, not torch's default one: that is the pipeline's. What goes from host to host is
gloo's. What devices add up is NCCL's where each member has a CUDA device of its own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, PrefixStore, Store

from pipespec.transport.distributed import AT_ONCE, FOREVER, MEET_S, NOBODY, blaming

_TAG = 1
_LENGTH = 8  # bytes in front of a message that say how many follow
# A message comes in one trip if it is no longer than this, as its receiver has so much room for
# it before it is sent; in two if it is.
PIECE = 256 << 10


def nccl_serves(devices: Sequence[str]) -> bool:
    """Whether NCCL can add up among the devices: torch has it, and each is a GPU of its own."""
    distinct = {device.replace("cuda:0", "cuda") for device in devices}
    own = len(distinct) == len(devices) and all(each.startswith("cuda") for each in distinct)
    return own and dist.is_nccl_available()


class MemberGroup:
    """Member `rank` of `size`, which meet in a store that is theirs alone.

    `device` is a CUDA device that is this member's alone, on which NCCL adds up; None: gloo does,
    on the host.

    Raises:
        RankFailed: a member did not come.
    """

    def __init__(self, store: Store, rank: int, size: int, device: str | None = None):
        self.rank, self.size = rank, size
        self._nccl: Any = None
        with blaming("The members of a stage did not meet"):
            # Torch's stubs leave out what it can do.
            self._backend: Any = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=MEET_S))
        if device is not None:
            # Whoever watches the members ends a group that hangs, and graphs are recorded.
            os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
            torch.cuda.set_device(device)
            of_nccl = PrefixStore("nccl", store)
            self._nccl = dist.ProcessGroupNCCL(of_nccl, rank, size, dist.ProcessGroupNCCL.Options())

    @property
    def records(self) -> bool:
        """Whether a recorded graph can contain what `gather` does with tensors on a device."""
        return self._nccl is not None

    def gather(self, mine: Tensor) -> list[Tensor]:
        """Every member's tensor, by rank; all have the same shape and type.

        Raises:
            RankFailed: a member has gone.
        """
        mine = mine.contiguous()
        if self._nccl is not None and mine.is_cuda:
            found = mine.new_empty(self.size, *mine.shape)
            with blaming(f"Member {self.rank} lost the others of its stage"):
                self._nccl._allgather_base(found, mine).wait()  # the device does, not the host
            return list(found.unbind())
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        options = AllgatherOptions()
        options.timeout = FOREVER
        with blaming(f"Member {self.rank} lost the others of its stage"):
            self._backend.allgather([parts], [mine], options).wait()
        return parts

    def tell(self, message: Tensor) -> None:
        """Send bytes, uint8 `[length]`, from member 0 to all others.

        Raises:
            RankFailed: a member has gone.
        """
        length = torch.tensor([len(message)]).view(torch.uint8)
        whole = torch.cat((length, message.cpu()))
        pieces = [piece for piece in (whole[:PIECE], whole[PIECE:]) if len(piece)]
        with blaming("Member 0 lost the others of its stage"):
            sent = [
                self._backend.send([piece], other, _TAG)
                for other in range(1, self.size)
                for piece in pieces
            ]
            for work in sent:
                work.wait(FOREVER)

    def hear(self) -> Tensor:
        """What member 0 tells next, uint8 `[length]`.

        Raises:
            RankFailed: member 0 has gone.
        """
        first = torch.empty(PIECE, dtype=torch.uint8)
        with blaming(f"Member {self.rank} lost the first of its stage"):
            self._backend.recv([first], 0, _TAG).wait(FOREVER)
            length = int(first[:_LENGTH].view(torch.int64))
            message = first[_LENGTH : _LENGTH + length]
            if len(message) == length:
                return message
            rest = torch.empty(length - len(message), dtype=torch.uint8)
            self._backend.recv([rest], 0, _TAG).wait(FOREVER)
        return torch.cat((message, rest))

    def abort(self) -> None:
        """End the group, also from another thread: whoever waits in `gather` gets RankFailed.

        gloo closes a link on which a receive has timed out; see `DistributedTransport.abort`.
        """
        if self._nccl is not None:
            self._nccl.abort()
        for other in range(self.size):
            if other != self.rank:
                with suppress(RuntimeError):
                    self._backend.recv([torch.empty(1)], other, NOBODY).wait(AT_ONCE)
