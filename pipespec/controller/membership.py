"""Who is alive and which epoch it is: what holds a cluster together between its epochs.

Every worker of a cluster (a process that can hold a rank) keeps a *lease*, a key that runs out
unless it is renewed. What goes wrong is told in a stream of *suspicions*. Whoever started the
cluster (`pipespec.cluster.recovery`) watches both and begins the next epoch, whose *assignment*
says who holds which rank; the stream of assignments wakes those who wait for it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from pipespec.controller.connection import ANSWER_TIMEOUT_S, Pipe
from pipespec.controller.keys import Keys
from pipespec.controller.overview import numbers
from pipespec.controller.scripts import evalsha, load

# How long a worker that says nothing counts as alive.
LEASE_S = 2.0
# Suspicions that are kept.
KEEP_SUSPICIONS = 1000
# How often the place where the ranks meet is asked for.
POLL_S = 0.02


@dataclass(frozen=True)
class Epoch:
    """One life of the cluster: its number, and its assignment as text."""

    number: int
    assignment: str


@dataclass(frozen=True)
class Suspicion:
    """What a worker has to complain of in an epoch."""

    epoch: int
    worker: str
    reason: str


class Membership:
    """A connection to what the workers of a namespace share. Not for several threads.

    Raises Unreachable whenever Redis is gone.
    """

    def __init__(self, url: str, namespace: str, *, answer_s: float = ANSWER_TIMEOUT_S):
        """A Redis that takes longer than `answer_s` seconds to answer counts as gone."""
        self._keys = Keys(namespace)
        self._pipe = Pipe(url, answer_s)
        self._heard = "0"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._pipe.close()

    def renew(self, worker: str, pid: int) -> None:
        """Say that a worker is alive, for LEASE_S seconds from now."""
        self._pipe.call("SET", self._keys.lease(worker), pid, "PX", round(LEASE_S * 1000))

    def alive(self, workers: Sequence[str]) -> dict[str, int]:
        """Those of the workers whose leases have not run out, and their process ids."""
        held = self._pipe.call("MGET", *map(self._keys.lease, workers))
        return {worker: int(pid) for worker, pid in zip(workers, held, strict=True) if pid}

    def epoch(self, after: int, timeout: float) -> Epoch | None:
        """The newest epoch later than `after`; None if none begins within `timeout` seconds."""
        entry = self._read(self._keys.assignments, f"{after}-0", timeout)
        if not entry:
            return None
        number, fields = entry[-1]
        return Epoch(int(number.split(b"-")[0]), fields[1].decode())

    def suspect(self, epoch: int, worker: str, reason: str) -> None:
        """Say that something is wrong with an epoch."""
        fields = ("epoch", epoch, "member", worker, "reason", reason)
        keep = ("MAXLEN", "~", KEEP_SUSPICIONS)
        self._pipe.call("XADD", self._keys.suspicions, *keep, "*", *fields)

    def suspicions(self, timeout: float) -> list[Suspicion]:
        """Those told since the last call, waiting up to `timeout` seconds for the first."""
        found = self._read(self._keys.suspicions, self._heard, timeout)
        if found:
            self._heard = found[-1][0].decode()
        return [
            Suspicion(int(fields[1]), fields[3].decode(), fields[5].decode()) for _, fields in found
        ]

    def make_plain(self, reason: str) -> None:
        """Say that in all later epochs weights of four bits are made plain."""
        self._pipe.call("SET", self._keys.plain, reason)

    def plain(self) -> bool:
        """Whether somebody said so."""
        return bool(self._pipe.call("EXISTS", self._keys.plain))

    def note_fault(self, epoch: int, reason: str) -> None:
        """Keep why an epoch ended, for whoever asks how the cluster is."""
        self._pipe.call("SET", self._keys.fault, f"epoch {epoch}: {reason}")

    def totals(self) -> dict[str, int]:
        """What was counted since the log began, but for this epoch."""
        return numbers(self._pipe.call("HGETALL", self._keys.totals))

    def count(self, counts: Mapping[str, int]) -> None:
        """Set some of those: whoever sets one is the only one to count it."""
        pairs = [item for pair in counts.items() for item in pair]
        self._pipe.call("HSET", self._keys.totals, *pairs)

    def attached(self, epoch: int) -> dict[int, int]:
        """The ranks that have joined an epoch, and their process ids."""
        found = self._pipe.call("HGETALL", self._keys.ranks(epoch))
        return {int(r): int(pid) for r, pid in zip(found[::2], found[1::2], strict=True)}

    def follow(self, epoch: int, worker: str) -> None:
        """Take part in an epoch as a worker that computes beside a rank. Raises StaleEpoch."""
        load(self._pipe)
        keys = (
            self._keys.epoch,
            self._keys.followers(epoch),
            self._keys.kv_tokens(epoch),
            self._keys.row_times(epoch),
            self._keys.computing(epoch),
        )
        nothing = ("", "", "")
        self._pipe.call(*evalsha("attach", keys, epoch, worker, os.getpid(), *nothing))

    def followers(self, epoch: int) -> dict[str, int]:
        """The workers that have joined an epoch beside ranks, and their process ids."""
        found = self._pipe.call("HGETALL", self._keys.followers(epoch))
        return {
            worker.decode(): int(pid) for worker, pid in zip(found[::2], found[1::2], strict=True)
        }

    def await_followers(self, epoch: int, workers: Sequence[str], timeout: float) -> bool:
        """Whether these workers have joined an epoch, within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not self.followers(epoch).keys() >= set(workers):
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True

    def await_attached(self, epoch: int, count: int, timeout: float) -> int:
        """How many ranks have joined an epoch; waits until there are `count` or time is up."""
        deadline = time.monotonic() + timeout
        while True:
            joined = len(self.attached(epoch))
            if joined >= count or time.monotonic() >= deadline:
                return joined
            time.sleep(POLL_S)

    def progress(self) -> tuple[tuple[int, int], ...]:
        """The admitted requests and the lengths of their sequences."""
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
        """How many requests are finished."""
        return int(self._pipe.call("GET", self._keys.finished) or 0)

    def oldest_step(self, epoch: int) -> int:
        """The oldest step of an epoch that is not complete; it rises as long as all ranks work."""
        return int(self._pipe.call("HGET", self._keys.graph(epoch), "floor") or 0)

    def idle(self) -> bool:
        """Whether no request is open or waits."""
        admitted = self._pipe.call("ZCARD", self._keys.admitted)
        return not admitted and not self._pipe.call("ZCARD", self._keys.queue)

    def invite(self, epoch: int, place: str) -> None:
        """Say where the ranks of an epoch meet."""
        self._pipe.call("SET", self._keys.meeting(epoch), place)

    def meeting(self, epoch: int, timeout: float) -> str | None:
        """Where the ranks of an epoch meet; None if nobody says so within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while (place := self._pipe.call("GET", self._keys.meeting(epoch))) is None:
            if time.monotonic() > deadline:
                return None
            time.sleep(POLL_S)
        return str(place.decode())

    def invite_followers(self, epoch: int, rank: int, place: str) -> None:
        """Say where those meet who compute a rank together."""
        self._pipe.call("HSET", self._keys.gatherings(epoch), rank, place)

    def gathering(self, epoch: int, rank: int, timeout: float) -> str | None:
        """Where they do; None if nobody says so within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while (place := self._pipe.call("HGET", self._keys.gatherings(epoch), rank)) is None:
            if time.monotonic() > deadline:
                return None
            time.sleep(POLL_S)
        return str(place.decode())

    def _read(self, key: str, after: str, timeout: float) -> list[tuple[bytes, list[bytes]]]:
        block = max(1, round(timeout * 1000))
        found = self._pipe.call(
            "XREAD", "BLOCK", block, "STREAMS", key, after, timeout=block / 1000
        )
        return [(number, fields) for number, fields in found[0][1]] if found else []
