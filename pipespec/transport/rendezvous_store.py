"""The store through which ranks exchange the addresses of their links, before they have any.
torch.distributed needs a `Store` for that. Its own are a server without a password (TCPStore) and a
file. This one reads and writes a table that the caller supplies: a hash in the cluster's Redis
(`pipespec.controller.membership`)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

# How long ranks wait for one another to connect, once all of them are ready.
RENDEZVOUS_TIMEOUT_S = 30.0
# Seconds between two looks at the table.
POLL_S = 0.01


class Table(Protocol):
    """Values by name that all ranks of an epoch share; used by one thread at a time."""

    def read(self, names: Sequence[str]) -> list[bytes | None]:
        """The values of these names; None: not written yet."""

    def write(self, name: str, value: bytes) -> None:
        """Set a value."""


class RendezvousStore(Store):
    """A torch.distributed store on top of a `Table`. `check` is called while the store waits, and
    may raise to end the wait. torch's C++ code does not keep the Python object alive, so the caller
    must hold a reference."""

    def __init__(self, table: Table, check: Callable[[], None] = lambda: None):
        super().__init__()
        self._table = table
        self._check = check
        self._lock = threading.Lock()  # NCCL calls from threads of its own

    def set(self, key: str, value: str | bytes) -> None:
        with self._lock:
            self._table.write(key, value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        """The value of a key, once it is set. Raises as `wait` does."""
        return self._values([key], RENDEZVOUS_TIMEOUT_S)[0]

    def check(self, keys: Sequence[str]) -> bool:
        return None not in self._read(keys)

    def wait(
        self, keys: Sequence[str], timeout: timedelta = timedelta(seconds=RENDEZVOUS_TIMEOUT_S)
    ) -> None:
        """Wait until all keys are set. Raises DistStoreError after `timeout`."""
        self._values(keys, timeout.total_seconds())

    def _values(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        """The values of these keys, once all are set. The end of an epoch deletes them, and then
        `check` says so: what was set a moment ago may be missing now."""
        deadline = time.monotonic() + timeout_s
        while True:
            found = [value for value in self._read(keys) if value is not None]
            if len(found) == len(keys):
                return found
            self._check()
            if time.monotonic() > deadline:
                raise DistStoreError(f"no answer within {timeout_s:g} seconds")
            time.sleep(POLL_S)

    def _read(self, keys: Sequence[str]) -> list[bytes | None]:
        with self._lock:
            return self._table.read(keys)
