"""A host that has joined, as the launcher sees it."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import asyncssh

from pipespec.cluster.host_link import loop
from pipespec.cluster.host_link.connection import Connection, LinkFailed
from pipespec.config.hosts import JOINED, Host

# Seconds in which a host whose connection broke must be back to start a program, between two looks,
# and for a last message to leave.
BACK_S, LOOK_S, LEAVING_S = 5.0, 0.05, 1.0

_numbers = itertools.count(1)
_sessions: weakref.WeakValueDictionary[str, HostSession] = weakref.WeakValueDictionary()


@asynccontextmanager
async def connected(host: Host) -> AsyncIterator[Connection]:
    """The connection of a host that has joined. Raises LinkFailed."""
    session = _sessions.get(host.ssh or "")
    if session is None:
        raise LinkFailed("it has left")
    yield await session.connection()


def is_away(host: Host) -> bool:
    """Whether a host that has joined is not connected now."""
    session = _sessions.get(host.ssh or "")
    return session is not None and session.lost_s > 0


def message(**fields: Any) -> bytes:
    """A line of what launcher and host tell each other."""
    return json.dumps(fields).encode() + b"\n"


class HostSession:
    """A host that has been let in, until it has left. Its connection may break and come back.
    `leaving`: the host asks to leave. `dismissed`: it was told to end. `changed`: set whenever
    something happens to it."""

    def __init__(self, name: str, address: str, devices: tuple[str, ...] = ("cpu",)) -> None:
        self.host = Host(name, address, f"{JOINED}{next(_numbers)}", devices=devices)
        self.leaving = False
        self.changed = threading.Event()
        self._connection: Connection | None = None
        self._control: asyncssh.SSHWriter[bytes] | None = None
        self._lost_at = time.monotonic()
        self._ending = threading.Lock()
        self.dismissed = False
        _sessions[self.host.ssh or ""] = self

    @property
    def lost_s(self) -> float:
        """For how many seconds there has been no connection; 0: there is one."""
        return 0.0 if self._connection is not None else time.monotonic() - self._lost_at

    def ask_to_leave(self) -> None:
        self.leaving = True
        self.changed.set()

    def tell(self, sentence: str, *, stays: bool = False) -> None:
        """Have the host print a sentence; `stays`: it is why it cannot leave."""
        loop.soon(self._send, message(say=sentence, stays=stays))

    def dismiss(self, sentence: str, *, failed: bool) -> None:
        """Have the host print a last sentence and end, unless it was dismissed already."""
        with self._ending:
            if self.dismissed:
                return
            self.dismissed = True
        loop.call(self._end(message(over=sentence, failed=failed)))

    def _send(self, line: bytes) -> None:
        if self._control is not None:
            self._control.write(line)

    async def _end(self, line: bytes) -> None:
        if self._connection is None:
            return
        connection, _ = self._connection
        with suppress(OSError, asyncssh.Error):
            self._send(line)
        connection.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(connection.wait_closed(), LEAVING_S)

    # --- in the loop --------------------------------------------------------------------------

    async def connection(self) -> Connection:
        deadline = time.monotonic() + BACK_S
        while (found := self._connection) is None or self.dismissed:
            if self.dismissed or time.monotonic() > deadline:
                raise LinkFailed("it has left" if self.dismissed else "it is not connected")
            await asyncio.sleep(LOOK_S)
        return found

    async def attend(
        self, connection: Connection, control: asyncssh.SSHClientProcess[bytes]
    ) -> None:
        """Use a connection, the newest one, until it ends; `control` talks with the host."""
        before, self._connection, self._control = self._connection, connection, control.stdin
        if before is not None:
            before[0].abort()  # the host has made another
        if self.dismissed:
            connection[0].close()
        try:
            try:
                async for line in control.stdout:
                    if json.loads(line).get("leave"):
                        self.ask_to_leave()
            except (ValueError, AttributeError):  # that is no message
                connection[0].close()
            except (OSError, asyncssh.Error):
                pass
            await connection[0].wait_closed()
        finally:
            if self._connection is connection:
                self._connection, self._control = None, None
                self._lost_at = time.monotonic()
            self.changed.set()
