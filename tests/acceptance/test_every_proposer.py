"""With every proposer the text is that of Hugging Face; wrong draft tokens cost speed alone."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from pipespec.cluster.ranks import rank_components
from pipespec.system.folders import resource_dir
from tests.helpers import models
from tests.helpers.matrix import some_of
from tests.helpers.proposers import POLICIES, PROPOSERS, proposer_overrides, write_truth
from tools.rig import cluster

NUM_TOKENS = 24
# The second repeats itself, so that a match is found from the first token on.
PROMPTS = [[5, 17, 3, 8, 120, 44], [7, 9, 11] * 5, [3] * 4, [9, 1, 1, 2, 50]]
DEMO = resource_dir("demo")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A target, a small draft, and a copy of the target as a parallel draft (PARD)."""
    folder = tmp_path_factory.mktemp("models")
    models.build("llama", folder / "target")
    models.build("llama", folder / "draft", num_hidden_layers=1)
    parallel = {"pard_token": models.VOCAB_SIZE - 1, "pard_tokens": 3}
    models.build("llama", folder / "parallel", **parallel)
    return folder


@pytest.fixture(scope="module")
def expected(folder) -> list[list[int]]:
    """The target's answers to PROMPTS, which are in a file of the folder too."""
    answers = cluster.reference(folder / "target", PROMPTS, NUM_TOKENS)
    write_truth(folder / "truth.jsonl", PROMPTS, answers)
    return answers


@pytest.fixture
def proposers(monkeypatch) -> list:
    """The proposers that clusters make."""
    made, make = [], rank_components.make_proposer

    def watched(*given):
        made.append(make(*given))
        return made[-1]

    monkeypatch.setattr(rank_components, "make_proposer", watched)
    return made


def decoded(deployment, redis) -> list[list[int]]:
    asked = [{"prompt": tuple(prompt), "max_new_tokens": NUM_TOKENS} for prompt in PROMPTS]
    return [tokens for tokens, *_ in cluster.decode(deployment, redis, asked)]


@pytest.mark.parametrize(
    ("proposer", "policy", "stages"), some_of(PROPOSERS, POLICIES, [1, 3], share=5)
)
def test_every_proposer_and_policy_gives_the_text_of_hugging_face(
    folder, expected, redis, proposer, policy, stages
):
    target = folder / "target"
    overrides = proposer_overrides(proposer, truth=folder / "truth.jsonl", target=target)
    settings = f"cluster.stages={stages}", *POLICIES[policy], *overrides
    deployment = cluster.make_deployment(target, folder / "draft", *settings)
    assert decoded(deployment, redis) == expected


def test_suffix_proposer_needs_no_draft_and_hits_repeated_text(redis, tmp_path):
    target = DEMO / "target"
    settings = "proposer=suffix", "model.draft=null", "policy.row_cost=0.0001"
    deployment = cluster.make_deployment(target, tmp_path / "nowhere", *settings)
    assert deployment.draft is None
    assert rank_components.load_model(deployment, 0) is None
    # The demo target soon repeats itself here.
    tokenizer = AutoTokenizer.from_pretrained(target)
    prompt = tuple(tokenizer.encode("Once upon a time there was a little girl who"))
    length = 80
    (expected,) = cluster.reference(target, [list(prompt)], length)
    ((tokens, *_, stats),) = cluster.decode(
        deployment, redis, [{"prompt": prompt, "max_new_tokens": length}]
    )
    assert tokens == expected
    repeats = sum(
        expected[i - 4 : i + 1] in (expected[j - 4 : j + 1] for j in range(4, i))
        for i in range(8, length)
    )
    assert repeats > length / 4
    assert stats["hit_rate"] >= 0.5 * repeats / length


def all_free(proposers: list) -> bool:
    """Whether all KV slots of the drafts are free but those of cached sequences."""
    runners = [each.proposer.runner for each in proposers]
    return all(
        runner.slots.num_slots - runner.slots.num_free <= sum(runner.cached.values())
        for runner in runners
    )


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "root"])
def test_parallel_draft_gives_the_text_of_hugging_face_and_frees_its_kv_slots(
    folder, expected, redis, proposers, policy
):
    settings = "cluster.stages=2", *POLICIES[policy]
    deployment = cluster.make_deployment(folder / "target", folder / "parallel", *settings)
    assert deployment.parallel is not None and deployment.parallel.tokens == 3
    assert decoded(deployment, redis) == expected
    assert proposers[0].proposer.parallel is not None
    assert len(proposers) == 1 and all_free(proposers)
