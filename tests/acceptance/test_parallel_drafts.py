"""With a parallel draft (PARD) texts are those of the target, and the draft frees its KV slots."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from pipespec.cluster.ranks import rank_components
from pipespec.core import SamplingParams
from pipespec.system.folders import resource_dir
from tests.helpers import models
from tests.helpers.proposers import POLICIES
from tools.rig import cluster

TOKENS = 24
PROMPTS = [[5, 17, 3, 8, 120, 44], [7, 9, 11] * 5, [3] * 4, [9, 1, 1, 2, 50]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, Path, list[list[int]]]:
    """Target, a copy of it as a parallel draft, and the target's answers to PROMPTS."""
    folder = tmp_path_factory.mktemp("pair")
    target = models.build("llama", folder / "target")
    draft = models.build("llama", folder / "draft", pard_token=models.VOCAB_SIZE - 1, pard_tokens=3)
    return target, draft, cluster.reference(target, PROMPTS, TOKENS)


@pytest.fixture
def proposers(monkeypatch) -> list:
    """The proposers that clusters make."""
    made, make = [], rank_components.make_proposer

    def watched(*given):
        made.append(make(*given))
        return made[-1]

    monkeypatch.setattr(rank_components, "make_proposer", watched)
    return made


def asked(*sampling: SamplingParams) -> list[dict]:
    return [
        {"prompt": tuple(prompt), "max_new_tokens": TOKENS, "sampling": how}
        for prompt, how in zip(PROMPTS, sampling or [SamplingParams()] * len(PROMPTS), strict=True)
    ]


def all_free(proposers: list) -> bool:
    """Whether all KV slots of the drafts are free but those of cached sequences."""
    runners = [each.proposer.runner for each in proposers]
    return all(
        runner.slots.num_slots - runner.slots.num_free <= sum(runner.cached.values())
        for runner in runners
    )


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "root"])
def test_parallel_draft_gives_the_text_of_hugging_face_under_every_policy(
    pair, redis, proposers, policy
):
    target, draft, expected = pair
    deployment = cluster.make_deployment(target, draft, "cluster.stages=2", *POLICIES[policy])
    assert deployment.parallel is not None and deployment.parallel.tokens == 3
    answers = cluster.decode(deployment, redis, asked())
    assert [tokens for tokens, *_ in answers] == expected
    assert proposers[0].proposer.parallel is not None
    assert len(proposers) == 1 and all_free(proposers)


def test_parallel_draft_of_the_demo_gives_the_text_of_its_target(redis, proposers):
    demo = resource_dir("demo")
    lines = (Path(__file__).parent.parent / "data" / "prompts.jsonl").read_text().splitlines()
    encode = AutoTokenizer.from_pretrained(demo / "target").encode
    prompts = [encode(json.loads(line)["prompt"])[:64] for line in lines[::15]]
    deployment = cluster.make_deployment(
        demo / "target", demo / "draft_pard", "cluster.stages=4", "proposer.rounds=1"
    )
    assert deployment.parallel is not None and deployment.parallel.tokens == 4
    requests = [{"prompt": tuple(prompt), "max_new_tokens": TOKENS} for prompt in prompts]
    answers = [tokens for tokens, *_ in cluster.decode(deployment, redis, requests)]
    assert answers == cluster.reference(demo / "target", prompts, TOKENS)
    assert all_free(proposers)
