"""A host that has been let in, as the launcher sees it."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pipespec.cluster.join_link import JoinLink
from pipespec.cluster.join_token import Refused
from pipespec.config.hosts import Host

# Seconds until a host must have made the connection for a program; in which a host whose connection
# broke must be back to start one, between two looks.
PROGRAM_S, BACK_S, LOOK_S = 60.0, 5.0, 0.05
# Seconds without a sign of life after which a control connection counts as lost.
SILENCE_S = 15.0


class HostSession:
    """A host that has been let in, until it has left. Its control connection may break and come
    back.

    Attributes:
        leaving: the host asks to leave.
        changed: set whenever something happens to it.
    """

    def __init__(self, host: Host, key: bytes) -> None:
        self.host, self.key = host, key
        self.leaving = False
        self.changed = threading.Event()
        self._link: JoinLink | None = None
        self._lost_at = time.monotonic()
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[threading.Event, list[JoinLink]]] = {}
        self._over = False

    @property
    def dismissed(self) -> bool:
        """Whether it was told to end."""
        return self._over

    @property
    def lost_s(self) -> float:
        """For how many seconds there has been no connection; 0: there is one."""
        return 0.0 if self._link is not None else time.monotonic() - self._lost_at

    def tell(self, sentence: str) -> None:
        """Have the host print a sentence."""
        self._send({"say": sentence})

    def keep(self, sentence: str) -> None:
        """Have the host print why it cannot leave, and stay."""
        self._send({"say": sentence, "stays": True})

    def dismiss(self, sentence: str, *, failed: bool) -> None:
        """Have the host print a last sentence and end, unless it was dismissed already."""
        with self._lock:
            if self._over:
                return
            self._over = True
        self._send({"over": sentence, "failed": failed})
        if (link := self._link) is not None:
            link.end()

    def start(self, module: str, args: Sequence[str]) -> JoinLink:
        """The connection to a program that the host has started. Raises Refused."""
        number, came, links = next(self._numbers), threading.Event(), list[JoinLink]()
        self._waiting[number] = came, links
        deadline = time.monotonic() + BACK_S
        try:
            while not self._send({"start": number, "module": module, "args": list(args)}):
                if self._over or time.monotonic() > deadline:
                    raise Refused("it is not connected")
                time.sleep(LOOK_S)  # it connects anew
            if not came.wait(PROGRAM_S):
                raise Refused(f"it has started nothing within {PROGRAM_S:g} s")
            return links[0]
        finally:
            del self._waiting[number]

    def bring(self, number: int, link: JoinLink) -> bool:
        """The host has made the connection for a program; whether it is waited for."""
        came, links = self._waiting.get(number, (None, []))
        if came is None or links:
            return False
        links.append(link)
        came.set()
        return True

    def use(self, link: JoinLink) -> None:
        """This is the control connection from now on."""
        with self._lock:
            before, self._link = self._link, link
        if before is not None:
            before.end()  # the host has made another
        if self._over:
            link.end()

    def listen(self, link: JoinLink) -> None:
        """Read a control connection until it breaks."""
        try:
            while (message := link.receive(SILENCE_S)) is not None:
                if "leave" in message:
                    self.leaving = True
                    self.changed.set()
        except OSError:
            pass
        with self._lock:
            if self._link is link:
                self._link, self._lost_at = None, time.monotonic()
        self.changed.set()

    def sign_of_life(self) -> None:
        """Show the host that the launcher lives."""
        self._send({})

    def _send(self, message: Mapping[str, Any]) -> bool:
        link = self._link
        if link is None:
            return False
        try:
            link.send(message)
        except OSError:
            link.end()
            return False
        return True
