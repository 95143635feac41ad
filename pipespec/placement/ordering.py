"""The search of `pipespec plan HOSTS.yaml`: the best order of the hosts, and slices, for one head.

Dynamic programming over the subsets of hosts: of all ways through the same hosts with the same one
last, the best for each layer at which they can end is enough. It is done twice: what the slowest
rank takes at least, and then, of the orders that stay within that, the one with the least time on
the links.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import NamedTuple

import numpy as np

from pipespec.placement.costs import Problem, Worker, ends_ms

# Up to so many hosts every order is considered; of more, the order of the hosts file is kept.
MAX_ORDERED = 8


@dataclass(frozen=True)
class StageOrder:
    """A head, the stages in their order, where each stage ends, and how good that is.

    No rank takes longer than `limit` milliseconds; `link_ms` is the time of all messages.
    """

    head: Worker
    stages: tuple[Worker, ...]
    sizes: tuple[int, ...]
    limit: float
    link_ms: float


class _Ways(NamedTuple):
    """The best ways through some hosts, by the layer at which they end: what they cost, `[layers +
    1]`, and the hosts in their order, as the digits of a number."""

    cost: np.ndarray
    order: np.ndarray


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
        self._computed = lru_cache(None)(self._compute_times)

    def improve(self, best: StageOrder | None) -> StageOrder | None:
        """The better of `best` and the best layout with this head; None if there is none."""
        limit, order = self._search(None)
        if limit == inf or (best is not None and limit > best.limit):
            return best
        _, order = self._search(limit)
        stages = tuple(worker for index in order for worker in self.workers[index])
        links = self.problem.link_ms(self.head, stages)
        if best is not None and (best.limit, best.link_ms) <= (limit, sum(links)):
            return best
        return StageOrder(self.head, stages, self._even(stages, links, limit), limit, sum(links))

    def _search(self, limit: float | None) -> tuple[float, Sequence[int]]:
        """What the slowest rank takes at least and, given such a limit, the least time on the links
        of all orders whose ranks stay within it; and the order. inf: there is none."""
        problem, count = self.problem, len(self.hosts)
        ways: dict[tuple[int, int], _Ways] = {}
        for index in self._successors(0, -1):
            feed = problem.feed_ms(self.head.host, self.hosts[index])
            slowest, cost = (
                problem.draft_ms(self.head) + feed,
                np.full(self.needs.num_layers + 1, inf),
            )
            cost[0] = slowest if limit is None else feed if slowest <= limit else inf
            ways[1 << index, index] = _Ways(cost, np.full(len(cost), index))
        for length in range(1, count + 1):
            longer: dict[tuple[int, int], _Ways] = {}
            for (subset, index), reached in ways.items():
                host, workers = self.hosts[index], self.workers[index]
                stage = sum(len(each) for i, each in enumerate(self.workers) if subset >> i & 1)
                near = problem.batch_ms(host, host)
                for number, worker in enumerate(workers[:-1], stage - len(workers)):
                    reached = self._through(reached, worker, number, near, limit)
                if length == count:
                    verdict = problem.verdict_ms(host, self.head.host)
                    longer[subset, index] = self._through(
                        reached, workers[-1], stage - 1, verdict, limit
                    )
                    continue
                for after in self._successors(subset, index):
                    link = problem.batch_ms(host, self.hosts[after])
                    left = self._through(reached, workers[-1], stage - 1, link, limit)
                    left = _Ways(left.cost, left.order * count + after)
                    key = subset | 1 << after, after
                    longer[key] = _better(longer[key], left) if key in longer else left
            ways = longer
        cost, number = min((each.cost[-1], int(each.order[-1])) for each in ways.values())
        if self.fixed:
            return float(cost), range(count)
        return float(cost), [number // count**place % count for place in reversed(range(count))]

    def _through(
        self, ways: _Ways, worker: Worker, stage: int, link_ms: float, limit: float | None
    ) -> _Ways:
        """The ways with one more stage, whose message takes `link_ms`."""
        times = self._times(worker, stage) + link_ms
        if limit is None:
            found = np.maximum(ways.cost[:, None], times)
        else:
            found = ways.cost[:, None] + np.where(times <= limit, link_ms, inf)
        starts = found.argmin(0)
        return _Ways(found[starts, np.arange(len(starts))], ways.order[starts])

    def _times(self, worker: Worker, stage: int) -> np.ndarray:
        """What a stage takes that begins at one layer and ends before another, `[layers + 1, layers
        + 1]`; inf where it has no layer, too little memory, or other layers than the user wants."""
        wanted = None if self.problem.split is None else self.problem.split[stage]
        return self._computed(worker, stage == 0, stage == self.num_stages - 1, wanted)

    def _compute_times(
        self, worker: Worker, first: bool, last: bool, wanted: int | None
    ) -> np.ndarray:
        needs = self.needs
        places = np.arange(needs.num_layers + 1)
        sizes = places - places[:, None]
        times = sizes * worker.layer_ms
        if worker.kind_ms:
            counts = np.array(needs.kinds_before)
            times = (counts - counts[:, None]) @ np.array(worker.kind_ms[: counts.shape[1]])
        before = np.array(needs.before)
        room = worker.memory_bytes - needs.fixed_bytes(first=first, last=last)
        allowed = (sizes > 0) & (before - before[:, None] <= room)
        if wanted is not None:
            allowed &= sizes == wanted
        return np.where(allowed, times + ends_ms(worker, first=first, last=last), inf)

    def _successors(self, subset: int, index: int) -> Iterable[int]:
        """Which hosts may come next."""
        if self.fixed:
            return (index + 1,)
        left = [other for other in range(len(self.hosts)) if not subset >> other & 1]
        return [other for other in left if other != self.last] if len(left) > 1 else left

    def _even(
        self, stages: Sequence[Worker], links: Sequence[float], limit: float
    ) -> tuple[int, ...]:
        """How many layers each stage gets: within `limit`, with the least sum of squared times.

        Among equals, earlier stages are the longer ones, as in `split_evenly`.
        """
        cost, chosen = np.full(self.needs.num_layers + 1, inf), []
        cost[0] = 0.0
        for stage, (worker, link) in enumerate(zip(stages, links[1:], strict=True)):
            times = self._times(worker, stage) + link
            found = cost[:, None] + np.where(times <= limit, times, inf) ** 2
            starts = len(cost) - 1 - found[::-1].argmin(0)  # of equals the last
            cost = found[starts, np.arange(len(cost))]
            chosen.append(starts)
        sizes, stop = [], self.needs.num_layers
        for starts in reversed(chosen):
            sizes.append(stop - int(starts[stop]))
            stop = int(starts[stop])
        return tuple(reversed(sizes))


def _better(one: _Ways, other: _Ways) -> _Ways:
    """For each end the cheaper of two ways there."""
    first = one.cost <= other.cost
    return _Ways(*(np.where(first, a, b) for a, b in zip(one, other, strict=True)))
