"""The search of `pipespec plan HOSTS.yaml`: the best head, order of the hosts, and slices.

For each head and order, dynamic programming over the stages finds what the slowest rank takes at
least: of all ways to a stage, the best for each layer at which they can end is enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import chain, permutations
from math import fsum, inf

import numpy as np

from pipespec.placement.costs import Needs, Problem, Worker, ends_ms

# Up to so many hosts every order is considered; of more, the order of the hosts file is kept.
MAX_ORDERED = 5


# A head, the stages in their order, and how many layers each has.
Layout = tuple[Worker, tuple[Worker, ...], tuple[int, ...]]


def best_order(
    problem: Problem, workers: Sequence[Worker], heads: Sequence[Worker]
) -> Layout | None:
    """The layout of the workers whose slowest rank takes the least and, of such ones, whose
    messages do; None if there is none."""
    best: Layout | None = None
    least = inf, 0.0  # milliseconds of the slowest rank, and of all messages
    times_of = lru_cache(None)(partial(_stage_times, problem.needs))
    for head in heads:
        for stages in _orders(problem, [each for each in workers if each is not head]):
            links = problem.link_ms(head, stages)
            wanted = problem.split or (None,) * len(stages)
            times = [
                times_of(worker, index == 0, index == len(stages) - 1, wanted[index]) + link
                for index, (worker, link) in enumerate(zip(stages, links[1:], strict=True))
            ]
            slowest = np.full(problem.needs.num_layers + 1, inf)  # by the layer of the end
            slowest[0] = problem.draft_ms(head) + links[0]
            for of_stage in times:
                slowest = np.maximum(slowest[:, None], of_stage).min(0)
            if (cost := (float(slowest[-1]), fsum(links))) < least:
                least, best = cost, (head, stages, _even_sizes(times, cost[0]))
    return best


def _orders(problem: Problem, stages: Sequence[Worker]) -> Iterator[tuple[Worker, ...]]:
    """The stages in every order of their hosts that may be, the problem's own first."""
    of_host: dict[str, list[Worker]] = {}
    for worker in stages:
        of_host.setdefault(worker.host, []).append(worker)
    hosts = [host for host in problem.order or of_host if host in of_host]
    fixed = problem.order is not None or len(hosts) > MAX_ORDERED
    orders: Iterable[Sequence[str]] = [hosts] if fixed else permutations(hosts)
    for order in orders:
        if fixed or problem.last_host not in order[:-1]:
            yield tuple(chain.from_iterable(of_host[host] for host in order))


def _stage_times(
    needs: Needs, worker: Worker, first: bool, last: bool, wanted: int | None
) -> np.ndarray:
    """What a stage takes that begins at one layer and ends before another, `[layers + 1, layers +
    1]`; inf where it has no layer, too little memory, or other layers than the `wanted`."""
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


def _even_sizes(times: Sequence[np.ndarray], limit: float) -> tuple[int, ...]:
    """How many layers each stage gets: within `limit`, with the least sum of squared times.

    Among equals, earlier stages are the longer ones, as in `split_evenly`.
    """
    cost, chosen = np.full(len(times[0]), inf), []
    cost[0] = 0.0
    for of_stage in times:
        found = cost[:, None] + np.where(of_stage <= limit, of_stage, inf) ** 2
        starts = len(cost) - 1 - found[::-1].argmin(0)  # of equals the last
        cost = found[starts, np.arange(len(cost))]
        chosen.append(starts)
    sizes, stop = [], len(cost) - 1
    for starts in reversed(chosen):
        sizes.append(stop - int(starts[stop]))
        stop = int(starts[stop])
    return tuple(reversed(sizes))
