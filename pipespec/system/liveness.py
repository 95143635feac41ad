"""Whether a process makes progress, as another one sees it. A worker counts what it does in memory
that both share (`progress`), and states for how long the next count may be away. The other process
compares (`Watch`), and counts only time in which it looked itself and no thread of the worker was
waiting for a processor. A worker that waits may do so for ever, but needs no processor for it; one
that burns time all the same loops."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from mmap import mmap
from pathlib import Path

import psutil

from pipespec.system.cores import processor_times

# Seconds between two looks of a parent; a longer pause counts as twice that.
LOOK_S = 0.5
# Seconds without progress after which a loop is late, or so many times the usual time of its step.
LATE_S, USUAL_STEPS = 10.0, 20
# The same while it meets its neighbours, and while it loads, compiles, captures or measures; there
# each MiB that is read, written or mapped is progress too.
MEETING_S, LOADING_S = 60.0, 600.0
# Seconds of processor time in a row that a process may spend while it waits, and for which a signal
# may have stopped it. A share of a processor below SHARE is none.
LOOP_S, STOPPED_S, SHARE = 8.0, 2.0, 0.1
# How fast the usual time of a step follows the last one.
FOLLOW = 0.2

# What is shared, int64 each: counts so far, milliseconds until the next one is due (0: the process
# waits), and the signs of life of its other threads.
_COUNT, _LIMIT_MS, _BEATS = range(3)
SIZE = 24
_WAITING = 0


class Progress:
    """The progress of this process; only the thread that shares it counts."""

    def __init__(self) -> None:
        self.num_loaded, self._loading = 0, threading.Lock()
        self.share(memoryview(bytearray(SIZE)))

    def share(self, memory: mmap | memoryview) -> None:
        """Count in this memory from now on, and in this thread; the process loads."""
        self._cells = memoryview(memory).cast("q")
        self._thread = threading.get_ident()
        self.begin(LOADING_S)

    def begin(self, limit_s: float) -> None:
        """Another part of the work begins, in which each count is due after `limit_s` seconds."""
        if threading.get_ident() == self._thread:
            self._base_ms = round(limit_s * 1000)
            self.count()

    @contextmanager
    def part(self, limit_s: float) -> Iterator[None]:
        """The same within the block."""
        before_ms = self._base_ms
        self.begin(limit_s)
        try:
            yield
        finally:
            self.begin(before_ms / 1000)

    def count(self, limit_ms: int | None = None) -> None:
        """Count; the next is due after `limit_ms` milliseconds, by default as `begin` has said."""
        if threading.get_ident() == self._thread:
            self._cells[_LIMIT_MS] = self._base_ms if limit_ms is None else limit_ms
            self._cells[_COUNT] += 1

    def count_step(self, late_s: float) -> None:
        """Count; the next is due after `late_s` seconds, or later as `begin` has said."""
        self.count(max(self._base_ms, round(late_s * 1000)))

    def beat(self) -> None:
        """Another thread of this process runs."""
        self._cells[_BEATS] += 1

    def load(self, num_bytes: int) -> None:
        """So many bytes of weights more are in memory; any thread may say so."""
        with self._loading:
            self.num_loaded += num_bytes

    def describe(self) -> str:
        """The counts so far, whether the process works, and the bytes that it has loaded."""
        working = int(self._cells[_LIMIT_MS] != _WAITING)
        return f"{self._cells[_COUNT]} {working} {self.num_loaded}"


progress = Progress()


class Waiting:
    """While its block runs, this process waits for others."""

    def __enter__(self) -> None:
        progress.count(_WAITING)

    def __exit__(self, *_: object) -> None:
        progress.count()


class StepTimes:
    """The usual times of a model's steps, measured on them, by the bits of their numbers of rows. A
    `step` is late after USUAL_STEPS times the usual time of so many rows."""

    def __init__(self) -> None:
        self._usual_s: dict[int, float] = {}

    @contextmanager
    def step(self, rows: int) -> Iterator[None]:
        usual_s = self.usual_s(rows)
        progress.count_step(LOADING_S if usual_s is None else USUAL_STEPS * usual_s)
        began = time.monotonic()
        yield
        took_s, bits = time.monotonic() - began, rows.bit_length()
        before_s = self._usual_s.get(bits, took_s)
        self._usual_s[bits] = before_s + FOLLOW * (took_s - before_s)

    def usual_s(self, rows: int) -> float | None:
        """The usual time of a step with so many rows, or what follows from fewer; None: unknown."""
        bits = rows.bit_length()
        if fewer := [each for each in self._usual_s if each <= bits]:
            return self._usual_s[max(fewer)] * 2 ** (bits - max(fewer))
        return self._usual_s[min(self._usual_s)] if self._usual_s else None


class Watch:
    """A parent's view of the progress of the process `pid`, which counts in `memory`."""

    def __init__(self, memory: mmap, pid: int):
        self._cells, self._process = memoryview(memory).cast("q"), psutil.Process(pid)
        self._looked_at = time.monotonic()
        self._seen = (-1, 0)
        self._late_s = self._stopped_s = 0.0
        self._usage: tuple[int, int, int] | None = None  # at the last look without progress
        self._mib = 0

    def look(self) -> str | None:
        """Why the process must be ended, if it must; called every LOOK_S seconds."""
        now = time.monotonic()
        passed_s = min(now - self._looked_at, 2 * LOOK_S)
        self._looked_at = now
        with suppress(psutil.Error):  # it has ended
            stopped = self._process.status() == psutil.STATUS_STOPPED
            self._stopped_s = self._stopped_s + passed_s if stopped else 0.0
            if self._stopped_s > STOPPED_S:
                return "a signal had stopped it"
            count, limit_ms, beats = self._cells[:3]
            before, self._seen = self._seen, (count, beats)
            if count != before[0]:
                self._late_s, self._usage = 0.0, None
            elif limit_ms == _WAITING:
                main_s, all_s, _ = self._used()
                # Other threads may compute meanwhile, unless they keep Python from running.
                used_s = main_s if beats != before[1] else all_s
                self._late_s = self._late_s + used_s if used_s > SHARE * passed_s else 0.0
                if self._late_s > LOOP_S:
                    return "it looped where it should wait"
            else:
                self._late_s += max(passed_s - self._used()[2], 0.0)
                if limit_ms >= LOADING_S * 1000 and self._has_moved():
                    self._late_s = 0.0
                if self._late_s > limit_ms / 1000:
                    return f"it made no progress for {limit_ms / 1000:.0f} s"
        return None

    def _used(self) -> tuple[float, float, float]:
        """Seconds since the last look in which the main thread ran, in which any threads did, and
        in which they were ready to run, but did not; zeros on systems that do not tell."""
        main_ns = all_ns = delayed_ns = 0
        for thread in Path(f"/proc/{self._process.pid}/task").glob("*"):
            with suppress(OSError):  # the thread has ended
                ran_ns, waited_ns = processor_times(thread)
                main_ns += ran_ns * (thread.name == str(self._process.pid))
                all_ns, delayed_ns = all_ns + ran_ns, delayed_ns + waited_ns
        usage = main_ns, all_ns, delayed_ns
        before, self._usage = self._usage or usage, usage
        main_s, all_s, delayed_s = (max(b - a, 0) / 1e9 for a, b in zip(before, usage, strict=True))
        return main_s, all_s, delayed_s

    def _has_moved(self) -> bool:
        """Whether a MiB was read, written or mapped since this was true last."""
        num_bytes = self._process.memory_info().rss
        if hasattr(self._process, "io_counters"):
            moved = self._process.io_counters()
            num_bytes += moved.read_chars + moved.write_chars
        more, self._mib = num_bytes >> 20 > self._mib, max(num_bytes >> 20, self._mib)
        return more
