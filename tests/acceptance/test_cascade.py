"""With a mid-size model that scores the tree beside the head, texts are those of the target."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipespec.cluster.decide import decide
from pipespec.cluster.deployment.memory import WEIGHTS, local_ranks, require_memory, required_bytes
from pipespec.config.compose import compose
from pipespec.engine.checkpoint import tokenizer
from pipespec.errors import ConfigError
from tests.helpers import models
from tests.helpers.proposers import POLICIES
from tools.rig import cluster

TOKENS = 24
PROMPTS = [[5, 17, 3, 8, 120, 44], [7, 9, 11] * 5, [3] * 4, [9, 1, 1, 2, 50]]


@pytest.fixture(scope="module")
def trio(tmp_path_factory) -> tuple[Path, Path, Path, list[list[int]]]:
    """Target, small draft, mid-size model, and the target's answers to PROMPTS.

    The mid-size model is a copy of the target.
    """
    folder = tmp_path_factory.mktemp("trio")
    target = models.build("llama", folder / "target")
    draft = models.build("llama", folder / "draft", num_hidden_layers=1)
    mid = models.build("llama", folder / "mid")
    return target, draft, mid, cluster.reference(target, PROMPTS, TOKENS)


def cascade(trio, *overrides: str):
    target, draft, mid, _ = trio
    return cluster.make_deployment(
        target, draft, "proposer=cascade", f"model.mid={mid}", "proposer.mid_rows=8", *overrides
    )


def test_mid_size_model_equal_to_the_target_raises_the_hit_rate(trio, redis):
    """The small draft alone is wrong nearly everywhere; emulated stages give a pass its time."""
    chosen = (
        *POLICIES["best_first"],
        "cluster.stages=3",
        "policy.row_cost=0.0001",
        "emulate=fixed",
        "emulate.stage_ms=15",
    )
    asked = [{"prompt": tuple(PROMPTS[0]), "max_new_tokens": TOKENS}]
    hits = []
    for rows in (0, 8):
        ((tokens, _, stats),) = cluster.decode(
            cascade(trio, *chosen, f"proposer.mid_rows={rows}"), redis, asked
        )
        assert tokens == trio[-1][0]
        hits.append(stats["hit_rate"])
    assert hits[1] > hits[0] + 0.2


def test_cascade_of_the_demo_models_gives_the_text_of_the_target(redis):
    chosen = ("proposer=cascade", "cluster.stages=4", "policy.width=16")
    deployment = decide(compose([*chosen, "model.dtype=float32", "model.context=256"]))
    folder = Path(deployment.target.path)
    encode = tokenizer.load(folder).encode
    prompts = [encode(text) for text in ("Once upon a time", "def add(a, b):\n", "Question: 2 + 3")]
    expected = cluster.reference(folder, prompts, TOKENS)
    asked = [{"prompt": tuple(ids), "max_new_tokens": TOKENS} for ids in prompts]
    assert [tokens for tokens, *_ in cluster.decode(deployment, redis, asked)] == expected


def test_cascade_without_a_mid_size_model_is_refused(trio):
    target, draft, *_ = trio
    with pytest.raises(ConfigError, match=r"model\.mid is null"):
        cluster.make_deployment(target, draft, "proposer=cascade", "model.mid=null")


def test_memory_estimate_includes_the_mid_size_model(trio):
    deployment = cascade(trio, "model.dtype=bfloat16", "cluster.stages=2")
    more = required_bytes(deployment, 0, mid=True)
    assert more[WEIGHTS] > required_bytes(deployment, 0)[WEIGHTS] > 0
    assert more["proposer.mid_rows"] == 8 * models.VOCAB_SIZE * 2
    ranks = local_ranks(deployment)
    wanted = sum(required_bytes(deployment, rank).total() for rank in ranks) + more.total()
    require_memory(deployment, ranks, lambda device: wanted)
    with pytest.raises(ConfigError, match="GiB on cpu"):
        require_memory(deployment, ranks, lambda device: wanted - 1)
