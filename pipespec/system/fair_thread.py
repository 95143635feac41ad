"""A thread for calls that no loop should wait long for, such as the masks of grammars."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

Result = TypeVar("Result")
# Seconds of processor time of a call after which the thread rests.
SLOW_S = 0.001
# The share of a usual step for which a loop waits, and of a first one.
SHARE, FIRST_STEP_MS = 0.2, 5.0


class FairThread:
    """Calls beside a loop that waits for them only as long as it grants. Those of different keys
    share the thread equally (start-time fair queueing). After a slow call the thread rests for as
    long as that took, as others need the cores."""

    def __init__(self) -> None:
        self._calls: dict[str, deque[tuple[Callable[[], Any], Future[Any]]]] = {}  # by key
        self._used_s: dict[str, float] = {}  # virtual time of the same keys
        self._now_s = 0.0  # of the call that runs
        self._changed = threading.Condition()
        self._left_s = math.inf
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def submit(self, key: str, call: Callable[[], Result]) -> Future[Result]:
        """Those of one key run in their order."""
        future: Future[Result] = Future()
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="fair", daemon=True)
                self._thread.start()
            if key not in self._calls:
                self._used_s[key] = max(self._used_s.get(key, 0.0), self._now_s)
            self._calls.setdefault(key, deque()).append((call, future))
            self._changed.notify()
        return future

    def grant_share(self, usual_ms: float | None) -> None:
        """Let all calls of `wait_for` until the next grant wait together for a share of a step that
        usually takes so long; None: not known yet. Without a grant they wait until the end."""
        self._left_s = SHARE * (FIRST_STEP_MS if usual_ms is None else usual_ms) / 1e3

    def wait_for(self, future: Future[Any]) -> bool:
        """Whether the call, or a compilation, is done, at once or within what is granted."""
        if not future.done() and self._left_s > 0:
            began = time.monotonic()
            wait([future], None if self._left_s == math.inf else self._left_s)
            self._left_s -= time.monotonic() - began
        return future.done()

    def close(self) -> None:
        """End the thread. Calls that it has not begun are dropped."""
        with self._changed:
            self._closed.set()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._calls or self._closed.is_set()):
                    self._used_s.clear()
                    self._now_s = 0.0
                    self._changed.wait()
                if self._closed.is_set():
                    return
                key = min(self._calls, key=self._used_s.__getitem__)
                self._now_s = self._used_s[key]
                call, future = self._calls[key].popleft()
                if not self._calls[key]:
                    del self._calls[key]
            began = time.thread_time()
            try:
                future.set_result(call())
            except Exception as error:  # noqa: BLE001 - raised where its result is read
                future.set_exception(error)
            took = time.thread_time() - began
            with self._changed:
                self._used_s[key] += took
            if took > SLOW_S:
                self._closed.wait(took)
