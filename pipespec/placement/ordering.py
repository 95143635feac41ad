"""The search of `pipespec plan HOSTS.yaml`: the best order of the hosts, and slices, for one head.

Three observations make an exact answer quick:

1. The slowest rank's time is one of finitely many sums, so it is found by bisection: can a
   layout stay within this limit?
2. Within a limit, where a stage can end depends only on where it begins. So a set of layer
   numbers, the bits of an integer, says all about the stages so far, and dynamic programming
   over the subsets of hosts decides the order.
3. The time on the links depends on the order alone. Of several ways to one layer through the
   same hosts, the one with the least of it is enough.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from pipespec.placement.costs import Problem, Worker, ends_ms, layers_ms

# Up to so many hosts every order is considered; of more, the order of the hosts file is kept.
MAX_ORDERED = 8


@dataclass(frozen=True)
class Found:
    """A head, the stages in their order, where each stage ends, and how good that is.

    No rank takes longer than `limit` milliseconds; `link_ms` is the time of all messages.
    """

    head: Worker
    stages: tuple[Worker, ...]
    sizes: tuple[int, ...]
    limit: float
    link_ms: float


class _Way(NamedTuple):
    """A way through some hosts, without the last worker of the last of them.

    `ends` has a bit for every layer at which it can end, `order` the numbers of the hosts.
    """

    link_ms: float
    ends: int
    order: tuple[int, ...]


class Search:
    """Looks for layouts with one head."""

    def __init__(self, problem: Problem, head: Worker, stages: Sequence[Worker]):
        self.problem = problem
        self.needs = problem.needs
        self.head = head
        of_host: dict[str, list[Worker]] = {}
        for worker in stages:
            of_host.setdefault(worker.host, []).append(worker)
        self.fixed = problem.order is not None or len(of_host) > MAX_ORDERED
        self.hosts = [host for host in problem.order or of_host if host in of_host]
        self.workers = [of_host[host] for host in self.hosts]
        self.last = self.hosts.index(problem.last_host) if problem.last_host in of_host else None
        self.num_stages = len(stages)
        self._times: dict[tuple[str, int], list[float]] = {}
        self._most: dict[tuple[str, float, float], list[int]] = {}
        self._largest = max(self.needs.whole_layers)

    def improve(self, best: Found | None) -> Found | None:
        """The better of `best` and the best layout with this head; None if there is none."""
        limits = self._limits()
        high = bisect_right(limits, inf if best is None else best.limit) - 1
        order = None if high < 0 else self._within(limits[high])
        if order is None:
            return best
        low = 0
        while low < high:
            middle = (low + high) // 2
            better = self._within(limits[middle])
            if better is None:
                low = middle + 1
            else:
                order, high = better, middle
        stages = tuple(worker for index in order for worker in self.workers[index])
        links = self.problem.link_ms(self.head, stages)
        limit = limits[high]
        if best is not None and (best.limit, best.link_ms) <= (limit, sum(links)):
            return best
        return Found(self.head, stages, self._even(stages, links, limit), limit, sum(links))

    def _limits(self) -> list[float]:
        """Every time that a rank can take, rising."""
        problem = self.problem
        draft = problem.draft_ms(self.head)
        times = {draft + problem.feed_ms(self.head.host, host) for host in self.hosts}
        for host, workers in zip(self.hosts, self.workers, strict=True):
            links = {problem.batch_ms(host, other) for other in self.hosts}
            verdict = problem.verdict_ms(host, self.head.host)
            for worker in workers:
                starts = range(self.needs.num_layers) if worker.kind_ms else range(1)
                own = {ms for start in starts for ms in self._layer_times(worker, start)[1:]}
                for first in (False, True):
                    for last, messages in ((False, links), (True, {verdict})):
                        ends = ends_ms(worker, first=first, last=last)
                        times.update(ms + (ends + link) for ms in own for link in messages)
        return sorted(times)

    def _layer_times(self, worker: Worker, start: int) -> list[float]:
        """What 0, 1, 2 ... layers take from layer `start` on. If all are alike, those from the
        first on."""
        start = start if worker.kind_ms else 0
        key = (worker.name, start)
        if key not in self._times:
            stops = range(start, self.needs.num_layers + 1)
            self._times[key] = [layers_ms(worker, self.needs, range(start, stop)) for stop in stops]
        return self._times[key]

    def _most_layers(self, worker: Worker, more_ms: float, limit: float) -> list[int]:
        """How many layers a stage can compute in time from each layer on, if it takes `more_ms`
        beside them. If all are alike, it may be more than there are."""
        key = (worker.name, more_ms, limit)
        if key not in self._most:

            def most(start: int) -> int:
                times = self._layer_times(worker, start)
                return bisect_right(times, limit, key=lambda ms: ms + more_ms) - 1

            count = self.needs.num_layers + 1
            alike = not worker.kind_ms
            self._most[key] = [most(0)] * count if alike else [most(i) for i in range(count)]
        return self._most[key]

    # --- is there a layout within a limit? ----------------------------------------------------

    def _within(self, limit: float) -> tuple[int, ...] | None:
        """The order with the least link time among those whose ranks all stay within `limit`."""
        self._most.clear()
        ways: dict[tuple[int, int], list[_Way]] = {}
        for index in self._successors(0, -1):
            feed = self.problem.feed_ms(self.head.host, self.hosts[index])
            if self.problem.draft_ms(self.head) + feed <= limit:
                self._enter(ways, 0, index, _Way(feed, 1, ()), limit)
        for _ in self.hosts[1:]:
            longer: dict[tuple[int, int], list[_Way]] = {}
            for (subset, index), reached in ways.items():
                stage, worker = self._count(subset) - 1, self.workers[index][-1]
                for after in self._successors(subset, index):
                    link = self.problem.batch_ms(self.hosts[index], self.hosts[after])
                    for way in _cheapest(reached):
                        ends = self._ends(worker, stage, link, limit, way.ends)
                        left = _Way(way.link_ms + link, ends, way.order)
                        self._enter(longer, subset, after, left, limit)
            ways = longer
        found = []
        for (_, index), reached in ways.items():
            verdict = self.problem.verdict_ms(self.hosts[index], self.head.host)
            worker = self.workers[index][-1]
            for way in _cheapest(reached):
                ends = self._ends(worker, self.num_stages - 1, verdict, limit, way.ends)
                if ends >> self.needs.num_layers & 1:
                    found.append((way.link_ms + verdict, way.order))
        return min(found)[1] if found else None

    def _enter(
        self,
        ways: dict[tuple[int, int], list[_Way]],
        subset: int,
        index: int,
        way: _Way,
        limit: float,
    ) -> None:
        """Go on through a host, but for its last worker, whose message depends on what follows."""
        stage, host, ends = self._count(subset), self.hosts[index], way.ends
        near = self.problem.batch_ms(host, host)
        others = self.workers[index][:-1]
        for number, worker in enumerate(others):
            ends = self._ends(worker, stage + number, near, limit, ends)
        if ends:
            new = _Way(way.link_ms + near * len(others), ends, (*way.order, index))
            ways.setdefault((subset | 1 << index, index), []).append(new)

    def _successors(self, subset: int, index: int) -> Iterable[int]:
        """Which hosts may come next."""
        if self.fixed:
            return (index + 1,)
        left = [other for other in range(len(self.hosts)) if not subset >> other & 1]
        return [other for other in left if other != self.last] if len(left) > 1 else left

    def _count(self, subset: int) -> int:
        """How many stages the hosts have."""
        return sum(len(workers) for i, workers in enumerate(self.workers) if subset >> i & 1)

    # --- where a stage can end ----------------------------------------------------------------

    def _ends(self, worker: Worker, stage: int, link_ms: float, limit: float, starts: int) -> int:
        """The layers at which a stage can end that begins at one of `starts`; both sets of bits."""
        if not starts:
            return 0
        first, last = stage == 0, stage == self.num_stages - 1
        most = self._most_layers(worker, ends_ms(worker, first=first, last=last) + link_ms, limit)
        room = self._room(worker, stage)
        low, high = (starts & -starts).bit_length() - 1, starts.bit_length() - 1
        gapless = starts == (1 << high + 1) - (1 << low) and min(most[low : high + 1]) > 0
        if gapless and room >= self._largest and self.problem.split is None:
            stops = self._stops(stage, high, most, room)
            return (1 << max(stops.stop, low + 1)) - (1 << low + 1)
        ends = 0
        for start in _bits(starts):
            for stop in self._stops(stage, start, most, room):
                ends |= 1 << stop
        return ends

    def _room(self, worker: Worker, stage: int) -> float:
        """How many bytes the layers of a stage may have."""
        first, last = stage == 0, stage == self.num_stages - 1
        return worker.memory_bytes - self.needs.fixed_bytes(first=first, last=last)

    def _stops(self, stage: int, start: int, most: Sequence[int], room: float) -> range:
        """Where a stage that begins at layer `start` can end, of `most` layers by start."""
        before = self.needs.before
        stop = min(bisect_right(before, before[start] + room) - 1, start + most[start])
        if self.problem.split is None:
            return range(start + 1, stop + 1)
        wanted = start + self.problem.split[stage]
        return range(wanted, wanted + (wanted <= stop))

    def _even(
        self, stages: Sequence[Worker], links: Sequence[float], limit: float
    ) -> tuple[int, ...]:
        """How many layers each stage gets: within `limit`, with the least sum of squared times.

        Among equals, earlier stages are the longer ones, as in `split_evenly`.
        """
        ways: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
        for stage, (worker, link) in enumerate(zip(stages, links[1:], strict=True)):
            first, last = stage == 0, stage == self.num_stages - 1
            more_ms = ends_ms(worker, first=first, last=last) + link
            most, room = self._most_layers(worker, more_ms, limit), self._room(worker, stage)
            reached: dict[int, tuple[float, tuple[int, ...]]] = {}
            for start in sorted(ways, reverse=True):
                cost, sizes = ways[start]
                times = self._layer_times(worker, start)
                for stop in self._stops(stage, start, most, room):
                    new = cost + (times[stop - start] + more_ms) ** 2
                    if stop not in reached or new < reached[stop][0]:
                        reached[stop] = (new, (*sizes, stop - start))
            ways = reached
        return ways[self.needs.num_layers][1]


def _cheapest(ways: list[_Way]) -> Iterator[_Way]:
    """Of every end, the way there with the least link time."""
    covered = 0
    for way in sorted(ways):
        if way.ends & ~covered:
            yield way._replace(ends=way.ends & ~covered)
            covered |= way.ends


def _bits(number: int) -> Iterator[int]:
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest
