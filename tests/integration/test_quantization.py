"""Weights in fewer bits: slices and the whole product against Hugging Face, quantised alike."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    Mxfp4Config,
    TorchAoConfig,
)

from pipespec.cluster import session
from pipespec.cluster.ranks.rank_components import load_model as build_rank
from pipespec.cluster.weights.plan import on_this_host
from pipespec.controller.embedded_redis import EmbeddedRedis
from pipespec.engine.formats.fp4 import MXFP4
from pipespec.engine.formats.quantization import METHODS, QUANTIZATIONS
from pipespec.engine.inspection.inspection import inspect
from pipespec.engine.slice import speedups
from pipespec.engine.slice.model_slice import ModelSlice
from pipespec.errors import ConfigError, ModelError
from pipespec.system.folders import resource_dir
from tests.helpers.decoding import decode, load
from tests.helpers.matrix import some_of
from tests.helpers.models import NUM_LAYERS, build, logits
from tools.rig import cluster

ROOT = Path(__file__).parents[2]
DEMO = resource_dir("demo")
DEMO_LAYERS = 16
NEW_TOKENS = 12
PROMPT = list(range(20, 33))
SURE = [700, 707, 730] * 4 + [700]  # the demo target is sure of what follows in few bits too
# Tied and plain heads, norms in many places; the last weight of a slice without a head is a
# matrix in some of them, which quantisers left to themselves would spare.
# OLMo's norms have no weights at all.
MODEL_TYPES = ("llama", "qwen2", "gemma2", "gpt_neox", "phi", "starcoder2", "cohere", "olmo")


def settings(quantization: str) -> Any:
    """The same as a user of Transformers would ask for it."""
    if quantization == "int8":
        return TorchAoConfig(Int8WeightOnlyConfig())
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )


def reference(path: Path, **settings: Any) -> Tensor:
    """The logits of Hugging Face for the prompt: `[rows, vocab]`."""
    model = AutoModelForCausalLM.from_pretrained(
        path,
        attn_implementation="eager",
        device_map={"": "cpu"},
        **{"dtype": torch.float32, **settings},
    )
    with torch.inference_mode():
        return model(torch.tensor([PROMPT])).logits[0]


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    """`quantised(quantization)`: the demo target as a checkpoint that is quantised already."""
    root = tmp_path_factory.mktemp("quantised")

    def get(quantization: str) -> Path:
        folder = root / quantization
        if not folder.exists():
            model = AutoModelForCausalLM.from_pretrained(
                DEMO / "target",
                dtype=torch.bfloat16,
                device_map={"": "cpu"},
                quantization_config=settings(quantization),
            )
            model.save_pretrained(folder)
            AutoTokenizer.from_pretrained(DEMO / "target").save_pretrained(folder)
        return folder

    return get


@pytest.mark.parametrize(("model_type", "quantization"), some_of(MODEL_TYPES, QUANTIZATIONS))
def test_slices_are_quantised_like_the_whole_model(tmp_path, model_type, quantization):
    path = build(model_type, tmp_path / "model", hidden_size=64, intermediate_size=128)
    expected = reference(path, quantization_config=settings(quantization))
    loss = (reference(path) - expected).abs().mean()
    for count in (1, 2, NUM_LAYERS):
        found = logits(path, PROMPT, count, dtype=torch.float32, quantization=quantization)
        # What quantising one matrix more or less would change is far more than rounding.
        assert (found - expected).abs().max() < loss / 100, f"{count} slices"


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_sizes_are_foretold(quantization):
    info = inspect(DEMO / "target")
    for dtype in ("float32", "bfloat16"):
        foretold = info.loaded(dtype, quantization)
        for part in (range(4), range(4, 12), range(12, 16)):
            model = ModelSlice.load(
                info.path, part, dtype=getattr(torch, dtype), quantization=quantization, num_slots=4
            )
            expected = sum(foretold.layers[part.start : part.stop])
            expected += (model.is_first or model.is_last) * foretold.embedding
            assert model.num_weight_bytes == pytest.approx(
                expected, rel=0.05
            )  # short rows, many scales
            assert model.dtype == getattr(torch, dtype)
            speedups.use_fastest_products(model)  # which computes plain weights alone by ggml
            assert model.of_ggml is None


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_checkpoint_that_is_quantised_already(quantised, quantization):
    path = quantised(quantization)
    info = inspect(path)
    assert info.storage.quantization == QUANTIZATIONS[quantization].package
    assert info.dtype == "bfloat16"
    (expected,) = cluster.reference(path, [PROMPT], NEW_TOKENS, dtype=torch.bfloat16)
    for count in (1, 4):
        slices = load(path, count, num_layers=DEMO_LAYERS, dtype=torch.bfloat16)
        assert decode(slices, torch.tensor(PROMPT), 5, NEW_TOKENS) == expected
    assert slices[1].num_weight_bytes == pytest.approx(sum(info.stored.layers[4:8]), rel=0.01)
    assert info.loaded("float32", None).layers == info.stored.layers


@pytest.fixture
def gpt_oss(tmp_path):
    """A small gpt-oss as it is published: its experts in MXFP4, random."""
    path = build("gpt_oss", tmp_path / "gpt_oss", hidden_size=64, intermediate_size=64)
    drawn = torch.Generator().manual_seed(0)
    tensors = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = tensor.bfloat16()
            continue
        experts, rows, columns = tensor.shape
        shape = (experts, columns, rows // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=drawn, dtype=torch.uint8)
        scales = torch.randint(120, 126, shape, generator=drawn, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    plain = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    how = {"quant_method": "mxfp4", "modules_to_not_convert": [*plain, "model.embed_tokens"]}
    return edit(path, quantization_config=how)


def test_experts_in_mxfp4_become_plain_weights_or_stay_in_their_blocks(gpt_oss, capfd):
    expected = reference(gpt_oss, quantization_config=Mxfp4Config(dequantize=True))
    info = inspect(gpt_oss)
    assert info.storage.quantization is None
    capfd.readouterr()
    for count in (1, 4):
        found = logits(gpt_oss, PROMPT, count, dtype=torch.float32)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert capfd.readouterr() == ("", "")
    for dtype in ("float32", "bfloat16"):
        held = ModelSlice.load(gpt_oss, range(1, 2), dtype=getattr(torch, dtype), num_slots=4)
        assert held.num_weight_bytes == info.loaded(dtype, None).layers[1]
    # Or they stay in their blocks.
    assert info.weight_format(None, "auto", "bfloat16") == MXFP4
    for count in (1, 4):
        found = logits(gpt_oss, PROMPT, count, dtype=torch.float32, quantization=MXFP4)
        assert (found - expected).norm() <= 0.05 * expected.norm()  # ggml rounds rows to 8 bits
    narrow = ModelSlice.load(
        gpt_oss, range(1, 2), dtype=torch.bfloat16, quantization=MXFP4, num_slots=4
    )
    assert narrow.num_weight_bytes == info.loaded("bfloat16", MXFP4).layers[1]
    in_files = sum(
        each.nbytes
        for name, each in load_file(gpt_oss / "model.safetensors").items()
        if ".layers.1." in name
    )
    assert narrow.num_weight_bytes <= 1.15 * in_files


@pytest.mark.long
def test_loading_prints_nothing():
    """In a process of its own: packages complain when they are imported, and once."""
    script = f"""import torch
from pipespec.engine.formats.fp4 import MXFP4
from pipespec.engine.slice.model_slice import ModelSlice
for quantization in {list(QUANTIZATIONS)}:
    ModelSlice.load({str(DEMO / "target")!r}, range(2, 4), dtype=torch.float32,
                    quantization=quantization, num_slots=4)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.long
def test_target_and_draft_are_quantised_each_in_its_way(quantised, long):
    """Through the whole product, the target plain, quantised as it loads, quantised before."""
    asked = {"prompt": tuple(SURE), "max_new_tokens": NEW_TOKENS}
    cases = [
        (DEMO / "target", "nf4", "int8", settings("nf4"), torch.float32),
        *([(DEMO / "target", None, "int8", None, torch.float16)] if long else []),
        (quantised("nf4"), None, "int8", None, torch.bfloat16),
    ]
    for target, of_target, of_draft, reference, dtype in cases:
        quantize = {} if reference is None else {"quantization_config": reference}
        (expected,) = cluster.reference(target, [SURE], NEW_TOKENS, dtype=dtype, **quantize)
        deployment = cluster.make_deployment(
            target,
            DEMO / "draft",
            "cluster.stages=4",
            "policy.width=8",
            "policy.row_cost=0.0001",
            f"model.quantization={of_target or 'null'}",
            f"model.draft_quantization={of_draft or 'null'}",
            *(["model.dtype=float16"] if dtype == torch.float16 else []),
        )
        with EmbeddedRedis() as redis:
            ((tokens, _, stats),) = cluster.decode(deployment, redis, [asked])
        assert tokens == expected
        assert stats["tokens_per_step"] > 0.25, "the draft never guessed right"


def edit(path: Path, **config: Any) -> Path:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    return path


DYNAMIC = TorchAoConfig(Int8DynamicActivationInt8WeightConfig()).to_dict()


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"quant_method": "hqq", "bits": 4}, r"'hqq', which is not supported; supported are"),
        ({"load_in_8bit": True}, r"LLM\.int8, which may round a row by what else is in its batch"),
        ("int8", r"is quantised by 'None', which is not supported"),
        (DYNAMIC, r"Int8DynamicActivationInt8WeightConfig, which may round a row by what else"),
    ],
)
def test_what_cannot_be_read_is_refused_before_anything_loads(tmp_path, config, sentence):
    path = edit(shutil.copytree(DEMO / "target", tmp_path / "model"), quantization_config=config)
    with pytest.raises(ModelError, match=sentence):
        inspect(path)


def test_settings_that_do_not_fit_the_checkpoint_are_refused(quantised, tmp_path):
    path = quantised("nf4")
    with pytest.raises(ModelError, match=r"is quantised already, by bitsandbytes; leave model.qu"):
        cluster.make_deployment(path, DEMO / "draft", "model.quantization=int8")
    with pytest.raises(ModelError, match=r"leave model.draft_quantization out"):
        cluster.make_deployment(DEMO / "target", path, "model.draft_quantization=int8")
    with pytest.raises(ConfigError, match=r"model\.dtype is float32, but .* is quantised for bfl"):
        cluster.make_deployment(path, DEMO / "draft", "model.dtype=float32")
    with pytest.raises(ModelError, match="is quantised for bfloat16, not float32"):
        ModelSlice.load(path, range(2), dtype=torch.float32, num_slots=4)
    odd = build("llama", tmp_path / "odd", hidden_size=96, intermediate_size=288)
    with pytest.raises(ModelError, match=r"nf4 needs matrices of multiples of 32 by 64, but"):
        cluster.make_deployment(DEMO / "target", odd, "model.draft_quantization=nf4")
    for model_type in ("mixtral", "granitemoe"):
        experts = build(model_type, tmp_path / model_type)
        with pytest.raises(ModelError, match=r"the experts of .* cannot be quantised while they"):
            cluster.make_deployment(experts, DEMO / "draft", "model.quantization=int8")
    with pytest.raises(ConfigError, match=r"did you mean int8"):
        cluster.make_deployment(path, DEMO / "draft", "model.quantization=int")


@pytest.mark.parametrize("package", METHODS)
def test_a_missing_package_is_named_where_weights_load(quantised, monkeypatch, package):
    """A host that only asks needs none, so the deployment itself can be made."""
    quantization = next(n for n, how in QUANTIZATIONS.items() if how.package == package)
    before = quantised(quantization)
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    missing = rf"{package}, which is not installed; pip install"
    for deployment in (
        cluster.make_deployment(
            DEMO / "target", DEMO / "draft", f"model.quantization={quantization}"
        ),
        cluster.make_deployment(before, DEMO / "draft"),
    ):
        with pytest.raises(ModelError, match=missing):
            build_rank(deployment, 1)
        with pytest.raises(ModelError, match=missing), session.start_agents(deployment):
            pass


def test_an_old_config_without_a_method_is_read(quantised, tmp_path):
    path = shutil.copytree(quantised("nf4"), tmp_path / "model")
    stored = json.loads((path / "config.json").read_text())["quantization_config"]
    del stored["quant_method"]
    edit(path, quantization_config=stored)
    assert inspect(path).storage.quantization == "bitsandbytes"
    (held,) = load(path, 1, num_layers=DEMO_LAYERS, dtype=torch.bfloat16)
    assert held.num_weight_bytes == pytest.approx(inspect(path).stored.total, rel=0.01)


def test_a_host_with_another_target_is_refused(quantised):
    deployment = cluster.make_deployment(DEMO / "target", DEMO / "draft")
    host = replace(deployment.hosts[0], target=str(quantised("nf4")))
    with pytest.raises(ConfigError, match=r"16 layers of 128, bitsandbytes in bfloat16, not llama"):
        on_this_host(deployment, host)
