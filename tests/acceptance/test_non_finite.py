"""Weights that are not finite fail the requests that use them and no others."""

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from pipespec.controller.log_records import failure_of
from pipespec.core import NOT_FINITE, SamplingParams
from pipespec.errors import NonFiniteLogits
from tests.helpers import models
from tests.helpers.matrix import some_of
from tools.rig import cluster

BAD_TOKEN = 66  # its embedding is NaN
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
NEW_TOKENS = 12
DRAWN = SamplingParams(temperature=0.9, top_p=0.9, seed=7)
WAYS = {
    "root": ("policy=root", "cluster.stages=2"),
    "best_first": ("policy.width=8", "cluster.stages=3"),
    "static_attention": ("policy.width=8", "cluster.stages=2", "model.attention=static"),
}


def spoil(folder: Path, name: str, row: int | None = None, value: float = float("nan")) -> Path:
    """Overwrite a tensor of the checkpoint, or a row of it."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors[name][slice(None) if row is None else row] = value
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def draft(folder: Path) -> Path:
    return models.build("llama", folder, num_hidden_layers=1)


def asked(prompt: tuple[int, ...], sampling: SamplingParams | None = None) -> dict[str, object]:
    settings = {} if sampling is None else {"sampling": sampling}
    return {"prompt": prompt, "max_new_tokens": NEW_TOKENS, **settings}


@pytest.mark.parametrize("way", WAYS)
def test_request_with_non_finite_logits_fails_alone(tmp_path, redis, way):
    whole = models.build("llama", tmp_path / "whole", tie_word_embeddings=False)
    prompts = [PROMPT, tuple(reversed(PROMPT))]
    expected = cluster.reference(whole, prompts, NEW_TOKENS)
    assert all(BAD_TOKEN not in text for text in expected)
    target = spoil(whole, "model.embed_tokens.weight", BAD_TOKEN)
    deployment = cluster.make_deployment(target, draft(tmp_path / "draft"), *WAYS[way])
    bad = (*PROMPT[:5], BAD_TOKEN, 7)
    requests = [
        asked(prompts[0]),
        asked(bad),
        asked(bad, DRAWN),
        asked(bad, SamplingParams(prompt_logprobs=1)),
        asked(prompts[1]),
    ]
    answers = cluster.decode(deployment, redis, requests)
    reasons = [reason for _, reason, _ in answers]
    assert reasons == ["length", NOT_FINITE, NOT_FINITE, NOT_FINITE, "length"]
    assert [answers[0][0], answers[4][0]] == expected
    assert all(tokens == [] for tokens, *_ in answers[1:4])
    assert isinstance(failure_of(NOT_FINITE), NonFiniteLogits)


@pytest.mark.parametrize(
    ("settings", "spoilt"),
    some_of(
        [("policy.width=8",), ("policy=level", "policy.width=8"), ("proposer=hybrid",)],
        [
            ("model.norm.weight", None, float("nan")),
            ("lm_head.weight", 5, float("inf")),
            ("model.embed_tokens.weight", PROMPT[3], float("nan")),
        ],
        share=3,
    ),
)
def test_draft_with_non_finite_logits_changes_no_text(tmp_path, redis, caplog, settings, spoilt):
    name, row, value = spoilt
    target = models.build("llama", tmp_path / "target")
    (expected,) = cluster.reference(target, [PROMPT], NEW_TOKENS)
    bad = spoil(draft(tmp_path / "draft"), name, row, value)
    deployment = cluster.make_deployment(target, bad, "cluster.stages=2", *settings)
    requests = [asked(PROMPT), asked(PROMPT, DRAWN), asked(PROMPT)]
    answers = cluster.decode(deployment, redis, requests)
    assert [reason for _, reason, _ in answers] == ["length"] * 3
    assert answers[0][0] == answers[2][0] == expected
    good = cluster.make_deployment(target, draft(tmp_path / "good"), "cluster.stages=2", *settings)
    ((drawn, *_),) = cluster.decode(good, redis, [asked(PROMPT, DRAWN)])
    assert answers[1][0] == drawn
    warnings = [record.message for record in caplog.records if "are not finite" in record.message]
    assert len(warnings) == 1 and "continues without its draft tokens" in warnings[0]


def test_mask_token_with_non_finite_logits_changes_no_text(tmp_path, redis):
    """What a parallel draft proposes further ahead."""
    target = models.build("llama", tmp_path / "target")
    (expected,) = cluster.reference(target, [PROMPT], NEW_TOKENS)
    parallel = {"pard_token": BAD_TOKEN, "pard_tokens": 4}
    small = models.build("llama", tmp_path / "draft", num_hidden_layers=1, **parallel)
    settings = ["cluster.stages=2", "policy.width=16"]
    spoil(small, "model.embed_tokens.weight", BAD_TOKEN)
    deployment = cluster.make_deployment(target, small, *settings)
    answers = cluster.decode(deployment, redis, [asked(PROMPT), asked(PROMPT, DRAWN)])
    assert [reason for _, reason, _ in answers] == ["length"] * 2
    assert answers[0][0] == expected
