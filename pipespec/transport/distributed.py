"""Ranks as processes, joined by torch.distributed.

One message per batch over gloo (`pipespec.transport.wire`). Two facts about gloo decide its shape:

- A send delivers its payload only once the receiver has posted a buffer. So the receiver always
  has one posted: the next batch arrives while the rank computes the current one, and a hop costs
  one trip over the network instead of three.
- What arrives may be shorter than the posted buffer. So the buffer has room for the largest
  batch, and one row still sends one row.

The hidden states are part of the message, by way of CPU memory, which is pinned where there is a
GPU: torch keeps what was pinned once and hands it out again. With the backend `nccl`, which is for
the GPUs of one host, NCCL carries them behind the message. NCCL's own answer to an error is to end
the process, and the weights with it, which torchrun's agent asks for; that is turned off, and a
rank that waits in one of its kernels is freed by `abort`.

Who spins while a step is under way looks at the memory that the message is written to, as gloo
cannot be asked. `benchmarks/transport.py` measures a hop beside a bare gloo ping-pong.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from pipespec.core import Batch
from pipespec.errors import RankFailed
from pipespec.system.waiting import spin
from pipespec.transport.wire import Wire, token

# How long the ranks wait for one another when they meet, all of them being ready.
MEET_S = 10.0
# A stage may idle for days between two requests; a neighbour that dies closes its connection.
FOREVER = timedelta(days=3650)
_TAG = 1
# Of messages that nobody sends.
NOBODY = 2
AT_ONCE = timedelta(milliseconds=1)
_SOURCE = re.compile(r"\[[^\[\]\s]+\.\w+:\d+\]\s*")
_IN_FILE = "file:"
_FOLDER = "pipespec-meeting-"


class Meeting:
    """Where ranks find one another's addresses: `place` says where, for `join_meeting`.

    What they keep in the `store` are addresses and counts; nothing of it is unpickled.
    """

    def __init__(self, store: Store, place: str, folder: Path | None = None):
        self.store = store
        self.place = place
        self._folder = folder

    def close(self) -> None:
        """Remove what was made for it, once no rank looks there any more."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def host_meeting(address: str | None = None, port: int = 0) -> Meeting:
    """A place at which ranks can meet: in a file that only this user can open, or, given an
    address of this machine, at that address only.

    `port` 0 is any free one. Raises RankFailed if it is taken.
    """
    if address is None:
        folder = Path(tempfile.mkdtemp(prefix=_FOLDER))
        file = str(folder / "store")
        return Meeting(_in_file(file), f"{_IN_FILE}{file}", folder)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise RankFailed(
            f"The ranks cannot meet at {address}:{port} ({os.strerror(error.errno or 0)})."
        ) from error
    port = listener.getsockname()[1]
    with blaming(f"The ranks cannot meet at {address}:{port}"):
        store = TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=MEET_S),
            master_listen_fd=listener.detach(),
        )
    return Meeting(store, f"{address}:{port}")


def join_meeting(place: str) -> Meeting:
    """The meeting that another rank hosts at this place. Raises RankFailed."""
    if place.startswith(_IN_FILE):
        return Meeting(_in_file(place.removeprefix(_IN_FILE)), place)
    address, _, port = place.rpartition(":")
    with blaming(f"The ranks' meeting at {place} was not found"):
        store = TCPStore(address, int(port), is_master=False, timeout=timedelta(seconds=MEET_S))
    return Meeting(store, place)


def _in_file(file: str) -> Store:
    store = FileStore(file)
    store.set_timeout(timedelta(seconds=MEET_S))
    return store


class DistributedTransport:
    """One rank's links to its neighbours, each a process of its own."""

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        wire: Wire,
        device: torch.device,
        meeting: Meeting | None = None,
        *,
        spins: bool = False,
    ) -> None:
        """Use the process group that exists already; `connect` makes it first."""
        self.rank = rank
        self._meeting = meeting
        self._last_rank = num_ranks - 1
        self._wire = wire
        self._device = device
        self._pinned = device.type == "cuda"
        self._spins = spins
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
        meeting: Meeting,
        rank: int,
        epoch: int,
        secret: str,
        max_rows: int,
        max_released: int = 1,
        max_kept: int = 0,
        hidden_size: int,
        dtype: torch.dtype,
        nccl: bool = False,
        spins: bool = False,
    ) -> DistributedTransport:
        """Meet the other ranks (`host_meeting`, `join_meeting`).

        `devices` holds every rank's device, the head's first; `max_rows`, `max_released` and
        `max_kept` limit a batch; `hidden_size` and `dtype` are the target's; `nccl` is what carries
        hidden states, instead of gloo; `spins`: see `pipespec.system.waiting`. Only ranks of the
        same epoch and secret find one another.

        Raises:
            RankFailed: a rank did not come.
        """
        if nccl:
            os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        # A meeting that failed leaves torch counting groups, and the count is in their names:
        # those who were there would not find those who come anew.
        dist.distributed_c10d._world.group_count = 0
        proof = token(secret, epoch)
        with blaming("The ranks did not meet"):
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if nccl else "gloo",
                # Ranks of another secret look for other names. Who can reach the store can list
                # them, so they are not made of what proves a message's sender.
                store=PrefixStore("{}:{}".format(*token(secret, epoch, "meeting")), meeting.store),
                rank=rank,
                world_size=len(devices),
                timeout=timedelta(seconds=MEET_S),
            )
        device = torch.device(devices[rank])
        if device.type == "cuda":
            torch.cuda.set_device(device)
        wire = Wire(
            epoch,
            max_rows,
            hidden_size,
            dtype,
            inline=not nccl,
            token=proof,
            max_released=max_released,
            max_kept=max_kept,
        )
        return cls(rank, len(devices), wire, device, meeting, spins=spins)

    def send(self, batch: Batch) -> None:
        assert self.rank < self._last_rank, "the last rank has nobody to send to"
        message = self._wire.pack(batch, pinned=self._pinned)
        with blaming(f"Rank {self.rank} lost its link to rank {self.rank + 1}"):
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
        if self._spins:
            spin(lambda: self._wire.arrived(message))
        with blaming(lost):
            work.wait(FOREVER)
        batch = self._wire.unpack(message)
        self._inbox = None
        if not batch.stop:
            with blaming(lost):
                self._post()
        if self._wire.inline and batch.hidden is not None:
            batch.hidden = batch.hidden.to(self._device, non_blocking=True)
        elif not self._wire.inline and self._wire.has_hidden(message):
            shape = (len(batch), self._wire.hidden_size)
            batch.hidden = torch.empty(shape, dtype=self._wire.dtype, device=self._device)
            if len(batch):
                with blaming(lost):
                    dist.recv(batch.hidden, self.rank - 1)
        return batch

    def abort(self) -> None:
        """Close the links from another thread: whoever waits in `send` or `recv` gets RankFailed.

        gloo knows no such call, but it closes a link on which a receive has timed out.
        """
        for neighbour in (self.rank - 1, self.rank + 1):
            if 0 <= neighbour <= self._last_rank:
                with suppress(RuntimeError):
                    work = dist.irecv(torch.empty(1), neighbour, tag=NOBODY)
                    assert work is not None
                    work.wait(AT_ONCE)
        if not self._wire.inline:
            dist.distributed_c10d._abort_process_group()

    def close(self) -> None:
        self._outbox.clear()
        self._inbox = None
        if dist.is_initialized():
            dist.destroy_process_group()
        # NCCL looks there again for its first message, so not before.
        if self._meeting is not None:
            self._meeting.close()

    def _post(self) -> None:
        # A fresh buffer each time: the hidden states of the last batch still lie in theirs.
        message = torch.empty(self._wire.capacity, dtype=torch.uint8, pin_memory=self._pinned)
        self._wire.expect(message)
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
            self._outbox[0][0].wait(FOREVER)
            self._outbox.pop(0)


@contextmanager
def blaming(what: str) -> Iterator[None]:
    """Turn what torch.distributed raises into a RankFailed that starts with `what`."""
    try:
        yield
    except RuntimeError as error:
        # gloo begins with a place in its source, and goes on with guesses of what happened.
        cause = _SOURCE.sub("", str(error).splitlines()[0]).partition(" This is typically")[0]
        raise RankFailed(f"{what}: {cause}") from error
