"""Who is alive and which epoch it is: what holds a cluster together between its epochs. Every
worker of a cluster (a process that can hold a rank) renews a *lease*, a key that expires, with its
process id and its progress. Workers report faults in a stream of *suspicions*. The launcher
(`pipespec.cluster.recovery.recovery`) reads both and begins the next epoch, whose *assignment* maps
workers to ranks; the stream of assignments wakes the workers that wait for it."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pipespec.controller.cluster_status import numbers
from pipespec.controller.lua_scripts import evalsha
from pipespec.controller.redis_connection import ANSWER_TIMEOUT_S, RedisClient

# How long a lease lasts. That one has run out is no fault.
LEASE_S = 2.0
# The same of the launcher.
LAUNCHER_LEASE_S = 5.0
# Suspicions that are kept.
KEEP_SUSPICIONS = 1000
# A wait that Redis ends so much later than it should is begun anew.
LATE_S = 1.0
# How often to check which workers have joined.
POLL_S = 0.02


@dataclass(frozen=True)
class Epoch:
    """One life of the cluster: its number, and its assignment as text."""

    number: int
    assignment: str


@dataclass(frozen=True)
class Suspicion:
    """A fault that a worker reports in an epoch; `start_failed`: the worker cannot start at all."""

    epoch: int
    worker: str
    reason: str
    start_failed: bool = False


class Membership(RedisClient):
    """A client of the leases, suspicions and epochs of a namespace. Not for several threads. Raises
    Unreachable whenever Redis is gone."""

    def __init__(self, url: str, namespace: str, *, answer_s: float = ANSWER_TIMEOUT_S):
        """A Redis that takes longer than `answer_s` seconds to answer counts as gone."""
        super().__init__(url, namespace, answer_s)
        self._last_suspicion = "0"
        self._launcher_renewed_at = -math.inf

    def renew(self, worker: str, pid: int, progress: str = "0 1 0") -> None:
        """Renew the lease of a worker for LEASE_S, with its `progress` (`Progress.describe`)."""
        beat = f"{pid} {progress} {time.monotonic_ns()}"
        self._pipe.call("SET", self._keys.lease(worker), beat, "PX", round(LEASE_S * 1000))

    def renew_launcher(self) -> None:
        """Show the workers that the launcher lives, for most of LAUNCHER_LEASE_S seconds."""
        if (now := time.monotonic()) - self._launcher_renewed_at > LAUNCHER_LEASE_S / 5:
            self._pipe.call("SET", self._keys.launcher, 1, "PX", round(LAUNCHER_LEASE_S * 1000))
            self._launcher_renewed_at = now

    def launcher_lives(self) -> bool:
        return bool(self._pipe.call("EXISTS", self._keys.launcher))

    def alive(self, workers: Sequence[str]) -> dict[str, int]:
        """Those of the workers whose leases have not run out, and their process ids."""
        return {worker: int(beat.split()[0]) for worker, beat in self.beats(workers).items()}

    def beats(self, workers: Sequence[str]) -> dict[str, bytes]:
        """The leases of those workers: each renewal changes a worker's."""
        held = self._pipe.call("MGET", *map(self._keys.lease, workers))
        return {worker: beat for worker, beat in zip(workers, held, strict=True) if beat}

    def loaded(self, workers: Sequence[str]) -> dict[str, int]:
        """How many bytes of weights those of the workers that live have loaded."""
        return {worker: int(beat.split()[3]) for worker, beat in self.beats(workers).items()}

    def epoch(self, after: int, timeout: float) -> Epoch | None:
        """The newest epoch later than `after`; None if none begins within `timeout` seconds."""
        entry = self._read(self._keys.assignments, f"{after}-0", timeout)
        if not entry:
            return None
        number, fields = entry[-1]
        return Epoch(int(number.split(b"-")[0]), fields[1].decode())

    def suspect(self, epoch: int, worker: str, reason: str, *more: object) -> None:
        fields = ("epoch", epoch, "member", worker, "reason", reason, *more)
        self._pipe.call("XADD", self._keys.suspicions, "MAXLEN", "~", KEEP_SUSPICIONS, "*", *fields)

    def report_failed_start(self, worker: str, reason: str) -> None:
        epoch = int(self._pipe.call("GET", self._keys.epoch) or 0)
        self.suspect(epoch, worker, reason, "start_failed", 1)

    def suspicions(self, timeout: float) -> list[Suspicion]:
        """The suspicions since the last call, waiting up to `timeout` seconds for the first."""
        found = self._read(self._keys.suspicions, self._last_suspicion, timeout)
        if found:
            self._last_suspicion = found[-1][0].decode()
        return [
            Suspicion(int(fields[1]), fields[3].decode(), fields[5].decode(), len(fields) > 6)
            for _, fields in found
        ]

    def note_fault(self, epoch: int, reason: str) -> None:
        """Keep what ended an epoch, with the time of this machine, for those who look later."""
        at = time.strftime("%Y-%m-%d %H:%M:%S")
        self._pipe.call("SET", self._keys.fault, f"{at}, epoch {epoch}: {reason}")

    def totals(self) -> dict[str, int]:
        return numbers(self._pipe.call("HGETALL", self._keys.totals))

    def count(self, counts: Mapping[str, int]) -> None:
        """Set some of those. Each has one writer only."""
        pairs = [item for pair in counts.items() for item in pair]
        self._pipe.call("HSET", self._keys.totals, *pairs)

    def attached(self, epoch: int) -> dict[int, int]:
        found = numbers(self._pipe.call("HGETALL", self._keys.ranks(epoch)))
        return {int(rank): pid for rank, pid in found.items()}

    def follow(self, epoch: int, worker: str) -> None:
        """Join an epoch as a follower of a rank. Raises StaleEpoch."""
        self._pipe.load_scripts()
        keys = self._keys.joining(epoch, self._keys.followers(epoch))
        self._pipe.call(*evalsha("join_epoch", keys, epoch, worker, os.getpid(), "", "", ""))

    def followers(self, epoch: int) -> dict[str, int]:
        return numbers(self._pipe.call("HGETALL", self._keys.followers(epoch)))

    def await_followers(self, epoch: int, workers: Sequence[str], timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while not self.followers(epoch).keys() >= set(workers):
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True

    def await_attached(self, epoch: int, count: int, timeout: float) -> dict[int, int]:
        """The ranks that have joined an epoch, with their process ids; waits until there are
        `count` or time is up."""
        deadline = time.monotonic() + timeout
        while True:
            joined = self.attached(epoch)
            if len(joined) >= count or time.monotonic() >= deadline:
                return joined
            time.sleep(POLL_S)

    def progress(self) -> tuple[tuple[int, int], ...]:
        length = f"{self._keys.requests}:*->length"
        found = self._pipe.call(
            "SORT", self._keys.admitted, "BY", "nosort", "GET", "#", "GET", length
        )
        return tuple(
            (int(number), int(length or 0))
            for number, length in zip(found[::2], found[1::2], strict=True)
        )

    def lengths(self, requests: Iterable[int]) -> dict[int, int]:
        """The lengths of the sequences of those requests that the log has, ended or not."""
        found = {
            number: self._pipe.call("HGET", self._keys.request(number), "length")
            for number in requests
        }
        return {number: int(length) for number, length in found.items() if length is not None}

    def finished(self) -> int:
        return int(self._pipe.call("GET", self._keys.finished) or 0)

    def oldest_step(self, epoch: int) -> int:
        """The oldest step of an epoch that is not complete; it rises as long as all ranks work."""
        return int(self._pipe.call("HGET", self._keys.graph(epoch), "floor") or 0)

    def idle(self) -> bool:
        admitted = self._pipe.call("ZCARD", self._keys.admitted)
        return not admitted and not self._pipe.call("ZCARD", self._keys.queue)

    def _read(self, key: str, after: str, timeout: float) -> list[tuple[bytes, list[bytes]]]:
        block = max(1, round(timeout * 1000))
        self._pipe.flush()
        self._pipe.send("XREAD", "BLOCK", block, "STREAMS", key, after)
        if not self._pipe.readable(timeout + LATE_S):
            # Redis ends the wait by its wall clock, which may have been set back meanwhile.
            self._pipe.close()
            self._pipe = self._connect()
            return []
        found = self._pipe.read()
        return [(number, fields) for number, fields in found[0][1]] if found else []


class LinkAddressTable(RedisClient):
    """Where the ranks of an epoch publish the addresses of their links: values by name, which are
    deleted with their epoch. Not for several threads. Raises
    Unreachable whenever Redis is gone."""

    def __init__(self, url: str, namespace: str, epoch: int):
        super().__init__(url, namespace)
        self._table = (self._keys.epoch, self._keys.link_addresses(epoch))
        self._epoch = epoch
        self._pipe.load_scripts()

    def read(self, names: Sequence[str]) -> list[bytes | None]:
        found: list[bytes | None] = self._pipe.call("HMGET", self._table[-1], *names)
        return found

    def write(self, name: str, value: bytes) -> None:
        """Set a value. Raises StaleEpoch."""
        # Fenced: what is written after the epoch has ended would stay for good.
        self._pipe.call(*evalsha("set_epoch_fields", self._table, self._epoch, name, value))
