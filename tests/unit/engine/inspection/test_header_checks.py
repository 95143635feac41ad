"""Headers of checkpoints against their configs: what is refused, and what is taken."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import copytree

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from pipespec.engine.formats import refused_architectures
from pipespec.engine.formats.architectures import count_field
from pipespec.engine.inspection.inspection import inspect
from pipespec.engine.slice.model_slice import ModelSlice
from pipespec.errors import ModelError
from pipespec.system.folders import resource_dir
from tests.helpers.kinds import by_kind
from tests.helpers.models import NUM_LAYERS, VOCAB_SIZE, build, shared

WEIGHTS = "model.safetensors"
DEMO = resource_dir("demo")
NAN = float("nan")
MOST_S = 12.0  # thrice what is usual, as others may use the machine


def edit(path: Path, **changes: object) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change(path: Path, how: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """Change the tensors of a checkpoint."""
    tensors = load_file(path / WEIGHTS)
    how(tensors)
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
    return path


def refused(path: Path, why: str) -> None:
    with pytest.raises(ModelError, match=why) as caught:
        inspect(path)
    assert "\n" not in str(caught.value)


def test_one_file_goes_before_an_index_as_in_transformers(tmp_path):
    path = copytree(shared("llama"), tmp_path / "model")
    whole = inspect(path)
    left_over = {"weight_map": {"model.embed_tokens.weight": "model-00001-of-00002.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(left_over))
    assert inspect(path) == whole


# --- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", by_kind())
def test_half_a_model_is_refused_of_every_architecture(tmp_path, model_type):
    path = copytree(shared(model_type), tmp_path / "model")
    raw = json.loads((path / "config.json").read_text())
    shorter = {
        name: value[: NUM_LAYERS // 2]
        for name, value in raw.items()
        if isinstance(value, list) and len(value) == NUM_LAYERS
    }
    count = count_field(model_type)
    edit(path, **{count: NUM_LAYERS // 2}, **shorter)
    why = rf"holds .*layers\.[23]\..* {count} in config.json is 2, so the model"
    refused(path, f"{why}|config.json is not valid: .* indices in the range")


@pytest.mark.parametrize("model_type", by_kind())
def test_a_missing_tensor_is_refused_of_every_architecture(tmp_path, model_type):
    """Of each kind that a layer in the middle has, and of each that lies outside of layers."""
    path = copytree(shared(model_type), tmp_path / "model")
    tensors = load_file(path / WEIGHTS)
    inside = [name for name in tensors if ".layers.2." in name and ".experts." not in name]
    outside = [name for name in tensors if ".layers." not in name]
    for name in (inside[0], inside[-1], outside[0], outside[-1]):
        kept = {key: value for key, value in tensors.items() if key != name}
        save_file(kept, path / WEIGHTS, metadata={"format": "pt"})
        refused(path, "holds no|does not fit its config.json: . missing tensors, for example")


@pytest.mark.parametrize("model_type", ["deepseek_v3", "gpt_oss", "mixtral", "qwen3_moe"])
def test_a_missing_expert_is_refused(tmp_path, model_type):
    path = build(model_type, tmp_path / "model")

    def drop(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[next(name for name in tensors if ".layers.2." in name and ".experts" in name)]

    refused(change(path, drop), "does not fit its config.json|concatenates do not fit together")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", VOCAB_SIZE + 1),
        ("intermediate_size", 80),
        ("num_key_value_heads", 1),
        ("num_attention_heads", 8),
        ("head_dim", 24),
        ("num_experts", 8),
        ("moe_intermediate_size", 16),
    ],
)
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gemma2", "phi3", "gpt_neox", "starcoder2"])
def test_a_size_that_the_files_do_not_have_is_refused(tmp_path, model_type, field, value):
    path = build(model_type, tmp_path / "model")
    before = _shapes(path)
    edit(path, **{field: value})
    if _shapes(path) == before:  # the class does not look at it
        assert inspect(path)
    else:
        refused(path, "config.json")


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Of the parameters of a model of that config."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    return {name: tuple(each.shape) for name, each in model.state_dict().items()}


def test_integers_where_weights_must_be_are_refused(tmp_path):
    path = build("llama", tmp_path / "model")
    name = "model.layers.1.mlp.up_proj.weight"

    def whole(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name].to(torch.int16)

    refused(change(path, whole), rf"holds {name} as I16, but plain weights must be floating-point")


@pytest.mark.parametrize(
    "how", [lambda t: t.T.contiguous(), lambda t: t.flatten(), lambda t: t.reshape(-1, 8)]
)
def test_a_matrix_of_another_shape_is_refused(tmp_path, how):
    path, name = build("llama", tmp_path / "model"), "model.layers.1.mlp.up_proj.weight"
    wrong = change(path, lambda tensors: tensors.update({name: how(tensors[name])}))
    refused(wrong, f"1 mismatched tensors, for example {name}")


def test_weights_of_layers_that_the_model_would_leave_out_are_refused(tmp_path):
    path = build("llama", tmp_path / "model", attention_bias=True)
    edit(path, attention_bias=False)
    refused(path, r"16 tensors of its layers would be left out, for example .*\.bias")


WHOLE = "but must be a whole number from 1 to"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"hidden_act": "sillu"}, "no model can be made of .*sillu"),
        ({"rms_norm_eps": NAN}, "rms_norm_eps is nan, but must be a finite number"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps is -1e-06, but must be 0 or more"),
        ({"rope_theta": 0}, "rope_theta is 0, but must be above 0"),
        ({"rope_parameters": {"rope_theta": 0}}, r"rope_parameters\.rope_theta is 0, but must be"),
        ({"rope_scaling": {"factor": -2.0}}, r"rope_scaling\.factor is -2.0, but must be above 0"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5, but must be at most 1"),
        ({"attention_dropout": float("inf")}, "attention_dropout is inf, but must be a finite"),
        ({"any": {"deep": [1, {"er": float("-inf")}]}}, r"any\.deep\.er is -inf, but must be"),
        ({"sliding_window": -4}, "sliding_window is -4, but must be 0 or more"),
        ({"eos_token_id": 10**9}, "ends texts with the token 1000000000 .* has 199 tokens"),
        ({"eos_token_id": [2, -1]}, "ends texts with the token -1"),
        *(({"eos_token_id": eos}, "eos_token_id") for eos in ("</s>", [1, "2"], {"a": 1}, 1.5)),
        ({"pad_token_id": 10**6}, "no model can be made of"),
        ({"num_key_value_heads": 8}, "num_attention_heads is 4, but must be a multiple of num_key"),
        ({"num_hidden_layers": NUM_LAYERS + 1}, f"holds no tensor of layer {NUM_LAYERS},"),
        ({"num_hidden_layers": 0}, f"num_hidden_layers is 0, {WHOLE}"),
        ({"num_hidden_layers": 10**30}, f"num_hidden_layers is 10+, {WHOLE}"),
        ({"num_hidden_layers": "many"}, "config.json is not valid"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"hidden_size": 8}, "config.json is 8;"),
        ({"hidden_size": -48}, f"hidden_size is -48, {WHOLE}"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_attention_heads": 0}, f"num_attention_heads is 0, {WHOLE}"),
        ({"num_key_value_heads": 0}, f"num_key_value_heads is 0, {WHOLE}"),
        ({"vocab_size": 0}, f"vocab_size is 0, {WHOLE}"),
        ({"max_position_embeddings": 0}, f"max_position_embeddings is 0, {WHOLE}"),
        ({"head_dim": 1e300}, rf"head_dim is 1e\+300, {WHOLE}"),
        ({"dtype": "x"}, "config.json is not valid: AttributeError"),
        ({"dtype": []}, "config.json is not valid: IndexError"),
        ({"quantization_config": json.loads("[" * 900 + "]" * 900)}, "quantised by 'None'"),
        ({"model_type": "transformer"}, "'transformer' of .* is not supported"),
        ({"num_attention_heads": [4]}, "num_attention_heads"),
        ({"rope_parameters": {"rope_type": "circular", "rope_theta": 1e4}}, "circular"),
        ({"model_type": "mamba"}, f"'mamba'.*{re.escape(refused_architectures.reason('mamba'))}"),
    ],
)
def test_values_that_no_model_has_are_refused(tmp_path, changes, why):
    path = copytree(shared("llama"), tmp_path / "model")
    (path / "generation_config.json").unlink()
    edit(path, **changes)
    refused(path, why)


@pytest.mark.parametrize("broken", [{"num_hidden_layers": 8}, {"rms_norm_eps": NAN}, "dropped"])
def test_the_command_ends_with_one_sentence(tmp_path, broken):
    """Before any rank starts: in so many seconds of computing, most of them for imports."""
    path = copytree(DEMO / "draft", tmp_path / "model")
    if isinstance(broken, dict):
        edit(path, **broken)
    else:
        change(path, lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.weight"))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "pipespec", "generate", "--prompt", "Once", f"model.draft={path}"],
        capture_output=True,
        text=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    took = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith("pipespec: ") and done.stderr.count("\n") == 1, done.stderr
    assert took < MOST_S, f"{took:.1f} s: {done.stderr}"


# --- what is taken ----------------------------------------------------------------------------


def test_changes_that_mean_nothing_are_accepted(tmp_path):
    path = copytree(shared("llama"), tmp_path / "model")
    edit(path, transformers_version="4.0.0", _note="of nobody's", use_cache=False)
    change(path, lambda tensors: tensors.update(dict(reversed(tensors.items()))))
    assert inspect(path) == replace(inspect(shared("llama")), path=path)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe"])
def test_a_layer_for_multi_token_prediction_is_left_out_but_not_more(tmp_path, model_type):
    path = build(model_type, tmp_path / "model", num_nextn_predict_layers=1)
    layers = len(inspect(path).stored.layers)

    def add(number: int) -> Callable[[dict[str, torch.Tensor]], object]:
        return lambda tensors: tensors.update(
            {
                re.sub(r"layers\.3\.", f"layers.{number}.", name): tensor.clone()
                for name, tensor in tensors.items()
                if ".layers.3." in name
            }
        )

    assert len(inspect(change(path, add(layers))).stored.layers) == layers
    refused(change(path, add(layers + 1)), r"layers\.5\..*without this layer")


def test_buffers_of_old_checkpoints_are_taken(tmp_path):
    llama = build("llama", tmp_path / "llama")
    change(
        llama,
        lambda tensors: tensors.update(
            {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(6) for i in range(4)}
        ),
    )
    assert inspect(llama)
    neox = build("gpt_neox", tmp_path / "neox")
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    change(
        neox,
        lambda tensors: tensors.update(
            {f"gpt_neox.layers.{i}.attention.bias": mask.clone() for i in range(4)}
        ),
    )
    assert inspect(neox)


def test_a_tied_head_may_be_stored_all_the_same(tmp_path):
    path = build("llama", tmp_path / "model", tie_word_embeddings=True)
    change(
        path,
        lambda tensors: tensors.update(
            {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
        ),
    )
    assert inspect(path).tied


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "qwen3_moe"])
def test_a_checkpoint_of_the_base_model_is_taken_and_loaded(tmp_path, model_type):
    whole = build(model_type, tmp_path / "whole", tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_pretrained(whole)
    model.base_model.save_pretrained(tmp_path / "base")
    assert not any(name.startswith("model.") for name in load_file(tmp_path / "base" / WEIGHTS))
    assert inspect(tmp_path / "base").stored.total == inspect(whole).stored.total
    for layers in (range(2), range(2, NUM_LAYERS)):
        parts = [ModelSlice.load(path, layers, num_slots=4) for path in (whole, tmp_path / "base")]
        assert parts[0].num_weight_bytes == parts[1].num_weight_bytes


def test_what_fits_is_remembered(tmp_path, monkeypatch):
    path = build("llama", tmp_path / "model", hidden_act="gelu")
    inspect(path)

    def asked(*_: object, **__: object) -> int:
        raise AssertionError("the model was made again")

    monkeypatch.setattr("pipespec.engine.checkpoint.building.check_fit", asked)
    inspect(path)
    with pytest.raises(AssertionError):
        inspect(build("llama", tmp_path / "other", hidden_act="relu"))
