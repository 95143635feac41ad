"""Clusters give the text of Hugging Face `generate`, token for token.

Real Redis, real loops, the demo pair; the ranks are threads, so that sixteen stages start in
no time. `test_generate.py` runs them as processes.
"""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from pipespec.cluster.decide import decide
from pipespec.config.compose import compose
from pipespec.system.folders import resource_dir
from tests.helpers import models, proposers
from tests.helpers.matrix import some_of
from tools.rig import cluster

PROMPTS = Path(__file__).parent.parent / "data" / "prompts.jsonl"
MAX_PROMPT = 64
# Stages -> tokens per prompt: long pipelines take longer for each.
NEW_TOKENS = {1: 16, 2: 12, 4: 10, 8: 6, 16: 5}
POLICIES = {
    **proposers.POLICIES,
    "best_first": ("policy=best_first", "policy.width=16"),
    # The draft is so slow that speculation is stopped within the first tokens.
    "stopping": ("policy=best_first", "emulate=fixed", "emulate.stage_ms=1", "emulate.draft_ms=15"),
}
ON_ALL_PROMPTS = ("root", "level", "best_first")
SHORT = 1  # stages of which the short suite decodes every prompt, by `best_first`
UNEVEN = [8, 1, 6, 4]  # stages
# Windows and caps, chunks and temperatures, a sparse indexer, two kinds of heads, two attentions in
# a layer; `tests/integration/test_model.py` has all architectures.
SPECIAL = (
    *("deepseek_v32", "gemma2", "gemma4_unified_text", "llama4_text", "longcat_flash", "mistral"),
)
OF_UNEVEN = 8  # tokens per prompt


@pytest.fixture(scope="module")
def demo(long):
    """Prompts of many kinds, and the answers of Hugging Face."""
    folder = resource_dir("demo")
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    texts = [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()]
    prompts = [tokenizer.encode(text)[:MAX_PROMPT] for text in texts]
    assert len(prompts) >= 40
    if not long:
        prompts = prompts[::4]
    return folder, prompts, cluster.reference(folder / "target", prompts, max(NEW_TOKENS.values()))


def part(share: int, policy: str, stages: int) -> slice:
    """One prompt of so many; which ones, that differs from case to case."""
    return slice((5 * list(POLICIES).index(policy) + stages) % share, None, share)


def decoded(demo, redis, tokens: int, some: slice, *settings: str) -> list[float]:
    """Tokens per step of the answers to some of the prompts, which are those of Hugging Face."""
    folder, prompts, expected = demo
    deployment = cluster.make_deployment(folder / "target", folder / "draft", *settings)
    asked = {"max_new_tokens": tokens, "eos": deployment.target.eos}
    requests = [{"prompt": tuple(ids), **asked} for ids in prompts[some]]
    answers = cluster.decode(deployment, redis, requests)
    assert [ids for ids, *_ in answers] == [answer[:tokens] for answer in expected[some]]
    return [stats["tokens_per_step"] for *_, stats in answers]


@pytest.mark.parametrize(("policy", "stages"), some_of(POLICIES, NEW_TOKENS, share=4))
def test_every_policy_and_stage_count_gives_hugging_faces_text(demo, redis, stages, policy, long):
    every = policy in ON_ALL_PROMPTS if long else (policy, stages) == ("best_first", SHORT)
    some = slice(None) if every else part(4 if long else 6, policy, stages)
    settings = f"cluster.stages={stages}", *POLICIES[policy]
    per_step = decoded(demo, redis, NEW_TOKENS[stages], some, *settings)
    if policy == "root":
        # One row in flight; batches of other requests are between, where there are many.
        assert set(per_step) <= {1.0, 1 / stages}


@pytest.mark.parametrize(("policy", "stages"), some_of(POLICIES, UNEVEN, share=6))
def test_uneven_stages_give_the_same_text(demo, redis, policy, stages, long):
    """Stages of unequal and changing speed, verdicts that come late: the same text."""
    times = ",".join(str(1 + rank % 2) for rank in range(stages))
    settings = (
        f"cluster.stages={stages}",
        *("emulate=fixed", f"emulate.stage_ms=['{times}']".replace(",", "','")),
        *("emulate.jitter_ms=1", "emulate_link.latency_ms=1", *POLICIES[policy]),
    )
    decoded(demo, redis, OF_UNEVEN, part(8 if long else 6, policy, stages), *settings)


def test_chunked_prefill_gives_the_same_text(demo, redis):
    folder, prompts, _ = demo
    prompt = [token for ids in prompts for token in ids][:300]
    (expected,) = cluster.reference(folder / "target", [prompt], 24)
    settings = "cluster.stages=4", "decode.prefill_chunk=37"
    deployment = cluster.make_deployment(folder / "target", folder / "draft", *settings)
    asked = [{"prompt": tuple(prompt), "max_new_tokens": 24}]
    ((tokens, reason, stats),) = cluster.decode(deployment, redis, asked)
    assert tokens == expected and reason == "length"
    # Chunks follow one another: the last enters at step 8 and leaves four steps later.
    assert stats["steps"] >= 12


def decodes_as_hugging_face(target, folder, redis, *settings, tokens=16, **of_draft):
    """Two prompts, with a random draft."""
    draft = models.build("llama", folder / "draft", num_hidden_layers=1, **of_draft)
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6], [7] * 5]
    expected = cluster.reference(target, prompts, tokens)
    asked = [{"prompt": tuple(prompt), "max_new_tokens": tokens} for prompt in prompts]
    answers = cluster.decode(cluster.make_deployment(target, draft, *settings), redis, asked)
    return [ids for ids, _, _ in answers] == expected


@pytest.mark.parametrize(
    ("rows", "draft_rows"), [(models.VOCAB_SIZE, 256), (256, models.VOCAB_SIZE)]
)
def test_padded_embeddings_change_no_text(tmp_path, redis, rows, draft_rows):
    target = models.build("llama", tmp_path / "target", vocab_size=rows)
    settings = "cluster.stages=2", "policy.width=8"
    assert decodes_as_hugging_face(target, tmp_path, redis, *settings, vocab_size=draft_rows)


@pytest.mark.parametrize(
    ("policy", "stages"), [pytest.param("level", 1, marks=pytest.mark.long), ("best_first", 3)]
)
@pytest.mark.parametrize("architecture", SPECIAL)
def test_unusual_architectures_give_hugging_faces_text(
    tmp_path, redis, architecture, policy, stages
):
    target = models.build(architecture, tmp_path / "target")
    settings = f"cluster.stages={stages}", f"policy={policy}", "policy.width=8"
    assert decodes_as_hugging_face(target, tmp_path, redis, *settings)


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["sdpa", "static", "triton"])
@pytest.mark.parametrize("policy", POLICIES)
def test_eight_stages_and_a_draft_share_one_gpu(redis, policy, attention):
    folder = resource_dir("demo")
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    texts = [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()]
    prompts = [tokenizer.encode(text)[:MAX_PROMPT] for text in texts[::9]]
    expected = cluster.reference(folder / "target", prompts, 24, device_map="cuda")
    deployment = decide(
        compose(
            [
                *("cluster.stages=8", "cluster.devices=[cuda]", "model.dtype=float32"),
                # The ranks are threads here; `test_graphs.py` has a recording.
                *(f"model.attention={attention}", "model.graph_rows=[]", *POLICIES[policy]),
            ]
        )
    )
    requests = [{"prompt": tuple(ids), "max_new_tokens": 24} for ids in prompts]
    answers = cluster.decode(deployment, redis, requests)
    assert [tokens for tokens, _, _ in answers] == expected


def test_request_ends_at_eos_or_at_the_end_of_the_context(demo, redis):
    folder, prompts, expected = demo
    prompt, stop_at = tuple(prompts[0]), expected[0][3]
    settings = "cluster.stages=2", f"model.context={len(prompt) + 6}"
    deployment = cluster.make_deployment(folder / "target", folder / "draft", *settings)
    asked = {"prompt": prompt, "max_new_tokens": 50}
    long, stopped = cluster.decode(deployment, redis, [asked, {**asked, "eos": (stop_at,)}])
    assert long[:2] == (expected[0][:6], "length")
    assert stopped[:2] == (expected[0][: expected[0].index(stop_at) + 1], "stop")
