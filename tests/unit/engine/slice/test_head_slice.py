"""Draft heads compute what their trainers' code does."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from pipespec.engine.attention.attention_plan import causal_plan
from pipespec.engine.inspection.draft_heads import inspect_head, require_head_fit
from pipespec.engine.inspection.inspection import CheckpointInfo, inspect
from pipespec.engine.slice.head_slice import HeadSlice, load_head
from tests.helpers import heads, models

TEXT = [5, 17, 3, 8, 120, 44, 7, 9]
MTP = ["deepseek_v3", "glm4_moe", "qwen3_next"]


def loaded(info: CheckpointInfo, target: CheckpointInfo) -> HeadSlice:
    assert info.head is not None
    require_head_fit(info, target)
    return load_head(info.path, info.head, target.path, dtype=torch.float32, num_slots=32)


def computed(head: HeadSlice, features: Tensor) -> tuple[Tensor, Tensor]:
    """What a head of one layer says after each token of TEXT but the first, and what it reads below
    them, given the target's features of each."""
    count = len(TEXT) - 1
    joined = head.joined(torch.tensor(TEXT[1:]), head.fused(features[:-1]))
    slots = np.arange(count)
    found = head.forward(joined, torch.arange(count), causal_plan(slots[:0], slots))
    return head.logits(found), found


@pytest.fixture(scope="module")
def llama() -> Path:
    return models.shared("llama")


@pytest.mark.parametrize("draft_vocab_size", [61, None])
@pytest.mark.parametrize("own_embedding", [False, True])
def test_eagle3_head_computes_what_its_layer_is(tmp_path, llama, draft_vocab_size, own_embedding):
    size = {"draft_vocab_size": draft_vocab_size, "own_embedding": own_embedding}
    folder = heads.write_eagle3(tmp_path / "head", llama, **size)
    target = inspect(llama)
    features = torch.randn(len(TEXT), 3 * target.hidden_size)
    head = loaded(inspect_head(folder, target), target)
    logits, below = computed(head, features)

    weights = load_file(folder / "model.safetensors")
    of_target = load_file(llama / "model.safetensors")
    table = weights.get("embed_tokens.weight", of_target["model.embed_tokens.weight"])
    states = heads.eagle3(weights, table[TEXT[1:]], features[:-1] @ weights["fc.weight"].T)
    assert torch.allclose(below, states, atol=1e-4)
    output = weights.get("lm_head.weight", of_target["lm_head.weight"])
    said = heads.rms(states, weights["norm.weight"]) @ output.T
    assert torch.allclose(logits, said, atol=1e-4)
    if draft_vocab_size is None:
        assert head.tokens is None
    else:
        assert head.tokens.tolist() == weights["t2d"].nonzero().flatten().tolist()


@pytest.mark.parametrize(
    ("config", "taps"),
    [
        ({"eagle_config": None}, (1, 2, 3)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3]}}, (0, 3)),
        ({"eagle_config": None, "eagle_aux_hidden_state_layer_ids": [1, 4]}, (0, 3)),
    ],
    ids=["usual", "as SGLang counts", "as vLLM counts"],
)
def test_layers_that_a_head_reads_are_those_of_its_config(tmp_path, config, taps):
    target = models.build("llama", tmp_path / "target", num_hidden_layers=7)
    folder = heads.write_eagle3(tmp_path / "head", target, layers=taps, **config)
    info = inspect_head(folder, inspect(target))
    assert info.head is not None and info.head.taps == taps


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MTP)
def test_mtp_layers_of_a_checkpoint_are_counted(tmp_path, model_type):
    folder = heads.write_mtp(model_type, tmp_path / "target", layers=3)
    target = inspect(folder)
    info = inspect_head(None, target)
    assert info.num_layers == len(info.stored.layers) == 3 and info.kv_size == target.kv_size
    head = loaded(info, target)
    assert len(head.earlier) == 2
