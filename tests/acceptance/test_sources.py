"""Whoever guesses, the text is that of Hugging Face `generate`; a bad guess costs speed alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from pipespec.cluster import build
from pipespec.controller.server import EmbeddedRedis
from pipespec.errors import ConfigError, ModelError
from pipespec.system.resources import resource_dir
from tests.helpers import models
from tests.helpers.matrix import some_of
from tools.rig import cluster

NUM_TOKENS = 24
POLICIES = {
    "root": ("feed=root",),
    "static_tree": ("feed=static_tree", "feed.shape=[1,2,1]", "feed.children=4"),
    "level": ("feed=level", "feed.width=8", "feed.children=4"),
    "best_first": ("feed=best_first", "feed.width=8", "feed.children=4"),
}
SOURCES = ("draft_model", "suffix", "hybrid", "synthetic")
# The second repeats itself, so that a match is found from the first token on.
PROMPTS = [[5, 17, 3, 8, 120, 44], [7, 9, 11] * 5, [3] * 4]


@pytest.fixture(scope="module")
def redis():
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Target, draft, what the target says after PROMPTS, and a file of it."""
    folder = tmp_path_factory.mktemp("pair")
    target = models.build("llama", folder / "target")
    draft = models.build("llama", folder / "draft", num_hidden_layers=1)
    expected = cluster.reference(target, PROMPTS, NUM_TOKENS)
    truth = folder / "truth.jsonl"
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, expected, strict=True)]
    truth.write_text("".join(json.dumps(text) + "\n" for text in texts))
    return target, draft, expected, truth


def overrides(source: str, truth: Path) -> list[str]:
    chosen = [f"source={source}"]
    if source == "synthetic":
        chosen.append(f"source.truth={truth}")
    if source in ("suffix", "synthetic"):
        chosen.append("model.draft=null")
    return chosen


def requests(num_tokens: int = NUM_TOKENS) -> list[dict]:
    return [{"prompt": tuple(p), "max_new_tokens": num_tokens} for p in PROMPTS]


@pytest.mark.parametrize(("source", "policy", "stages"), some_of(SOURCES, POLICIES, [1, 3]))
def test_every_source_and_policy_gives_the_text_of_hugging_face(
    pair, redis, source, policy, stages
):
    target, draft, expected, truth = pair
    deployment = cluster.make_deployment(
        target, draft, f"cluster.stages={stages}", *POLICIES[policy], *overrides(source, truth)
    )
    answers = cluster.decode(deployment, redis, requests())
    assert [tokens for tokens, *_ in answers] == expected


def test_suffix_needs_no_draft_and_finds_what_repeats(redis, tmp_path):
    target = resource_dir("demo") / "target"
    deployment = cluster.make_deployment(
        target,
        tmp_path / "nowhere",
        "source=suffix",
        "model.draft=null",
        "feed.row_cost=0.0001",
    )
    assert deployment.draft is None
    assert build.load_model(deployment, 0) is None
    # The demo target soon repeats itself here, and is then guessed.
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


def test_a_source_without_a_draft_never_looks_at_one(pair):
    target, _, _, _ = pair
    deployment = cluster.make_deployment(target, Path("/no/such/draft"), "source=suffix")
    assert deployment.draft is None
    with pytest.raises(ModelError):
        cluster.make_deployment(target, Path("/no/such/draft"), "source=hybrid")
    assert cluster.make_deployment(
        target, Path("/no/such/draft"), "source=hybrid", "source.sources=[suffix]"
    )


def test_a_better_synthetic_draft_decodes_in_fewer_steps(pair, redis):
    target, draft, expected, truth = pair

    def tokens_per_step(*curve: str) -> float:
        deployment = cluster.make_deployment(
            target,
            draft,
            "cluster.stages=4",
            "feed=level",
            "feed.width=16",
            *overrides("synthetic", truth),
            f"source.curve=[{','.join(curve)}]",
        )
        answers = cluster.decode(deployment, redis, requests())
        assert [tokens for tokens, *_ in answers] == expected
        return sum(stats["tokens_per_step"] for *_, stats in answers) / len(answers)

    assert tokens_per_step("1:0.3") < tokens_per_step("1:0.81", "8:0.99")
    assert tokens_per_step("1:1.0") == pytest.approx(1, rel=0.05)


def test_a_file_that_is_not_this_targets_text_ends_the_run(pair, redis, tmp_path):
    target, draft, _, truth = pair
    wrong = tmp_path / "wrong.jsonl"
    texts = [json.loads(line) for line in truth.read_text().splitlines()]
    texts[0][-5] = (texts[0][-5] + 1) % models.VOCAB_SIZE
    wrong.write_text("".join(json.dumps(text) + "\n" for text in texts))
    deployment = cluster.make_deployment(
        target, draft, "cluster.stages=2", *overrides("synthetic", wrong)
    )
    with pytest.raises(ConfigError, match="not what this target says"):
        cluster.decode(deployment, redis, requests())
