"""Targets and drafts with layers that keep a running state give the texts of Hugging Face."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from pipespec.cluster.ranks import rank_components
from pipespec.core import SamplingParams
from tests.helpers import models
from tests.helpers.matrix import some_of
from tests.helpers.proposers import POLICIES
from tests.helpers.sampling import plain_loop
from tools.rig import cluster

pytestmark = pytest.mark.slow
# One of each kind: gated delta rule, decays by channel, Mamba 2 alone and beside attention in a
# layer and between layers without either, short convolutions.
FAMILIES = ("qwen3_next", "kimi_linear", "bamba", "falcon_h1", "nemotron_h", "lfm2")
STAGES = (1, 2, 4)
PROMPT_LENGTHS = (1, 17, 300)
TOKENS = 14
SAMPLED = SamplingParams(temperature=0.9, top_k=40, seed=5)


def prompts(lengths: Sequence[int]) -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(2, models.VOCAB_SIZE, length).tolist() for length in lengths]


def reference(path: Path, asked: Sequence[Sequence[int]]) -> list[list[int]]:
    """Without a cache: with one, Nemotron H's kernel for single tokens is .02 from its own forward
    pass, which is that of double precision to 1e-5."""
    return cluster.reference(path, asked, TOKENS, use_cache=False)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Callable[[str], Path]:
    """`target(model_type)`: a random checkpoint, made once."""
    root = tmp_path_factory.mktemp("targets")
    return cache(lambda kind: models.build(kind, root / kind, max_position_embeddings=512))


@pytest.fixture(scope="module")
def greedy(target) -> Callable[[str], list[list[int]]]:
    return cache(lambda kind: reference(target(kind), prompts(PROMPT_LENGTHS)))


def _cases() -> list[object]:
    """Every family with every policy and number of stages; some of them always."""
    cases = []
    for place, family in enumerate(FAMILIES):
        for index, policy in enumerate(POLICIES):
            for stages in STAGES:
                cell = stages == STAGES[place % 3] and index == place % len(POLICIES)
                short = cell and place % 2 == 0
                marks = [] if short else [pytest.mark.long]
                cases.append(pytest.param(family, policy, stages, marks=marks))
    return cases


@pytest.mark.parametrize(("model_type", "policy", "stages"), _cases())
def test_every_policy_and_stage_count_gives_the_text_of_hugging_face(
    target, greedy, redis, model_type, policy, stages
):
    """The draft is the target itself, so that many draft tokens are accepted."""
    path = target(model_type)
    settings = f"cluster.stages={stages}", *POLICIES[policy], "decode.prefill_chunk=32"
    deployment = cluster.make_deployment(path, path, *settings)
    requests = [
        {"prompt": tuple(prompt), "max_new_tokens": TOKENS} for prompt in prompts(PROMPT_LENGTHS)
    ]
    answers = cluster.decode(deployment, redis, requests)
    assert [tokens for tokens, *_ in answers] == greedy(model_type)
    if policy != "root" and stages > 1:
        assert max(statistics["tokens_per_step"] for *_, statistics in answers) * stages > 1.2


@pytest.mark.parametrize(
    "model_type", [FAMILIES[0], *(pytest.param(f, marks=pytest.mark.long) for f in FAMILIES[1:])]
)
def test_a_sampled_text_is_that_of_a_plain_loop(target, redis, model_type):
    path = target(model_type)
    (prompt,) = prompts([21])
    deployment = cluster.make_deployment(path, path, "cluster.stages=2", *POLICIES["best_first"])
    request = {"prompt": tuple(prompt), "max_new_tokens": TOKENS, "sampling": SAMPLED}
    ((tokens, *_),) = cluster.decode(deployment, redis, [request])
    assert tokens == plain_loop(path, prompt, SAMPLED, TOKENS)


@pytest.mark.parametrize(("policy", "stages"), some_of(["best_first", "root"], [1, 2], share=3))
def test_shared_prefixes_change_no_text(target, redis, policy, stages, monkeypatch):
    """Of two prompts that begin alike, and of a conversation."""
    monkeypatch.setattr(rank_components, "STATE_INTERVAL", 16)
    path = target(FAMILIES[0])
    settings = (
        *(f"cluster.stages={stages}", *POLICIES[policy]),
        *("decode.prefill_chunk=24", "scheduler.max_num_seqs=1"),
    )
    deployment = cluster.make_deployment(path, path, *settings)
    common, *ends = prompts([70, 5, 12])
    asked = [[*common, *end] for end in ends]
    (answer,) = reference(path, asked[:1])
    asked.append([*asked[0], *answer, 7, 8, 9])
    requests = [{"prompt": tuple(prompt), "max_new_tokens": TOKENS} for prompt in asked]
    answers = cluster.decode(deployment, redis, requests)
    assert [tokens for tokens, *_ in answers] == reference(path, asked)
    cached = [statistics["cached_tokens"] for *_, statistics in answers]
    assert cached == [0, 64, len(asked[0]) - 1]
