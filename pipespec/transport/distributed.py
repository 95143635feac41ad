"""Ranks as processes, joined by torch.distributed.

One message per batch over gloo (`pipespec.wire`). Two facts about gloo decide its shape:

- A send delivers its payload only once the receiver has posted a buffer. So the receiver always
  has one posted: the next batch arrives while the rank computes the current one, and a hop costs
  one trip over the network instead of three.
- What arrives may be shorter than the posted buffer. So the buffer has room for the largest
  batch, and one row still sends one row.

Between CUDA devices that no two stages share, NCCL carries the hidden states behind the message;
otherwise they are part of it, by way of CPU memory.
`benchmarks/transport.py` measures a hop beside a bare gloo ping-pong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from pipespec.errors import RankFailed
from pipespec.types import Batch
from pipespec.wire import Wire

# How long the ranks wait for one another when they meet: loading a large model takes minutes.
_MEET = timedelta(minutes=30)
# A stage may idle for days between two requests; a neighbour that dies closes its connection.
_FOREVER = timedelta(days=3650)
_TAG = 1


def choose_backend(devices: Sequence[str]) -> str:
    """What carries hidden states between stages: "nccl" or "gloo".

    `devices` are the ranks' devices, the head's first. The head neither sends nor receives
    hidden states, so it may share its device or have none. NCCL refuses two ranks on a GPU.
    """
    stages = [torch.device(device) for device in devices[1:]]
    distinct = len({device.index for device in stages}) == len(stages)
    on_cuda = all(device.type == "cuda" and device.index is not None for device in stages)
    return "nccl" if len(stages) > 1 and on_cuda and distinct else "gloo"


class DistributedTransport:
    """One rank's links to its neighbours, each a process of its own."""

    def __init__(self, rank: int, num_ranks: int, wire: Wire, device: torch.device) -> None:
        """Use the process group that exists already; `connect` makes it first."""
        self.rank = rank
        self._last_rank = num_ranks - 1
        self._wire = wire
        self._device = device
        # The sends that may still be under way, and the tensors they read.
        self._outbox: list[tuple[dist.Work, torch.Tensor]] = []
        # The posted receive and where it arrives.
        self._inbox: tuple[dist.Work, torch.Tensor] | None = None
        if rank > 0:
            self._post()

    @classmethod
    def connect(
        cls,
        devices: Sequence[str],
        *,
        backend: str = "auto",
        epoch: int,
        max_rows: int,
        hidden_size: int,
        dtype: torch.dtype,
    ) -> DistributedTransport:
        """Meet the other ranks at the address in the environment (`pipespec.launch` sets it).

        `devices` holds every rank's device, the head's first; `backend` "auto" lets
        `choose_backend` choose; `max_rows` limits a batch;
        `hidden_size` and `dtype` are the target's.

        Raises:
            RankFailed: a rank did not come.
        """
        if backend == "auto":
            backend = choose_backend(devices)
        with _blaming("The ranks did not meet"):
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo", timeout=_MEET
            )
        rank = dist.get_rank()
        assert dist.get_world_size() == len(devices), "one device per rank"
        device = torch.device(devices[rank])
        if device.type == "cuda":
            torch.cuda.set_device(device)
        wire = Wire(epoch, max_rows, hidden_size, dtype, inline=backend == "gloo")
        return cls(rank, len(devices), wire, device)

    def send(self, batch: Batch) -> None:
        assert self.rank < self._last_rank, "the last rank has nobody to send to"
        message = self._wire.pack(batch)
        with _blaming(f"Rank {self.rank} lost its link to rank {self.rank + 1}"):
            self._flush()
            self._start(message)
            if not self._wire.inline and batch.hidden is not None and len(batch):
                self._start(batch.hidden.contiguous())
            if batch.stop:
                self._flush()

    def recv(self) -> Batch:
        assert self._inbox is not None, "nothing comes to rank 0, nor after a stop batch"
        work, message = self._inbox
        lost = f"Rank {self.rank} lost its link to rank {self.rank - 1}"
        with _blaming(lost):
            work.wait(_FOREVER)
        batch = self._wire.unpack(message)
        self._inbox = None
        if not batch.stop:
            with _blaming(lost):
                self._post()
        if self._wire.inline and batch.hidden is not None:
            batch.hidden = batch.hidden.to(self._device)
        elif not self._wire.inline and self._wire.has_hidden(message):
            shape = (len(batch), self._wire.hidden_size)
            batch.hidden = torch.empty(shape, dtype=self._wire.dtype, device=self._device)
            if len(batch):
                with _blaming(lost):
                    dist.recv(batch.hidden, self.rank - 1)
        return batch

    def close(self) -> None:
        self._outbox.clear()
        self._inbox = None
        if dist.is_initialized():
            dist.destroy_process_group()

    def _post(self) -> None:
        # A fresh buffer each time: the hidden states of the last batch still lie in theirs.
        message = torch.empty(self._wire.capacity, dtype=torch.uint8)
        work = dist.irecv(message, self.rank - 1, tag=_TAG)
        assert work is not None
        self._inbox = (work, message)

    def _start(self, tensor: torch.Tensor) -> None:
        # NCCL ignores the tag.
        work = dist.isend(tensor, self.rank + 1, tag=_TAG)
        assert work is not None
        self._outbox.append((work, tensor))

    def _flush(self) -> None:
        while self._outbox:
            self._outbox[0][0].wait(_FOREVER)
            self._outbox.pop(0)


@contextmanager
def _blaming(what: str) -> Iterator[None]:
    """Turn what torch.distributed raises into a RankFailed that starts with `what`."""
    try:
        yield
    except RuntimeError as error:
        raise RankFailed(f"{what}: {str(error).splitlines()[0]}") from error
