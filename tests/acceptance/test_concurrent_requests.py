"""Concurrent requests get the texts that they get alone, whatever happens to others."""

import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from pipespec.client.request_settings import RequestSettings
from pipespec.config.compose import compose
from pipespec.controller.cluster_status import read_status
from pipespec.controller.log_records import Accepted, Finished
from pipespec.controller.membership import Membership
from pipespec.core import SamplingParams
from pipespec.system.folders import resource_dir
from tests.helpers.clusters import Clusters
from tests.helpers.proposers import POLICIES
from tests.helpers.waiting import until
from tools.rig import cluster
from tools.rig.requests import Running

pytestmark = pytest.mark.slow
TOKENS = 24
# Of requests to be cancelled, so that they have not ended by then.
MANY_TOKENS = 96
GREEDY = SamplingParams()
SAMPLED = compose(["sampling.seed=11", "sampling.temperature=0.9"]).sampling.params(0)
SHORT = ("policy.capacity=128", "policy.width=16", "model.context=128")
CROWD = ("scheduler.max_num_seqs=6", "cluster.stages=3")
BEST_FIRST = ("policy=best_first",)
FREE_LEVEL = ("policy=level", "policy.width=8")
WAYS = [
    BEST_FIRST,
    pytest.param(FREE_LEVEL, marks=pytest.mark.long),
    *(
        pytest.param(settings, marks=pytest.mark.long)
        for policy, settings in POLICIES.items()
        if policy not in ("best_first", "level")
    ),
    pytest.param(("policy=level", "policy.width=4", "proposer.rounds=3"), marks=pytest.mark.long),
]


@pytest.fixture(scope="module")
def clusters() -> Iterator[Clusters]:
    common = ("cluster.devices=[cpu]", "model.context=512", "decode.prefill_chunk=32")
    with Clusters(*common) as made:
        yield made


@pytest.fixture(scope="module")
def prompts(clusters: Clusters, long: bool) -> list[list[int]]:
    lines = (Path(__file__).parent.parent / "data" / "prompts.jsonl").read_text().splitlines()
    served = clusters.running(*CROWD, *BEST_FIRST).client.served
    return [served.encode(json.loads(line)["prompt"]) for line in lines[: 45 if long else 8]]


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> list[list[int]]:
    return cluster.reference(resource_dir("demo") / "target", prompts, TOKENS)


def answers(
    running: Running,
    prompts: Sequence[Sequence[int]],
    sampling: Callable[[int], SamplingParams] = lambda _: GREEDY,
    *,
    cancelled: Sequence[int] = (),
    fault: Callable[[], None] = lambda: None,
) -> list[list[int]]:
    """The answers to all prompts at once; once the first has begun, some are cancelled and `fault`
    is called."""
    client = running.client
    numbers = [
        client.submit(
            prompt,
            sampling(i),
            max_new_tokens=MANY_TOKENS if i in cancelled else TOKENS,
            eos=() if i in cancelled else client.served.eos,
        )
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
                for other in cancelled:
                    client.cancel(numbers[other])
                fault()
        assert isinstance(event, Finished)
        assert (event.reason == "cancelled") == (i in cancelled)
        found.append(tokens)
    return found


def at_rest(running: Running) -> dict[str, int]:
    """The statistics of a cluster, once no request is running."""
    where = running.cluster.url, running.cluster.namespace
    until(lambda: read_status(*where).statistics["running"] == 0)
    return read_status(*where).statistics


def starts_alike(first: Sequence[int], second: Sequence[int]) -> bool:
    """Whether the shorter one is the start of the other."""
    return all(of_first == of_second for of_first, of_second in zip(first, second, strict=False))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way[0].removeprefix("policy="))
def test_concurrent_requests_get_the_texts_of_the_target(clusters, prompts, expected, way):
    assert answers(clusters.running(*CROWD, *way), prompts) == expected


def test_concurrent_sampled_requests_get_the_texts_of_each_alone(clusters, prompts, expected, long):
    """Greedy and sampled requests, of which others are cancelled, in one crowd."""
    running = clusters.running(*CROWD, *BEST_FIRST)
    some = prompts[: 6 if long else 4]
    alone = [answers(running, [prompt], lambda _: SAMPLED)[0] for prompt in some]
    wanted = [of for pair in zip(alone, expected, strict=False) for of in pair]
    mixed = [prompt for prompt in some for _ in range(2)]
    cancelled = [3, 6]
    found = answers(running, mixed, lambda i: GREEDY if i % 2 else SAMPLED, cancelled=cancelled)
    for i, (got, full) in enumerate(zip(found, wanted, strict=True)):
        assert got == full or (i in cancelled and starts_alike(got, full))


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS[:2], ids=lambda way: way[0].removeprefix("policy="))
def test_requests_with_a_shared_prefix_get_the_texts_of_the_target(clusters, prompts, way):
    """At once and again afterwards, when even the answers are in KV, greedy and drawn."""
    running = clusters.running(*CROWD, *way)
    start = [token for prompt in prompts for token in prompt][:100]
    asked = [start + prompt[:9] for prompt in prompts[:8]]
    right = cluster.reference(resource_dir("demo") / "target", asked, TOKENS)

    before = at_rest(running)["cache_hits"]
    assert answers(running, asked) == right
    # Requests do not wait for fewer shared tokens.
    assert at_rest(running)["cache_hits"] - before >= (len(asked) - 1) * (len(start) - 15)
    turns = [prompt + answer for prompt, answer in zip(asked, right, strict=True)]
    drawn = answers(running, turns, lambda _: SAMPLED)
    assert answers(running, turns, lambda _: SAMPLED) == drawn
    apart = clusters.running(*CROWD, *way, "scheduler.prefix_cache=false")
    assert answers(apart, turns, lambda _: SAMPLED) == drawn
    told = at_rest(apart)
    assert told["cache_hits"] == told["kv_slots_retained"] == 0


def test_requests_with_the_least_priority_value_are_served_first(clusters, prompts):
    """Six requests fill the cluster; twelve wait, the urgent ones asked last."""
    running = clusters.running(*CROWD, *BEST_FIRST)
    client, prompt = running.client, prompts[0][:8]
    settings = {  # before anything is asked, as it takes a while
        priority: RequestSettings.of(
            compose([f"decode.priority={priority}", "decode.max_new_tokens=2"])
        )
        for priority in (5, 0, -5)
    }
    filling = [client.submit(prompt, GREEDY, max_new_tokens=1500) for _ in range(6)]
    for request in filling:
        next(client.events(request))  # it is open
    asked = {
        priority: [client.submit(prompt, GREEDY, **each.fields(client.served)) for _ in range(6)]
        for priority, each in settings.items()
    }
    for request in filling:
        client.cancel(request)
    first = []  # when each had its first token, with its priority
    for priority, requests in asked.items():
        for request in requests:
            list(client.events(request))
            first.append((client.reports(request)[0]["token_ns"][0], priority))
    assert [priority for _, priority in sorted(first)] == [*[-5] * 6, *[0] * 6, *[5] * 6]


@pytest.mark.long
def test_preemption_changes_no_text(clusters, prompts):
    """KV for some 150 tokens, and a crowd that wants 324: greedy and sampled, one cancelled."""
    running = clusters.running(*CROWD, *BEST_FIRST, "model.kv_memory=900KiB", *SHORT)
    asked = [prompt[:30] for prompt in prompts[:8]] * 2
    greedy = cluster.reference(resource_dir("demo") / "target", asked[:8], TOKENS)
    drawn = [answers(running, [prompt], lambda _: SAMPLED)[0] for prompt in asked[8:]]

    # Whether all of them are there before the first have ended is a matter of time.
    for _ in range(5):
        found = answers(running, asked, lambda i: GREEDY if i < 8 else SAMPLED, cancelled=[1])
        for i, (got, full) in enumerate(zip(found, [*greedy, *drawn], strict=True)):
            assert got == full or (i == 1 and starts_alike(got, full))
        statistics = at_rest(running)
        assert statistics["kv_slots_held"] == 0
        if statistics["preemptions"] > 0:
            return
    pytest.fail("no request was preempted")


@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.long)])
def test_killed_rank_changes_no_text(clusters, prompts, expected, rank):
    running = clusters.running(*CROWD, *BEST_FIRST)
    worker = running.cluster.deployment.workers[rank]
    with Membership(running.cluster.url, running.cluster.namespace) as shared:
        pid = shared.alive([worker])[worker]
    found = answers(running, prompts, fault=lambda: os.kill(pid, signal.SIGKILL))
    assert found == expected
    assert len(running.cluster.faults) > 0
