"""The steps of a host that joins or leaves: each has seconds of its own, which are shown as they
pass, and ends early when the host leaves or fails."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from time import monotonic, sleep
from typing import TypeVar

from pipespec.errors import HostFailed

T = TypeVar("T")
# Seconds between two looks at what is waited for, and between two sentences.
LOOK_S, SHOW_S = 0.05, 10.0


class HostSteps:
    """The steps of the host `name`, for one thread. `tell` is called with sentences; `require`
    raises PipespecError when the host does not go on."""

    def __init__(self, name: str, tell: Callable[[str], None], require: Callable[[], None]) -> None:
        self._name, self._tell, self._require = name, tell, require
        self.over = threading.Event()  # whether what is still done for the host is in vain
        self._what, self._limit_s = "", math.inf
        self._began = self._shown = monotonic()

    def begin(self, what: str, limit_s: float) -> None:
        """A step begins, a clause, which may take so many seconds from the last `progress` on."""
        self._what, self._limit_s = what, limit_s
        self._began = self._shown = monotonic()
        self._tell(f"{what} (at most {limit_s:g} s)")

    def progress(self, *_: object) -> None:
        """The step goes on: its seconds count from now."""
        self._began = monotonic()

    def _check(self) -> None:
        self._require()
        passed = (now := monotonic()) - self._began
        if passed > self._limit_s:
            raise HostFailed(
                f"{self._name}: {self._what}, but not within {self._limit_s:g} s; check the load "
                "of the host and the link to it"
            )
        if now - self._shown >= SHOW_S:
            self._shown = now
            self._tell(f"{self._what}: {passed:.0f} of {self._limit_s:g} s")

    def run(self, work: Callable[[], T]) -> T:
        """What the work returns or raises, which may begin further steps. One that ends early is
        left to itself: it ends with the host's connection, or by `over`."""
        found: Future[T] = Future()

        def do() -> None:
            try:
                found.set_result(work())
            except BaseException as error:  # noqa: BLE001 - it is the caller's
                found.set_exception(error)

        threading.Thread(target=do, daemon=True).start()
        try:
            self.wait(found.done)
        except BaseException:
            self.over.set()
            raise
        return found.result()

    def wait(self, until: Callable[[], bool], *, limited: bool = True) -> None:
        """Look until something holds, which takes seconds of the step if it is `limited`. Raises
        HostFailed if it takes too long, and what `require` raises."""
        while not until():
            if not limited:
                self.progress()
            self._check()
            sleep(LOOK_S)
