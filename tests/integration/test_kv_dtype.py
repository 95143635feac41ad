"""K and V in 8 bits, through the whole product."""

from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import torch

from pipespec.config.choices import options
from pipespec.engine.attention.attention_plan import causal_plan
from pipespec.engine.inspection.inspection import inspect
from pipespec.engine.slice.model_slice import ModelSlice
from pipespec.errors import ConfigError
from pipespec.system.folders import resource_dir
from tests.helpers.models import build
from tools.rig import cluster

PROMPT = list(range(20, 60))
NEW_TOKENS = 16
# The greatest difference of logits, in norm, of a trained model, and of those with random weights,
# whose attention is far sharper.
FORMS = {"int8": 0.005, "fp8": 0.03}
RANDOM = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    return build("qwen3", tmp_path_factory.mktemp("kv"), **sizes, head_dim=64)


def text(path: Path, *overrides: str) -> list[list[int]]:
    """Three requests at once."""
    deployment = cluster.make_deployment(path, path, *overrides)
    return cluster.answers(deployment, [PROMPT[start:] for start in (0, 3, 6)], NEW_TOKENS)


@pytest.mark.parametrize(
    "form",
    [form if form == "fp8" else pytest.param(form, marks=pytest.mark.long) for form in FORMS],
)
def test_the_text_is_one_for_every_stage_count_and_policy(model, form):
    kept = f"model.kv_dtype={form}"
    expected = text(model, kept, "cluster.stages=1", "policy=root")
    for stages, policy in zip(cycle((2, 1, 4)), options("policy"), strict=False):
        assert text(model, kept, f"cluster.stages={stages}", f"policy={policy}") == expected


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model_type", ["demo", "qwen3", "gemma2", "gpt_oss", "deepseek_v3"])
def test_logits_are_those_of_plain_k_and_v_within_a_bound(model, tmp_path, form, model_type):
    if model_type == "demo":
        path, bound = resource_dir("demo") / "target", FORMS[form]
    else:
        path = model if model_type == "qwen3" else build(model_type, tmp_path)
        bound = RANDOM * FORMS[form]
    slots = np.arange(len(PROMPT))
    first, last = causal_plan(slots[:0], slots[:-1]), causal_plan(slots[:-1], slots[-1:])
    found = {}
    for kept in ("auto", form):
        held = ModelSlice.load(
            path, range(inspect(path).num_layers), dtype=torch.float32, num_slots=64, kv_dtype=kept
        )
        tokens = torch.tensor(PROMPT)
        held.forward(tokens[:-1], torch.from_numpy(first.positions), first)
        hidden = held.forward(tokens[-1:], torch.from_numpy(last.positions), last)
        found[kept] = held.logits(hidden)
    off = (found[form] - found["auto"]).norm() / found["auto"].norm()
    assert 0 < off <= bound


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
def test_memory_is_foretold_of_every_kind_of_attention(tmp_path, form, model_type):
    path = build(model_type, tmp_path)
    foretold = inspect(path).kv_bytes("bfloat16", form)
    held = ModelSlice.load(path, range(1), dtype=torch.bfloat16, num_slots=50, kv_dtype=form)
    assert held.num_kv_bytes == 50 * foretold


def test_an_attention_that_does_not_read_it_is_refused(model):
    with pytest.raises(ConfigError, match=r"model\.attention=static does not read; set model\.att"):
        cluster.make_deployment(model, model, "model.kv_dtype=int8", "model.attention=static")
