"""Many requests at once: each gets the text that it gets alone, whatever happens around it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from pipespec.client.bench import bench_on
from pipespec.client.dataset import load
from pipespec.client.own import Running
from pipespec.client.settings import RequestSettings
from pipespec.config.compose import compose
from pipespec.controller.membership import Membership
from pipespec.controller.overview import look
from pipespec.controller.records import Accepted, Finished
from pipespec.core import Sampling
from pipespec.system.resources import resource_dir
from tests.helpers.clusters import Clusters
from tests.helpers.waiting import until
from tools.rig import cluster

pytestmark = pytest.mark.slow
TOKENS = 24
GREEDY = Sampling()
SAMPLED = compose(["verify=sample", "verify.seed=11", "verify.temperature=0.9"]).verify.sampling(0)
SHORT = ("feed.capacity=128", "feed.width=16", "model.context=128")
CROWD = ("scheduler.max_num_seqs=6", "cluster.stages=3")
WAYS = [
    ("feed=best_first",),
    pytest.param(("feed=level", "feed.width=8", "cluster.sync=free"), marks=pytest.mark.long),
    pytest.param(("feed=static_tree",), marks=pytest.mark.long),
    pytest.param(("feed=root", "cluster.groups=3"), marks=pytest.mark.long),
    pytest.param(("feed=adaptive", "source=hybrid"), marks=pytest.mark.long),
    pytest.param(
        ("feed=level", "feed.levels_per_step=2", "feed.width=4", "source.rounds=3"),
        marks=pytest.mark.long,
    ),
]


@pytest.fixture(scope="module")
def clusters() -> Iterator[Clusters]:
    common = ("cluster.devices=[cpu]", "model.context=512", "decode.prefill_chunk=32")
    with Clusters(*common) as made:
        yield made


@pytest.fixture(scope="module")
def prompts(clusters: Clusters, long: bool) -> list[list[int]]:
    lines = (Path(__file__).parent.parent / "data" / "prompts.jsonl").read_text().splitlines()
    served = clusters.running(*CROWD, *WAYS[0]).client.served
    return [served.encode(json.loads(line)["prompt"]) for line in lines[: 45 if long else 12]]


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> list[list[int]]:
    return cluster.reference(resource_dir("demo") / "target", prompts, TOKENS)


def answers(
    running: Running,
    prompts: Sequence[Sequence[int]],
    sampling: Callable[[int], Sampling] = lambda _: GREEDY,
    *,
    cancelled: Sequence[int] = (),
    fault: Callable[[], None] = lambda: None,
) -> list[list[int]]:
    """What is answered to all of them at once; some are cancelled, and `fault` happens, once the
    first answer has begun."""
    client = running.client
    numbers = [
        client.submit(prompt, sampling(i), max_new_tokens=TOKENS, eos=client.served.eos)
        for i, prompt in enumerate(prompts)
    ]
    found, begun = [], False
    for i, number in enumerate(numbers):
        tokens: list[int] = []
        for event in client.events(number):
            if isinstance(event, Accepted):
                assert event.base == len(prompts[i]) + len(tokens), (
                    "a token is lost, or comes twice"
                )
                tokens += event.tokens
            if not begun:
                begun = True
                with running.cluster.open_log() as log:
                    for other in cancelled:
                        log.cancel(numbers[other])
                fault()
        assert isinstance(event, Finished)
        assert (event.reason == "cancelled") == (i in cancelled)
        found.append(tokens)
    return found


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way[0].removeprefix("feed="))
def test_each_text_is_that_of_the_target_alone(clusters, prompts, expected, way):
    assert answers(clusters.running(*CROWD, *way), prompts) == expected


def test_texts_are_drawn_as_they_are_alone(clusters, prompts, expected):
    """Greedy and sampled requests, of which others are cancelled, in one crowd."""
    running = clusters.running(*CROWD, *WAYS[0])
    alone = [answers(running, [prompt], lambda _: SAMPLED)[0] for prompt in prompts[:6]]
    wanted = [of for pair in zip(alone, expected, strict=False) for of in pair]
    mixed = [prompt for prompt in prompts[:6] for _ in range(2)]
    cancelled = [3, 8]
    found = answers(running, mixed, lambda i: GREEDY if i % 2 else SAMPLED, cancelled=cancelled)
    for i, (got, full) in enumerate(zip(found, wanted, strict=True)):
        assert got == (full[: len(got)] if i in cancelled else full)


@pytest.mark.parametrize("way", [WAYS[0], WAYS[1]], ids=lambda way: way[0].removeprefix("feed="))
def test_texts_are_those_of_the_target_alone_though_requests_share_what_they_begin_with(
    clusters, prompts, way
):
    """At once and again afterwards, when even the answers are in KV, greedy and drawn."""
    running = clusters.running(*CROWD, *way)
    start = [token for prompt in prompts for token in prompt][:100]
    asked = [start + prompt[:9] for prompt in prompts[:8]]
    right = cluster.reference(resource_dir("demo") / "target", asked, TOKENS)

    def found_in_kv() -> int:
        until(lambda: look(*where).statistics["running"] == 0)
        return look(*where).statistics["cache_hits"]

    where = running.cluster.url, running.cluster.namespace
    before = found_in_kv()
    assert answers(running, asked) == right
    assert found_in_kv() - before >= 7 * (len(start) - 15)  # for less nobody waits
    turns = [prompt + answer for prompt, answer in zip(asked, right, strict=True)]
    drawn = answers(running, turns, lambda _: SAMPLED)
    assert answers(running, turns, lambda _: SAMPLED) == drawn
    apart = clusters.running(*CROWD, *way, "scheduler.prefix_cache=false")
    assert answers(apart, turns, lambda _: SAMPLED) == drawn
    until(lambda: look(apart.cluster.url, apart.cluster.namespace).statistics["running"] == 0)
    told = look(apart.cluster.url, apart.cluster.namespace).statistics
    assert told["cache_hits"] == told["kv_slots_retained"] == 0


def test_a_bench_keeps_as_many_at_work_as_it_was_asked_to(clusters, prompts, expected):
    """At a rate, and then all at once on the cluster of a crowd."""
    client = clusters.running(*CROWD, *WAYS[0]).client
    settings = RequestSettings.of(compose([f"decode.max_new_tokens={TOKENS}"]))
    samples = load(Path(__file__).parent.parent / "data" / "prompts.jsonl")[: len(prompts)]
    results = [
        bench_on(client, settings, samples, concurrency=4),
        bench_on(client, settings, samples, request_rate=100.0),
    ]
    for result in results:
        assert [request.token_ids for request in result.requests] == expected
        figures = result.summary()
        assert 0 < figures["pipeline_steps"] < sum(r.stats["steps"] for r in result.requests)
        assert all(0 < busy < 1 for busy in figures["stage_busy"])
    assert results[0].summary()["max_concurrent_requests"] == 4
    came = [request.started_ms for request in results[1].requests]
    assert came == sorted(came)
    assert came[-1] >= 1000 * len(prompts) / 100.0


def test_who_has_the_least_priority_is_served_first(clusters, prompts):
    """Six requests fill the cluster; twelve wait, the urgent ones asked last."""
    running = clusters.running(*CROWD, *WAYS[0])
    client, prompt = running.client, prompts[0][:8]
    settings = {  # before anything is asked, as it takes a while
        priority: RequestSettings.of(
            compose([f"decode.priority={priority}", "decode.max_new_tokens=2"])
        )
        for priority in (5, 0, -5)
    }
    filling = [client.submit(prompt, GREEDY, max_new_tokens=400) for _ in range(6)]
    for request in filling:
        next(client.events(request))  # it is open
    asked = {
        priority: [client.ask(each, prompt, GREEDY) for _ in range(6)]
        for priority, each in settings.items()
    }
    with running.cluster.open_log() as log:
        for request in filling:
            log.cancel(request)
    began = {}
    for requests in (filling, *asked.values()):
        for request in requests:
            list(client.events(request))
            began[request] = client.reports(request)[0]["started_ns"]
    in_order = [*filling, *asked[-5], *asked[0], *asked[5]]
    assert sorted(began, key=began.__getitem__) == in_order


def test_no_text_changes_though_requests_are_put_back(clusters, prompts):
    """KV for some 150 tokens, and a crowd that wants 324: greedy and sampled, one cancelled."""
    running = clusters.running(*CROWD, *WAYS[0], "model.kv_memory=800KiB", *SHORT)
    asked = [prompt[:30] for prompt in prompts[:8]] * 2
    greedy = cluster.reference(resource_dir("demo") / "target", asked[:8], TOKENS)
    drawn = [answers(running, [prompt], lambda _: SAMPLED)[0] for prompt in asked[8:]]
    found = answers(running, asked, lambda i: GREEDY if i < 8 else SAMPLED, cancelled=[1])
    for i, (got, full) in enumerate(zip(found, [*greedy, *drawn], strict=True)):
        assert got == (full[: len(got)] if i == 1 else full)

    def told() -> dict[str, int]:
        seen = look(running.cluster.url, running.cluster.namespace)
        assert seen is not None
        return seen.statistics

    until(lambda: told()["running"] == 0)
    assert told()["kv_slots_held"] == 0
    assert told()["preemptions"] > 0, "else it shows nothing"


@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.long)])
def test_no_text_changes_though_a_rank_is_killed(clusters, prompts, expected, rank):
    running = clusters.running(*CROWD, *WAYS[0])
    worker = running.cluster.deployment.workers[rank]
    with Membership(running.cluster.url, running.cluster.namespace) as shared:
        pid = shared.alive([worker])[worker]
    found = answers(running, prompts, fault=lambda: os.kill(pid, signal.SIGKILL))
    assert found == expected
    assert len(running.cluster.faults) > 0
