"""With a parallel draft (PARD) texts are those of the target, and the draft's slots come back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from pipespec.cluster import build
from pipespec.controller.server import EmbeddedRedis
from pipespec.core import Sampling
from pipespec.errors import ConfigError
from pipespec.system.resources import resource_dir
from tests.helpers import models
from tools.rig import cluster

TOKENS = 24
PROMPTS = [[5, 17, 3, 8, 120, 44], [7, 9, 11] * 5, [3] * 4, [9, 1, 1, 2, 50]]
POLICIES = {
    "static_tree": ("feed=static_tree", "feed.shape=[1,2,1]", "feed.children=4"),
    "level": ("feed=level", "feed.width=8", "feed.children=4"),
    "best_first": ("feed=best_first", "feed.width=8", "feed.children=4"),
    "adaptive": ("feed=adaptive", "feed.width=8", "feed.children=4"),
}
MIXED = [
    Sampling(),
    Sampling(1.0, seed=1),
    Sampling(0.7, top_k=20, top_p=0.9, seed=7),
    Sampling(),
]


@pytest.fixture(scope="module")
def redis() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, Path, list[list[int]]]:
    """Target, the same as a parallel draft, and what the target says after PROMPTS."""
    folder = tmp_path_factory.mktemp("pair")
    target = models.build("llama", folder / "target")
    draft = models.build("llama", folder / "draft", pard_token=models.VOCAB_SIZE - 1, pard_tokens=3)
    return target, draft, cluster.reference(target, PROMPTS, TOKENS)


@pytest.fixture
def sources(monkeypatch) -> list:
    """The sources that clusters make."""
    made, make = [], build.make_source

    def watched(*given):
        made.append(make(*given))
        return made[-1]

    monkeypatch.setattr(build, "make_source", watched)
    return made


def asked(*sampling: Sampling) -> list[dict]:
    return [
        {"prompt": tuple(prompt), "max_new_tokens": TOKENS, "sampling": how}
        for prompt, how in zip(PROMPTS, sampling or [Sampling()] * len(PROMPTS), strict=True)
    ]


def all_free(sources: list) -> bool:
    """Whether the drafts hold nothing but text that stays for others."""
    return all(
        source.source.runner.slots.num_slots - source.source.runner.slots.num_free
        <= sum(source.source.runner.retained.values())
        for source in sources
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_gives_the_text_of_hugging_face(pair, redis, sources, policy):
    target, draft, expected = pair
    deployment = cluster.make_deployment(target, draft, "cluster.stages=2", *POLICIES[policy])
    assert deployment.parallel is not None and deployment.parallel.tokens == 3
    answers = cluster.decode(deployment, redis, asked())
    assert [tokens for tokens, *_ in answers] == expected
    assert sources[0].source.parallel is not None
    assert len(sources) == 1 and all_free(sources)


def test_a_crowd_of_greedy_and_sampled_requests_gets_what_each_gets_alone(pair, redis, sources):
    target, draft, expected = pair
    ways = {
        most: cluster.make_deployment(
            target, draft, f"scheduler.max_num_seqs={most}", *POLICIES["best_first"]
        )
        for most in (1, 4)
    }
    alone, crowd = (
        [tokens for tokens, *_ in cluster.decode(ways[most], redis, asked(*MIXED))]
        for most in (1, 4)
    )
    assert crowd == alone
    assert [alone[0], alone[3]] == [expected[0], expected[3]]
    plain = cluster.make_deployment(target, draft, "source.parallel=1", "feed=root")
    assert plain.parallel is None
    assert alone == [tokens for tokens, *_ in cluster.decode(plain, redis, asked(*MIXED))]
    assert all_free(sources)


def test_the_parallel_draft_of_the_demo_leaves_the_text_of_its_target(redis, sources):
    demo = resource_dir("demo")
    lines = (Path(__file__).parent.parent / "data" / "prompts.jsonl").read_text().splitlines()
    encode = AutoTokenizer.from_pretrained(demo / "target").encode
    prompts = [encode(json.loads(line)["prompt"])[:64] for line in lines[::15]]
    deployment = cluster.make_deployment(
        demo / "target", demo / "draft_pard", "cluster.stages=4", "source.rounds=1"
    )
    assert deployment.parallel is not None and deployment.parallel.tokens == 4
    requests = [{"prompt": tuple(prompt), "max_new_tokens": TOKENS} for prompt in prompts]
    answers = [tokens for tokens, *_ in cluster.decode(deployment, redis, requests)]
    assert answers == cluster.reference(demo / "target", prompts, TOKENS)
    assert all_free(sources)


def test_a_plain_draft_is_not_asked_for_several_tokens(pair):
    target, _, _ = pair
    with pytest.raises(ConfigError, match=r"source\.parallel is 4, but .* no pard_token"):
        cluster.make_deployment(target, target, "source.parallel=4")
    with pytest.raises(ConfigError, match=r"source\.parallel is 0"):
        cluster.make_deployment(target, target, "source.parallel=0")
