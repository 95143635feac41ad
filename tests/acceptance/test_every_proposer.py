"""With every proposer the text is that of Hugging Face; wrong draft tokens cost speed alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from pipespec.cluster.ranks import rank_components
from pipespec.errors import ModelError
from pipespec.system.folders import resource_dir
from tests.helpers import models
from tests.helpers.matrix import some_of
from tests.helpers.proposers import POLICIES, PROPOSERS, proposer_overrides, write_truth
from tools.rig import cluster

NUM_TOKENS = 24
# The second repeats itself, so that a match is found from the first token on.
PROMPTS = [[5, 17, 3, 8, 120, 44], [7, 9, 11] * 5, [3] * 4]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Target, draft, the target's answers to PROMPTS, and a file of them."""
    folder = tmp_path_factory.mktemp("pair")
    target = models.build("llama", folder / "target")
    draft = models.build("llama", folder / "draft", num_hidden_layers=1)
    expected = cluster.reference(target, PROMPTS, NUM_TOKENS)
    truth = folder / "truth.jsonl"
    write_truth(truth, PROMPTS, expected)
    return target, draft, expected, truth


def overrides(proposer: str, truth: Path) -> list[str]:
    """In a cascade the mid-size model is the target of these tests."""
    return proposer_overrides(proposer, truth=truth, mid=truth.parent / "target")


def requests(num_tokens: int = NUM_TOKENS) -> list[dict]:
    return [{"prompt": tuple(p), "max_new_tokens": num_tokens} for p in PROMPTS]


@pytest.mark.parametrize(
    ("proposer", "policy", "stages"),
    some_of(PROPOSERS, POLICIES, [1, 3], share=5),
)
def test_every_proposer_and_policy_gives_the_text_of_hugging_face(
    pair, redis, proposer, policy, stages
):
    target, draft, expected, truth = pair
    deployment = cluster.make_deployment(
        target, draft, f"cluster.stages={stages}", *POLICIES[policy], *overrides(proposer, truth)
    )
    answers = cluster.decode(deployment, redis, requests())
    assert [tokens for tokens, *_ in answers] == expected


def test_suffix_proposer_needs_no_draft_and_hits_repeated_text(redis, tmp_path):
    target = resource_dir("demo") / "target"
    deployment = cluster.make_deployment(
        target,
        tmp_path / "nowhere",
        "proposer=suffix",
        "model.draft=null",
        "policy.row_cost=0.0001",
    )
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


def test_proposer_without_a_draft_does_not_open_the_draft_folder(pair):
    target, _, _, _ = pair
    deployment = cluster.make_deployment(target, Path("/no/such/draft"), "proposer=suffix")
    assert deployment.draft is None
    with pytest.raises(ModelError):
        cluster.make_deployment(target, Path("/no/such/draft"), "proposer=hybrid")
