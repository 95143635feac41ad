"""The partition planner beside brute force, and what it says when there is no room."""

from dataclasses import replace
from itertools import combinations, pairwise, permutations
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipespec.errors import ConfigError
from pipespec.placement.costs import Needs, Problem, Route, Worker, compute_ms
from pipespec.placement.slices import GIB, plan_slices, reason, remaining, slices, split_evenly


def layouts(problem):
    """Every layout there is: head, stages and slices."""
    workers = [m for m in problem.workers if m.name not in problem.spares]
    num_layers, count = problem.needs.num_layers, len(workers) - 1
    for head in workers:
        if problem.draft not in (None, head.name):
            continue
        hosts = {m.host for m in workers if m is not head}
        orders = permutations(sorted(hosts))
        if problem.order is not None:
            orders = [[host for host in problem.order if host in hosts]]
        for order in orders:
            if problem.last_host in order[:-1]:
                continue
            stages = [m for host in order for m in workers if m.host == host and m is not head]
            for cuts in combinations(range(1, num_layers), count - 1):
                ends = [0, *cuts, num_layers]
                sizes = [b - a for a, b in pairwise(ends)]
                if problem.split is None or tuple(sizes) == problem.split:
                    yield head, stages, slices(sizes)


def cost(problem, head, stages, layers):
    """(slowest rank, all links), or infinite if it does not fit."""
    needs = problem.needs
    used = [needs.head_rank_bytes, *(needs.stage_bytes(piece) for piece in layers)]
    if any(b > m.memory_bytes for b, m in zip(used, [head, *stages], strict=True)):
        return inf, inf
    links = problem.link_ms(head, stages)
    times = [problem.draft_ms(head) + links[0]]
    for i, (stage, piece) in enumerate(zip(stages, layers, strict=True)):
        times.append(compute_ms(stage, needs, piece) + links[i + 1])
    return max(times), sum(links)


@st.composite
def problems(draw):
    """Up to five workers on up to three hosts, up to seven layers of different sizes."""
    devices = draw(
        st.lists(st.integers(1, 3), min_size=1, max_size=3).filter(
            lambda counts: 2 <= sum(counts) <= 5
        )
    )
    times = st.sampled_from([0.0, 0.5, 1.0, 1.5, 3.0])
    num_kinds = draw(st.sampled_from([0, 2, 3]))
    of_kinds = st.tuples(*[st.sampled_from([0.3, 1.0, 2.5])] * num_kinds)
    workers = tuple(
        Worker(
            f"host{host}/{index}",
            layer_ms=draw(st.sampled_from([0.5, 1.0, 1.7, 4.0])),
            head_ms=draw(times),
            embedding_ms=draw(times),
            draft_round_ms=draw(times),
            memory_bytes=draw(st.sampled_from([6, 12, 20, 40, inf])),
            kind_ms=draw(of_kinds),
        )
        for host, count in enumerate(devices)
        for index in range(count)
    )
    num_layers = draw(st.integers(len(workers) - 1, 7))
    needs = Needs(
        layer_bytes=tuple(
            draw(st.lists(st.integers(1, 5), min_size=num_layers, max_size=num_layers))
        ),
        embedding_bytes=draw(st.integers(0, 4)),
        head_bytes=draw(st.integers(0, 4)),
        tied=draw(st.booleans()),
        kv_layer_bytes=(draw(st.integers(0, 2)),) * num_layers,
        runtime_bytes=draw(st.integers(0, 2)),
        draft_bytes=draw(st.integers(0, 15)),
        rows=4,
        row_bytes=1000,
        rounds=draw(st.integers(1, 2)),
        kinds=tuple(
            draw(st.integers(0, num_kinds - 1)) if num_kinds else 0 for _ in range(num_layers)
        ),
    )
    names = [f"host{index}" for index in range(len(devices))]
    routes = {
        pair: Route(draw(st.sampled_from([0.0, 0.2, 2.0])), draw(st.sampled_from([0.01, 0.1, inf])))
        for pair in combinations(names, 2)
    }
    draft = draw(st.none() | st.sampled_from([m.name for m in workers]))
    order = draw(st.none() | st.permutations(names).map(tuple))
    spares = ()
    if len(workers) > 2 and order is None and draft is None:
        spares = tuple(m.name for m in workers[len(workers) - draw(st.integers(0, 1)) :])
    return Problem(workers, needs, routes, draft, order, None, spares)


@settings(max_examples=150)
@given(problems(), st.data())
def test_no_layout_is_better_than_the_planners(problem, data):
    if data.draw(st.booleans()):
        count = len(problem.workers) - len(problem.spares) - 1
        cuts = data.draw(st.permutations(range(1, problem.needs.num_layers)))[: count - 1]
        ends = [0, *sorted(cuts), problem.needs.num_layers]
        split = tuple(b - a for a, b in pairwise(ends))
        problem = replace(problem, split=split)
    best = min(cost(problem, *layout) for layout in layouts(problem))
    if best[0] == inf:
        with pytest.raises(ConfigError, match="missing"):
            plan_slices(problem)
        return
    found = plan_slices(problem)
    head, *stages = map(problem.worker, found.workers_by_rank)
    assert [layer for piece in found.layers for layer in piece] == list(
        range(problem.needs.num_layers)
    )
    assert cost(problem, head, stages, found.layers) == pytest.approx(best)
    assert (found.step_ms, sum(found.link_ms)) == pytest.approx(best)
    assert all(
        used <= problem.worker(name).memory_bytes
        for used, name in zip(found.bytes_by_rank, found.workers_by_rank, strict=True)
    )


def test_slices_are_as_long_as_their_kinds_of_layers_take():
    """Two slow layers of eight, at the end."""
    workers = tuple(Worker(f"host/{index}", layer_ms=2.0, kind_ms=(1.0, 5.0)) for index in range(3))
    needs = Needs((1,) * 8, kinds=(0,) * 6 + (1,) * 2)
    found = plan_slices(Problem(workers, needs, draft="host/0"))
    assert [len(piece) for piece in found.layers] == [6, 2]
    assert found.compute_ms[1:] == (6.0, 10.0)
    assert [reason(found, rank) for rank in (1, 2)] == ["60% of a step", "sets the pace"]


@given(st.integers(1, 6), st.integers(0, 20))
def test_equal_workers_get_equal_slices(num_stages, more):
    num_layers = num_stages + more
    workers = tuple(Worker(f"host/{index}") for index in range(num_stages + 1))
    found = plan_slices(Problem(workers, Needs((1,) * num_layers)))
    assert found.layers == tuple(split_evenly(num_layers, num_stages))
    assert found.workers_by_rank[0] == "host/0"


def mixed(**wishes):
    """A host with two slow devices, one with a fast one, and a processor."""
    workers = (
        Worker("old/0", layer_ms=2.0, head_ms=4.0, draft_round_ms=8.0, memory_bytes=24 * GIB),
        Worker("old/1", layer_ms=2.0, head_ms=4.0, draft_round_ms=8.0, memory_bytes=24 * GIB),
        Worker("new/0", layer_ms=1.0, head_ms=2.0, draft_round_ms=4.0, memory_bytes=24 * GIB),
        Worker("cpu/0", layer_ms=40.0, head_ms=30.0, draft_round_ms=12.0, memory_bytes=64 * GIB),
    )
    needs = Needs(
        (GIB,) * 32, embedding_bytes=GIB, head_bytes=GIB, draft_bytes=2 * GIB, rows=64, row_bytes=8
    )
    return replace(Problem(workers, needs), **wishes)


def test_too_little_memory_says_how_much_and_where():
    workers = tuple(Worker(f"{host}/0", memory_bytes=10 * GIB) for host in "abc")
    with pytest.raises(ConfigError, match=r"12\.0 GiB of memory are missing: b/0 has 10\.0 GiB"):
        plan_slices(Problem(workers, Needs((GIB,) * 32)))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            {"draft": "cpu/0", "order": ("old", "new", "cpu"), "split": (4, 26, 2)},
            r"2\.0 GiB.*old/1 has 24\.0 GiB.*26\.0.*layers 4 to 29",
        ),
        ({"split": (10, 10, 11)}, "31 layers for 3 stages, but the target has 32"),
        ({"split": (32,)}, "32 layers for 1 stages, but .* 32 layers and the cluster 3 stages"),
        (
            {"needs": replace(mixed().needs, draft_bytes=70 * GIB)},
            r"draft needs 70\.0 GiB, but cpu/0 has 64\.0: 6\.0 GiB",
        ),
        ({"needs": Needs((1, 1))}, r"3 workers are to be stages.*2 layers; name 1"),
    ],
)
def test_what_cannot_be_laid_out_is_refused_in_one_sentence(asked, said):
    with pytest.raises(ConfigError, match=said):
        plan_slices(mixed(**asked))


def test_spare_replaces_a_dead_stage_and_no_other_rank_moves():
    before = plan_slices(mixed(spares=("old/1",)))
    rank = before.workers_by_rank.index("new/0")
    after = remaining(before, ["new/0"])
    assert after.layers == before.layers
    assert after.workers_by_rank[rank] == "old/1"
    assert after.spares == ()
    assert [n for i, n in enumerate(after.workers_by_rank) if i != rank] == [
        n for i, n in enumerate(before.workers_by_rank) if i != rank
    ]


def test_without_a_spare_the_layers_go_to_those_that_are_left():
    before = plan_slices(mixed(draft="cpu/0", split=(12, 12, 8), order=("old", "new", "cpu")))
    after = remaining(before, ["old/1"])
    assert after.workers_by_rank == ("cpu/0", "old/0", "new/0")
    assert after.layers[-1].stop == 32
    assert after.problem.split is None


def test_a_dead_head_is_followed_by_another():
    before = plan_slices(mixed())
    after = remaining(before, ["cpu/0"])
    assert sorted(after.workers_by_rank) == ["new/0", "old/0", "old/1"]


def test_a_spare_that_is_too_small_makes_all_be_laid_out_anew():
    problem = mixed(spares=("cpu/0",))
    workers = tuple(
        replace(m, memory_bytes=4 * GIB) if m.name == "cpu/0" else m for m in problem.workers
    )
    before = plan_slices(replace(problem, workers=workers))
    dead = before.workers_by_rank[1]
    after = remaining(before, [dead])
    assert dead not in after.workers_by_rank
    assert after.workers_by_rank != before.workers_by_rank
    assert after.layers[-1].stop == 32


def test_a_cluster_of_one_is_refused():
    before = plan_slices(mixed())
    with pytest.raises(ConfigError, match="1 workers of the cluster are left"):
        remaining(before, ["cpu/0", "old/0", "old/1"])


@pytest.mark.parametrize("kinds", [(), (0, 0, 0, 1) * 20])
def test_eight_hosts_of_two_devices_are_laid_out(kinds):
    workers = tuple(
        Worker(
            f"host{host}/{index}",
            layer_ms=1 + 0.13 * host + 0.01 * index,
            head_ms=3 + host,
            draft_round_ms=5 + host,
            memory_bytes=24 * GIB,
            kind_ms=(1 + 0.13 * host, 1.3 + 0.11 * index) if kinds else (),
        )
        for host in range(8)
        for index in range(2)
    )
    hosts = [f"host{host}" for host in range(8)]
    routes = {(a, b): Route(0.1 + 0.01 * i, 10) for i, (a, b) in enumerate(combinations(hosts, 2))}
    needs = Needs((2 * GIB,) * 80, draft_bytes=2 * GIB, rows=64, row_bytes=16384, kinds=kinds)
    found = plan_slices(Problem(workers, needs, routes))
    assert sum(map(len, found.layers)) == 80
    slowest = 80 * 1.0 / 15  # no layout can beat all devices being the fastest one
    assert slowest < found.step_ms < 16


def test_of_more_hosts_than_can_be_tried_the_order_is_kept():
    workers = tuple(Worker(f"host{host}/0", draft_round_ms=float(host > 0)) for host in range(22))
    found = plan_slices(Problem(workers, Needs((1,) * 40)))
    assert found.workers_by_rank == tuple(f"host{host}/0" for host in range(22))


@given(st.integers(1, 200), st.data())
def test_slices_are_contiguous_even_and_complete(num_layers, data):
    num_stages = data.draw(st.integers(1, num_layers))
    found = split_evenly(num_layers, num_stages)
    assert [layer for piece in found for layer in piece] == list(range(num_layers))
    lengths = [len(piece) for piece in found]
    assert len(lengths) == num_stages
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ConfigError, match="has only 4 layers"):
        split_evenly(4, 5)
