"""NVFP4 and MXFP4 checkpoints of compressed-tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipespec.engine.checkpoint.formats.fp4 import NVFP4
from pipespec.engine.checkpoint.inspection import inspect
from pipespec.engine.model_slice import ModelSlice
from pipespec.errors import ModelError
from tests.helpers.models import build, logits, weights
from tools.rig import cluster
from tools.rig.fp4_files import FORMS, pack

PROMPT = list(range(20, 33))
NEW_TOKENS = 12
# Of the two forms, the other one is left to the long tests.
SOME = [form if form == "mxfp4" else pytest.param(form, marks=pytest.mark.long) for form in FORMS]


@pytest.fixture(scope="module")
def fp4(tmp_path_factory):
    """`fp4(form, model_type)`: a checkpoint and the same in plain float32 weights."""
    root = tmp_path_factory.mktemp("fp4")

    def get(form: str, model_type: str = "llama") -> tuple[Path, Path]:
        folder = root / f"{form}-{model_type}"
        if not folder.exists():
            source = build(model_type, folder / "source", hidden_size=64, intermediate_size=128)
            pack(source, folder / "packed", folder / "plain", form)
        return folder / "packed", folder / "plain"

    return get


@pytest.mark.long
@pytest.mark.parametrize("form", SOME)
@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
def test_weights_become_plain_or_stay_as_they_are(fp4, form, model_type):
    path, plain = fp4(form, model_type)
    found, expected = (weights(each, range(1, 3), dtype=torch.float32) for each in (path, plain))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=0)
    info = inspect(path)
    assert info.weight_format(None, "auto", "bfloat16") == form
    assert info.weight_format(None, "no", "bfloat16") is None
    exact = logits(plain, PROMPT, 1, dtype=torch.float32)
    kept = logits(path, PROMPT, 2, dtype=torch.float32, quantization=form)
    assert (kept - exact).abs().max() <= 1e-5 * exact.abs().max()
    model = ModelSlice.load(path, range(1, 2), dtype=torch.bfloat16, quantization=form, num_slots=4)
    assert model.num_weight_bytes == info.loaded("bfloat16", form).layers[1]
    in_files = sum(
        each.nbytes
        for name, each in load_file(path / "model.safetensors").items()
        if ".layers.1." in name
    )
    assert model.num_weight_bytes <= 1.15 * in_files


@pytest.mark.long
@pytest.mark.parametrize("form", SOME)
def test_the_text_of_kept_weights_is_one_for_stages_and_policies(fp4, form):
    path, _ = fp4(form)

    def text(*overrides: str) -> list[list[int]]:
        deployment = cluster.make_deployment(path, path, *overrides)
        assert deployment.weight_format(deployment.target) == form
        return cluster.answers(deployment, [PROMPT, PROMPT[3:]], NEW_TOKENS)

    expected = text("cluster.stages=1", "policy=root")
    assert text("cluster.stages=2") == text("cluster.stages=4", "policy=level") == expected


def test_files_that_do_not_fit_are_refused(fp4, tmp_path):
    path, _ = fp4(NVFP4)
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight_global_scale"]
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"up_proj is no matrix of 4-bit floats with a scale for"):
        inspect(tmp_path)
