"""Which layers each stage holds, which host stands where, and where the draft runs.

A pipeline is as fast as its slowest rank. `plan_slices` makes that rank's time the least that
is possible; of all such layouts it takes one with the least time on the links, and then the
slices that are most even. `costs` says what counts, `ordering` searches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import inf

from pipespec.errors import ConfigError
from pipespec.placement.costs import Problem, Worker, compute_ms
from pipespec.placement.ordering import best_order

GIB = 2**30
MORE_MEMORY = "add a device, raise memory_gib, or lower model.context"


def split_evenly(num_layers: int, num_stages: int) -> list[range]:
    """Contiguous slices whose sizes differ by one at most; the later ones are the shorter.

    The last stage also computes the head, so it should not be among the longest. Raises
    ConfigError if a stage would be left without a layer.
    """
    if num_stages > num_layers:
        raise ConfigError(
            f"cluster.stages is {num_stages}, but the target has only {num_layers} layers; "
            f"use at most {num_layers} stages."
        )
    size, longer = divmod(num_layers, num_stages)
    return slices(size + (stage < longer) for stage in range(num_stages))


def slices(sizes: Iterable[int]) -> list[range]:
    """Contiguous ranges from 0 on, of these sizes."""
    return [range(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0))]


@dataclass(frozen=True)
class Placement:
    """Who does what, and what it costs.

    The tuples have one entry per rank, the head's first; `layers` has one per stage. `link_ms`
    is the message to the next rank, the last one's its verdict. `spares` hold nothing.
    """

    problem: Problem
    workers_by_rank: tuple[str, ...]
    layers: tuple[range, ...]
    compute_ms: tuple[float, ...]
    link_ms: tuple[float, ...]
    bytes_by_rank: tuple[int, ...]
    spares: tuple[str, ...]

    @property
    def rank_ms(self) -> tuple[float, ...]:
        return tuple(a + b for a, b in zip(self.compute_ms, self.link_ms, strict=True))

    @property
    def stage_ms(self) -> tuple[float, ...]:
        return self.rank_ms[1:]

    @property
    def step_ms(self) -> float:
        return max(self.rank_ms)


def plan_slices(problem: Problem) -> Placement:
    """The best layout of all workers but the spares.

    Raises ConfigError: more stages than layers, a wish (`split`, `draft`) that cannot be
    fulfilled, or too little memory, with how many GiB are missing and where.
    """
    workers = [worker for worker in problem.workers if worker.name not in problem.spares]
    _check(problem, workers)
    heads = _heads(problem, workers)
    best = best_order(problem, workers, heads)
    if best is None:
        raise _no_room(problem, workers, heads)
    head, stages, sizes = best
    return _placement(problem, head, stages, slices(sizes))


def remaining(placement: Placement, dead: Iterable[str]) -> Placement:
    """A layout without the dead workers.

    A spare with enough memory takes the place of each dead rank, and all others keep their
    layers. If there is none, everything is laid out anew over all that is left, spares
    included; the user's draft and order hold as far as their hosts live, a split does not.
    Raises ConfigError.
    """
    gone = set(dead)
    alive = tuple(worker for worker in placement.problem.workers if worker.name not in gone)
    if len(alive) < 2:
        raise ConfigError(
            f"{len(alive)} workers of the cluster are left, but a head and a stage are needed; "
            "bring a host back."
        )
    fewer = replace(placement.problem, workers=alive, split=None, spares=())
    ranks = _replaced(placement, gone)
    if ranks is not None:
        left = tuple(worker.name for worker in alive if worker.name not in ranks)
        head, *stages = map(fewer.worker, ranks)
        return _placement(replace(fewer, spares=left), head, stages, placement.layers)
    names, hosts = {worker.name for worker in alive}, {worker.host for worker in alive}
    order = tuple(host for host in fewer.order or () if host in hosts)
    draft = fewer.draft if fewer.draft in names else None
    return plan_slices(replace(fewer, draft=draft, order=order or None))


def _replaced(placement: Placement, gone: set[str]) -> list[str] | None:
    """The workers by rank, with a spare in the place of each that is gone; None: too few."""
    ranks = list(placement.workers_by_rank)
    spares = [placement.problem.worker(name) for name in placement.spares if name not in gone]
    for rank, name in enumerate(ranks):
        if name not in gone:
            continue
        able = [
            spare
            for spare in spares
            if spare.memory_bytes >= placement.bytes_by_rank[rank]
            and (rank or spare.draft_round_ms < inf)
        ]
        if not able:
            return None
        chosen = min(able, key=lambda s: s.layer_ms if rank else s.draft_round_ms)
        ranks[rank] = chosen.name
        spares.remove(chosen)
    return ranks


def _placement(
    problem: Problem, head: Worker, stages: Sequence[Worker], layers: Sequence[range]
) -> Placement:
    return Placement(
        problem=problem,
        workers_by_rank=(head.name, *(stage.name for stage in stages)),
        layers=tuple(layers),
        compute_ms=(
            problem.draft_ms(head),
            *(
                compute_ms(stage, problem.needs, piece)
                for stage, piece in zip(stages, layers, strict=True)
            ),
        ),
        link_ms=tuple(problem.link_ms(head, stages)),
        bytes_by_rank=(problem.needs.head_rank_bytes, *map(problem.needs.stage_bytes, layers)),
        spares=problem.spares,
    )


def reason(placement: Placement, rank: int) -> str:
    """Why a rank holds what it holds, in a few words."""
    problem, share = placement.problem, placement.rank_ms[rank] / placement.step_ms
    if share >= 1:
        return "sets the pace"
    if rank and problem.split is None:
        largest = max(after - before for before, after in pairwise(problem.needs.before))
        worker = problem.worker(placement.workers_by_rank[rank])
        if placement.bytes_by_rank[rank] + largest > worker.memory_bytes:
            return "no room for another layer"
    return f"{share:.0%} of a step"


# --- what cannot be ---------------------------------------------------------------------------


def _check(problem: Problem, workers: Sequence[Worker]) -> None:
    num_layers, num_stages = problem.needs.num_layers, len(workers) - 1
    assert num_stages >= 1, "as a hosts file and `remaining` require"
    if num_stages > num_layers:
        raise ConfigError(
            f"{num_stages} workers are to be stages, but the target has only {num_layers} "
            f"layers; name {num_stages - num_layers} devices less, or make them spares."
        )
    split = problem.split
    if split is not None and (len(split) != num_stages or sum(split) != num_layers):
        raise ConfigError(
            f"split is {list(split)}, {sum(split)} layers for {len(split)} stages, but the target "
            f"has {num_layers} layers and the cluster {num_stages} stages; correct the numbers."
        )


def _heads(problem: Problem, workers: Sequence[Worker]) -> list[Worker]:
    """Who can hold the draft. Raises ConfigError."""
    wanted = [worker for worker in workers if problem.draft in (None, worker.name)]
    needed = problem.needs.head_rank_bytes
    roomy = [worker for worker in wanted if worker.memory_bytes >= needed]
    heads = [worker for worker in roomy if worker.draft_round_ms < inf]
    if roomy and not heads:
        raise ConfigError(
            f"The draft ran out of memory on {', '.join(worker.name for worker in roomy)}; "
            f"{MORE_MEMORY}, or take a smaller draft."
        )
    if not heads:
        most = max(wanted, key=lambda worker: worker.memory_bytes)
        raise ConfigError(
            f"The draft needs {_gib(needed)} GiB, but {most.name} has {_gib(most.memory_bytes)}: "
            f"{_gib(needed - most.memory_bytes)} GiB are missing there; {MORE_MEMORY}, or take a "
            "smaller draft."
        )
    return heads


def _no_room(problem: Problem, workers: Sequence[Worker], heads: Sequence[Worker]) -> ConfigError:
    """What the stages lack in the layout that would be the best with memory for it."""
    boundless = {each.name: replace(each, memory_bytes=inf) for each in workers}
    best = best_order(problem, [*boundless.values()], [boundless[each.name] for each in heads])
    assert best is not None
    _, stages, sizes = best
    missing, told = 0.0, []
    for name, piece in zip([each.name for each in stages], slices(sizes), strict=True):
        has, needed = problem.worker(name).memory_bytes, problem.needs.stage_bytes(piece)
        if needed > has:
            missing += needed - has
            told.append(
                f"{name} has {_gib(has)} GiB and would need {_gib(needed)} for layers "
                f"{piece.start} to {piece.stop - 1}"
            )
    return ConfigError(
        f"{_gib(missing)} GiB of memory are missing: {', '.join(told)}; {MORE_MEMORY}."
    )


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f}" if num_bytes >= GIB / 10 else f"{num_bytes / GIB:.3f}"
