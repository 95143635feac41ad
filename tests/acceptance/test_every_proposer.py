"""With every proposer the text is that of Hugging Face; wrong draft tokens cost speed alone."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from pipespec.cluster.deployment.memory import WEIGHTS, local_ranks, require_memory, required_bytes
from pipespec.cluster.ranks import rank_components
from pipespec.errors import ConfigError
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
    """In a cascade the mid-size model is the target."""
    target = folder / "target"
    overrides = proposer_overrides(proposer, truth=folder / "truth.jsonl", mid=target)
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


def cascade(folder, *settings: str):
    """The mid-size model is the target."""
    chosen = "proposer=cascade", f"model.mid={folder / 'target'}", "proposer.mid_rows=8"
    return cluster.make_deployment(folder / "target", folder / "draft", *chosen, *settings)


def test_mid_size_model_equal_to_the_target_raises_the_hit_rate(folder, expected, redis):
    """The small draft alone is wrong nearly everywhere; emulated stages give a pass its time."""
    chosen = (
        *(*POLICIES["best_first"], "cluster.stages=3", "policy.row_cost=0.0001"),
        *("emulate=fixed", "emulate.stage_ms=15"),
    )
    asked = [{"prompt": tuple(PROMPTS[0]), "max_new_tokens": NUM_TOKENS}]
    hits = []
    for rows in (0, 8):
        deployment = cascade(folder, *chosen, f"proposer.mid_rows={rows}")
        ((tokens, _, stats),) = cluster.decode(deployment, redis, asked)
        assert tokens == expected[0]
        hits.append(stats["hit_rate"])
    assert hits[1] > hits[0] + 0.2


def test_cascade_needs_a_mid_size_model_and_memory_for_it(folder):
    with pytest.raises(ConfigError, match=r"model\.mid is null"):
        cascade(folder, "model.mid=null")
    deployment = cascade(folder, "model.dtype=bfloat16", "cluster.stages=2")
    more = required_bytes(deployment, 0, mid=True)
    assert more[WEIGHTS] > required_bytes(deployment, 0)[WEIGHTS] > 0
    assert more["proposer.mid_rows"] == 8 * models.VOCAB_SIZE * 2
    ranks = local_ranks(deployment)
    wanted = sum(required_bytes(deployment, rank).total() for rank in ranks) + more.total()
    require_memory(deployment, ranks, lambda device: wanted)
    with pytest.raises(ConfigError, match="GiB on cpu"):
        require_memory(deployment, ranks, lambda device: wanted - 1)


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
