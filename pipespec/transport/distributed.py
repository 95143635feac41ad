"""The transport of a cluster: every rank is a process, linked to its neighbours by
torch.distributed.

Each batch is one gloo message (`pipespec.transport.wire`), which is encrypted if it leaves the host
(`pipespec.transport.encryption`). A gloo send delivers its payload only once the receiver has
posted a buffer, so the receiver always has some posted (`window`): further batches arrive while the
rank computes the current one, and a hop costs one trip instead of three, however many batches a
slow link holds. As a message may be shorter than the buffer, there is room for the largest batch,
while a small one is a small message. Each link is a gloo group of two ranks, within a host bound to
the loopback interface.

The hidden states are part of the message and pass through CPU memory, which is pinned if the rank
has a GPU."""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from pipespec.core import Batch
from pipespec.errors import RankFailed
from pipespec.system.liveness import Waiting
from pipespec.system.network_interfaces import LOOPBACK
from pipespec.transport.encryption import SEAL_BYTES, Seal, link_key
from pipespec.transport.rendezvous_store import RENDEZVOUS_TIMEOUT_S
from pipespec.transport.transport import LinkKind
from pipespec.transport.wire import Wire, token

# A stage may idle for days between two requests; a neighbour that dies closes its connection.
FOREVER = timedelta(days=3650)
_TAG = 1
# No message has this tag: a receive with it always times out.
UNUSED_TAG = 2
# Of an empty answer to the stop batch. Who has sent that may then close the link: what it was sent
# is read, else the system could drop what the other end has not read.
_STOPPED_TAG = 3
AT_ONCE = timedelta(milliseconds=1)
_SOURCE = re.compile(r"\[[^\[\]\s]+\.\w+:\d+\]\s*")
_DRAWN_BYTES = 16
WINDOW_BYTES = 64 * 2**20


@dataclass(frozen=True)
class _GlooLink:
    """One rank's end of a link: the gloo group of the two ranks, the neighbour's rank in it (0
    sends, 1 receives), and what encrypts or decrypts the messages; None: they are sent in the
    clear."""

    group: Any  # torch's stubs are incomplete
    peer: int

    seal: Seal | None


class DistributedTransport:
    """One rank's links to its neighbours, each a process of its own."""

    def __init__(
        self,
        devices: Sequence[str],
        *,
        store: Store,
        rank: int,
        epoch: int,
        secret: str,
        links: Sequence[LinkKind] | None = None,
        window: int = 1,
        names: Sequence[int] | None = None,
        **limits: Any,
    ) -> None:
        """Connect to the neighbouring ranks, which connect at the same time and exchange their
        addresses through `store`. `devices`: of every rank, the head's first. `links`: how each
        rank but the last is linked to the next; None: all are on one host, and nothing is
        encrypted. `window`: batches that a link may hold, as far as WINDOW_BYTES have room for
        their largest. `names`: of the ranks in messages. `limits`: of a batch, and its type, as of
        `Wire`. Raises RankFailed if a neighbour did not connect in time."""
        links = links or (LinkKind(),) * (len(devices) - 1)
        assert len(links) == len(devices) - 1
        self.rank = rank
        self.returns: DistributedTransport | None = None
        self._names = names or range(len(devices))
        # The sends that may still be under way, and the tensors they read.
        self._outbox: list[tuple[dist.Work, torch.Tensor]] = []
        # The posted receives and their buffers, in the order in which messages fill them.
        self._inbox = deque[tuple[dist.Work, torch.Tensor]]()
        drawn = secrets.token_hex(_DRAWN_BYTES)
        made: dict[int, _GlooLink] = {}  # by the sending rank
        with raises_rank_failed(f"Rank {self._names[rank]} did not meet its neighbours"):
            store.set(f"drawn/{rank}", drawn)
            # Every second link comes first: otherwise each would wait for the one before it.
            for sender in sorted((rank - 1, rank), key=lambda sender: sender % 2):
                if not 0 <= sender < len(links):
                    continue
                peer = 1 if sender == rank else 0
                kind, seal = links[sender], None
                if kind.sealed:
                    of_peer = store.get(f"drawn/{sender + peer}").decode()
                    meeting = (drawn, of_peer) if sender == rank else (of_peer, drawn)
                    seal = Seal(link_key(secret, epoch, meeting, sender), sender)
                of_link = PrefixStore(f"link/{sender}", store)
                group = gloo_group(of_link, 1 - peer, 2, local=kind.local)
                made[sender] = _GlooLink(group, peer, seal)
        self._previous, self._following = made.get(rank - 1), made.get(rank)
        self._device = torch.device(devices[rank])
        self._pinned = self._device.type == "cuda"
        if self._pinned:
            torch.cuda.set_device(self._device)
        self._wire = Wire(epoch, token=token(secret, epoch), **limits)
        self._window = max(min(window, WINDOW_BYTES // self._wire.capacity), 1)
        if self._previous is not None:
            for _ in range(self._window):
                self._post()

    def send(self, batch: Batch) -> None:
        link = self._following
        assert link is not None, "the last rank has no next rank"
        message = self._wire.pack(batch, pinned=self._pinned)
        if link.seal is not None:
            message = link.seal.seal(message)
        with raises_rank_failed(self._lost(self.rank + 1)):
            self._flush(self._window)
            self._outbox.append((link.group.send([message], link.peer, _TAG), message))
            if batch.stop:
                self._flush()
                with GlooWait():
                    link.group.recv([torch.empty(1)], link.peer, _STOPPED_TAG).wait(FOREVER)

    def recv(self) -> Batch:
        link = self._previous
        assert link is not None and self._inbox, (
            "rank 0 receives nothing, nor does any rank after the stop batch"
        )
        work, message = self._inbox[0]
        with raises_rank_failed(self._lost(self.rank - 1)), GlooWait():
            work.wait(FOREVER)
        if link.seal is not None:
            message = link.seal.open(message, pinned=self._pinned)
        batch = self._wire.unpack(message)
        self._inbox.popleft()
        if batch.stop:
            with raises_rank_failed(self._lost(self.rank - 1)), GlooWait():
                link.group.send([torch.empty(1)], link.peer, _STOPPED_TAG).wait(FOREVER)
        else:
            self._post()
        if batch.hidden is not None:
            batch.hidden = batch.hidden.to(self._device, non_blocking=True)
        return batch

    def abort(self) -> None:
        """Close the links from another thread: a thread that waits in `send` or `recv` gets
        RankFailed, unless a part of its message is on its way (`GlooWait`).
        gloo has no call for this, but it closes a link on which a receive has timed out."""
        self._close_links()
        if self.returns is not None:
            self.returns.abort()

    def close(self) -> None:
        if self.returns is not None:
            self.returns.close()
        # Closed explicitly, as an exception that is being handled may keep the groups alive.
        self._close_links()
        self._outbox.clear()
        self._inbox.clear()
        self._previous = self._following = None

    def _close_links(self) -> None:
        for link in (self._previous, self._following):
            if link is not None:
                close_link(link.group, link.peer)

    def _lost(self, other: int) -> str:
        return f"Rank {self._names[self.rank]} lost its link to rank {self._names[other]}"

    def _post(self) -> None:
        link = self._previous
        assert link is not None
        if link.seal is not None:
            message = torch.empty(self._wire.capacity + SEAL_BYTES, dtype=torch.uint8)
        else:
            # A new buffer each time: the hidden states of the last batch are views of the old one.
            message = torch.empty(self._wire.capacity, dtype=torch.uint8, pin_memory=self._pinned)
        with raises_rank_failed(self._lost(self.rank - 1)):
            self._inbox.append((link.group.recv([message], link.peer, _TAG), message))

    def _flush(self, window: int = 1) -> None:
        while len(self._outbox) >= window:
            with GlooWait():
                self._outbox[0][0].wait(FOREVER)
            self._outbox.pop(0)


class GlooWait(Waiting):
    """While its block runs, this thread waits in gloo. gloo does not release every wait when a
    neighbour dies or a link is closed. In torch 2.13, a message that is partly sent or received
    belongs to no list of pending operations, so neither the end of the connection nor an abort
    reaches who waits for it (gloo, tcp/pair.cc, `Pair::signalException`).
    `pipespec.cluster.ranks.heartbeat` looks whether a thread that it has aborted still waits."""

    since: ClassVar[dict[int, float]] = {}  # on the monotonic clock, by thread

    def __enter__(self) -> None:
        self.since[threading.get_ident()] = time.monotonic()
        super().__enter__()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self.since.pop(threading.get_ident(), None)


def gloo_group(store: Store, rank: int, size: int, *, local: bool) -> Any:
    """A gloo group of `size` processes, which find one another through a store of their own.
    `local`: all of them are on one host, so the group is bound to the loopback interface. Raises
    RuntimeError if one of them does not connect within RENDEZVOUS_TIMEOUT_S."""
    kind: Any = dist.ProcessGroupGloo  # torch's stubs are incomplete
    if not local:
        return kind(store, rank, size, timedelta(seconds=RENDEZVOUS_TIMEOUT_S))
    options = kind._Options()
    options._timeout = timedelta(seconds=RENDEZVOUS_TIMEOUT_S)
    options._devices = [kind.create_device(hostname=LOOPBACK)]
    return kind(store, rank, size, options)


def close_link(group: Any, peer: int) -> None:
    """Close the connection to a member of a gloo group, from any thread."""
    with suppress(RuntimeError):
        group.recv([torch.empty(1)], peer, UNUSED_TAG).wait(AT_ONCE)


@contextmanager
def raises_rank_failed(what: str) -> Iterator[None]:
    """Turn errors of torch.distributed into a RankFailed that starts with `what`."""
    try:
        yield
    except RuntimeError as error:
        # gloo's message starts with a position in its source and ends with possible causes.
        cause = _SOURCE.sub("", str(error).splitlines()[0]).partition(" This is typically")[0]
        raise RankFailed(f"{what}: {cause}") from error
