"""AWQ, GPTQ and compressed-tensors: plain weights bit for bit, or left in four bits."""

from __future__ import annotations

import json
import re
import shutil
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from pipespec.client.local_cluster import running
from pipespec.cluster.deployment import decide
from pipespec.cluster.recovery import Fault
from pipespec.config.choices import options
from pipespec.config.compose import compose
from pipespec.controller.embedded_redis import EmbeddedRedis
from pipespec.controller.log_records import Accepted
from pipespec.core import SamplingParams
from pipespec.engine.block_linear import BlockLinear
from pipespec.engine.checkpoint.formats.packing import PACKED_INT4
from pipespec.engine.checkpoint.inspection import inspect
from pipespec.engine.ggml import library as ggml
from pipespec.engine.model_slice import ModelSlice
from pipespec.errors import ConfigError, ModelError, RankFailed
from pipespec.system.folders import resource_dir
from tests.helpers.matrix import some_of
from tests.helpers.models import NUM_LAYERS, build, weights
from tools.rig import cluster
from tools.rig.packing import KINDS, pack, words

DEMO = resource_dir("demo")
PROMPT = list(range(20, 33))
NEW_TOKENS = 12
KEEPS = ("awq", "gptq", "gptq symmetric", "gptq v2", "compressed", "compressed asymmetric")


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """`packed(kind, model_type)`: a checkpoint and the same in plain weights."""
    root = tmp_path_factory.mktemp("packed")

    def get(kind: str, model_type: str = "llama", **options: Any) -> tuple[Path, Path]:
        folder = root / "-".join([kind, model_type, *map(str, options.values())]).replace(" ", "_")
        if not folder.exists():
            source = build(model_type, folder / "source", hidden_size=64, intermediate_size=128)
            pack(source, folder / "packed", folder / "plain", KINDS[kind], **options)
        return folder / "packed", folder / "plain"

    return get


def slices(path: Path, count: int, **how: Any) -> list[ModelSlice]:
    size = NUM_LAYERS // count
    return [
        ModelSlice.load(path, range(start, start + size), num_slots=64, **how)
        for start in range(0, NUM_LAYERS, size)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_slice_holds_the_plain_weights_bit_for_bit(packed, kind):
    path, plain = packed(kind)
    for layers in (range(4), range(2), range(1, 2)):
        for dtype in (torch.float16, torch.float32):
            found = weights(path, layers, dtype=dtype)
            expected = weights(plain, layers, dtype=dtype)
            assert found.keys() == expected.keys()
            for name in expected:
                assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("kind", ["awq", "gptq", "compressed"])
@pytest.mark.parametrize("model_type", ["qwen2", "mixtral"])
def test_biases_and_experts(packed, kind, model_type):
    path, plain = packed(kind, model_type)
    found, expected = (weights(each, range(1, 3), dtype=torch.float32) for each in (path, plain))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_layers_that_are_left_unquantised_stay_as_they_are(packed):
    path, plain = packed("awq", skip="layers.1.")
    found, expected = (weights(each, range(4), dtype=torch.float32) for each in (path, plain))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    kept = inspect(path).storage.kept_layers
    assert kept[1].weights == 0 < kept[0].weights


def test_the_reference_packs_as_compressed_tensors_does(packed):
    """Its words, and Transformers' own reading of such a checkpoint."""
    codes = np.random.default_rng(0).integers(0, 16, (5, 24))
    theirs = pack_to_int32(torch.from_numpy(codes - 8).to(torch.int8), 4)
    assert torch.equal(theirs, torch.from_numpy(words(codes, 4)))
    for kind in ("compressed", "compressed asymmetric", "compressed 8 bits"):
        path, plain = packed(kind)
        theirs, ours = (
            AutoModelForCausalLM.from_pretrained(each, dtype=torch.float16, **how).state_dict()
            for each, how in (
                (path, {"quantization_config": CompressedTensorsConfig(dequantize=True)}),
                (plain, {}),
            )
        )
        assert all(torch.equal(theirs[name], ours[name]) for name in ours), kind


def eight_bits_each(plain: Path, folder: Path, form: str) -> Path:
    """A checkpoint whose matrices are numbers of eight bits with a scale for each row."""
    folder.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        tensors[name] = tensor
        if name.endswith("_proj.weight"):
            integer = form == "int-quantized"
            most = 127 if integer else 448
            scale = tensor.float().abs().amax(1, keepdim=True) / most
            codes = tensor.float() / scale
            eighth = codes.round().to(torch.int8) if integer else codes.to(torch.float8_e4m3fn)
            tensors |= {name: eighth, f"{name}_scale": scale.half()}
    kind = "int" if form == "int-quantized" else "float"
    how = {"num_bits": 8, "type": kind, "strategy": "channel", "symmetric": True}
    stored = {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": how}},
        "ignore": ["lm_head"],
    }
    config = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": stored}))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("form", ["int-quantized", "float-quantized"])
def test_numbers_of_eight_bits_become_plain_weights(packed, tmp_path, form):
    """As Transformers makes them of the whole model."""
    path = eight_bits_each(packed("awq")[1], tmp_path / form, form)
    expected = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=torch.float16,
        quantization_config=CompressedTensorsConfig(dequantize=True),
    ).state_dict()
    info = inspect(path)
    for i in range(NUM_LAYERS):
        found = weights(path, range(i, i + 1), dtype=torch.float16)
        for name in (name for name in expected if f".layers.{i}." in name):
            assert torch.equal(
                found[name.replace(f"model.layers.{i}.", "layers.0.")], expected[name]
            )
        model = ModelSlice.load(path, range(1, 2), dtype=torch.float16, num_slots=4)
        assert model.num_weight_bytes == info.loaded("float16", None).layers[1]


@pytest.mark.parametrize("kind", ["awq", "gptq reordered", "compressed asymmetric"])
def test_token_ids_are_those_of_the_plain_weights(packed, kind, long):
    """Through the whole product, the target packed and its own draft."""
    path, plain = packed(kind)
    (expected,) = cluster.reference(plain, [PROMPT], NEW_TOKENS)
    for stages in (1, 2, 4) if long else (2,):
        deployment = cluster.make_deployment(
            path,
            path,
            f"cluster.stages={stages}",
            "policy.width=8",
            "model.dtype=float32",
            "model.keep_quantized=no",
        )
        assert deployment.weight_format(deployment.target) is None
        with EmbeddedRedis() as redis:
            ((tokens, _, _),) = cluster.decode(
                deployment, redis, [{"prompt": tuple(PROMPT), "max_new_tokens": NEW_TOKENS}]
            )
        assert tokens == expected


def kept_text(path: Path, *overrides: str) -> list[list[int]]:
    """Three requests at once, in four bits."""
    deployment = cluster.make_deployment(path, path, "model.dtype=bfloat16", *overrides)
    assert deployment.weight_format(deployment.target) == PACKED_INT4
    return cluster.answers(deployment, [PROMPT[start:] for start in (0, 3, 6)], NEW_TOKENS)


def test_in_four_bits_the_text_is_one_for_every_stage_count_policy_and_batch(packed):
    path, _ = packed("awq")
    expected = kept_text(path, "cluster.stages=1", "policy=root")
    assert len({tuple(tokens) for tokens in expected}) == 3
    for stages, policy in zip(cycle((2, 1, 4)), options("policy"), strict=False):
        assert kept_text(path, f"cluster.stages={stages}", f"policy={policy}") == expected


@pytest.mark.parametrize("kind", KEEPS)
def test_products_of_four_bits_are_those_of_the_plain_weights(packed, kind):
    """But for bfloat16's rounding; and memory is foretold to the byte."""
    path, plain = packed(kind)
    info = inspect(path)
    foretold = info.loaded("bfloat16", PACKED_INT4)
    assert info.weight_format(None, "auto", "bfloat16") == PACKED_INT4
    assert info.weight_format(None, "auto", "float32") == PACKED_INT4
    assert info.weight_format(None, "no", "bfloat16") is None
    for i in range(NUM_LAYERS):
        model = ModelSlice.load(
            path, range(i, i + 1), dtype=torch.bfloat16, quantization=PACKED_INT4, num_slots=4
        )
        ends = (i == 0) * foretold.embedding + (i == NUM_LAYERS - 1) * foretold.head
        assert model.num_weight_bytes == foretold.layers[i] + ends
    assert max(foretold.layers) < max(info.loaded("bfloat16", None).layers) / 2.5
    kept, exact = (
        run(each, how)
        for each, how in (
            (path, {"dtype": torch.bfloat16, "quantization": PACKED_INT4}),
            (plain, {"dtype": torch.float32}),
        )
    )
    assert (kept - exact).abs().max() < 0.05 * exact.abs().max()


@pytest.mark.parametrize(
    ("kind", "model_type"),
    some_of(("awq", "gptq", "compressed asymmetric"), ("mixtral", "qwen3_moe"), share=3),
)
def test_experts_stay_in_four_bits(packed, kind, model_type):
    path, plain = packed(kind, model_type)
    info = inspect(path)
    foretold = info.loaded("bfloat16", PACKED_INT4)
    model = ModelSlice.load(
        path, range(1, 2), dtype=torch.bfloat16, quantization=PACKED_INT4, num_slots=4
    )
    assert model.num_weight_bytes == foretold.layers[1]
    assert foretold.layers[1] < info.loaded("bfloat16", None).layers[1] / 2.5
    kept, exact = (
        run(each, how)
        for each, how in (
            (path, {"dtype": torch.bfloat16, "quantization": PACKED_INT4}),
            (plain, {"dtype": torch.float32}),
        )
    )
    assert (kept - exact).abs().max() < 0.1 * exact.abs().max()
    expected = kept_text(path, "cluster.stages=1", "policy=root")
    assert kept_text(path, "cluster.stages=2") == expected


def run(path: Path, how: dict[str, Any]) -> torch.Tensor:
    """Hidden states after two layers, of the prompt."""
    from pipespec.engine.attention.attention_plan import causal_plan

    model = ModelSlice.load(path, range(2), num_slots=32, **how)
    slots = np.arange(len(PROMPT))
    plan = causal_plan(slots[:0], slots)
    return model.forward(torch.tensor(PROMPT), torch.from_numpy(plan.positions), plan).float()


def edited(path: Path, folder: Path, change: Any = None, **config: Any) -> Path:
    """A copy with other tensors, or another quantization_config."""
    folder.mkdir()
    stored = json.loads((path / "config.json").read_text())
    stored["quantization_config"] |= config
    (folder / "config.json").write_text(json.dumps(stored))
    tensors = load_file(path / "model.safetensors")
    if change is not None:
        change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


FIRST = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("kind", "change", "config", "sentence"),
    [
        ("awq", None, {"group_size": 64}, "must be .* for groups of 64"),
        ("awq", None, {"group_size": 0}, "groups of 0 weights"),
        ("awq", None, {"group_size": "x"}, "group_size"),
        ("awq", None, {"bits": 3}, "3 bits packed as 'gemm', where only 4 bits"),
        ("awq", None, {"version": "gemv"}, "4 bits packed as 'gemv'"),
        ("awq", lambda t: t.pop(f"{FIRST}.qzeros"), {}, r"q_proj\.qzeros is missing"),
        ("gptq", lambda t: t.pop(f"{FIRST}.scales"), {}, r"q_proj\.scales is missing"),
        ("gptq", None, {"bits": 3}, "3 bits, where 2, 4 and 8 are read"),
        ("gptq", None, {"bits": 8}, "does not fit its config.json"),
        ("gptq", None, {"checkpoint_format": "marlin"}, "its format is 'marlin'"),
        ("gptq", None, {"dynamic": {"x": {"bits": 8}}}, "different numbers of bits"),
        ("compressed", None, {"format": "marlin-24"}, "its format is 'marlin-24'"),
        ("compressed", None, {"config_groups": 3}, "config_groups"),
        ("compressed", lambda t: t.pop(f"{FIRST}.weight_scale"), {}, "weight_scale is missing"),
        (
            "awq",
            lambda t: t.update({"model.layers.0.mlp.act.scales": torch.ones(128)}),
            {},
            "scales of activations",
        ),
    ],
)
def test_odd_files_are_refused_in_a_sentence_before_anything_loads(
    packed, tmp_path, kind, change, config, sentence
):
    path = edited(packed(kind)[0], tmp_path / "odd", change, **config)
    with pytest.raises(ModelError, match=sentence) as refused:
        inspect(path)
    assert "\n" not in str(refused.value)


def test_an_order_that_cannot_be_is_refused(packed, tmp_path):
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{FIRST}.g_idx"] += 7

    path = edited(packed("gptq")[0], tmp_path / "odd", spoil)
    with pytest.raises(ModelError, match="names groups that do not exist"):
        ModelSlice.load(path, range(1), dtype=torch.float32, num_slots=4)


def test_an_order_that_the_config_denies_does_not_stay_in_four_bits(packed, tmp_path):
    path = edited(packed("gptq reordered")[0], tmp_path / "odd", desc_act=False)
    with pytest.raises(ModelError, match=r"of any inputs, though config.json says otherwise; set "):
        ModelSlice.load(path, range(1), dtype=torch.bfloat16, quantization=PACKED_INT4, num_slots=4)
    plain = weights(path, range(1), dtype=torch.float16)
    expected = weights(packed("gptq reordered")[1], range(1), dtype=torch.float16)
    assert all(torch.equal(plain[name], expected[name]) for name in expected)


def test_settings_that_do_not_fit_are_refused(packed):
    path, plain = packed("awq")
    with pytest.raises(ConfigError, match="has no weights that can stay in few bits; leave it out"):
        cluster.make_deployment(plain, plain, "model.keep_quantized=yes", "model.dtype=bfloat16")
    with pytest.raises(
        ModelError, match=r"is quantised already, by awq; leave model\.quantization"
    ):
        cluster.make_deployment(path, path, "model.quantization=int8")
    no = cluster.make_deployment(path, path, "model.keep_quantized=no", "model.dtype=bfloat16")
    assert no.weight_format(no.target) is None


def test_a_kernel_that_is_wrong_is_not_used(packed, monkeypatch):
    path, _ = packed("awq")
    right = BlockLinear._dequantised
    monkeypatch.setattr(BlockLinear, "_dequantised", lambda *args: right(*args) + 0.1)
    monkeypatch.setattr(ggml, "load", lambda: None)
    with pytest.raises(
        ModelError, match=r"failed its self-test on cpu: .* set model.keep_quantized=no"
    ):
        ModelSlice.load(path, range(1), dtype=torch.bfloat16, quantization=PACKED_INT4, num_slots=4)


def far_from_zero(tensors: dict[str, torch.Tensor]) -> None:
    """Let the first matrix of the second of two stages have scales whose product with a zero point
    float16 does not hold."""
    name = "model.layers.8.self_attn.q_proj"
    tensors[f"{name}.qzeros"].fill_(0x33333333)
    tensors[f"{name}.qweight"].fill_(0x33333333)
    tensors[f"{name}.qweight"][::32] = 0x44444444
    tensors[f"{name}.scales"].fill_(30000)


def answer(*overrides: str, in_four_bits: bool) -> tuple[list[int], list[Fault]]:
    """Token ids of a cluster of processes, and what ended its epochs. Rows come alone: in plain
    bfloat16 a batch's size can change a row."""
    alone = ("policy=root", "proposer=suffix", "cluster.stages=2", "model.dtype=bfloat16")
    deployment = decide(compose([*alone, *overrides]))
    assert (deployment.weight_format(deployment.target) == PACKED_INT4) == in_four_bits
    with running(deployment) as (cluster, client):
        prompt = client.served.encode("Once upon a time")
        request = client.submit(prompt, SamplingParams(), max_new_tokens=24)
        told = [each for each in client.events(request) if isinstance(each, Accepted)]
        return [token for each in told for token in each.tokens], list(cluster.faults)


@pytest.mark.long
def test_what_one_rank_cannot_multiply_in_four_bits_all_make_plain(tmp_path):
    pack(DEMO / "target", tmp_path / "packed", tmp_path / "plain", KINDS["awq"])
    path = edited(tmp_path / "packed", tmp_path / "odd", far_from_zero)
    for file in (DEMO / "target").glob("*token*"):
        shutil.copy(file, path)
    expected, none = answer(f"model.target={path}", "model.keep_quantized=no", in_four_bits=False)
    assert not none
    tokens, (fault,) = answer(f"model.target={path}", in_four_bits=True)
    assert tokens == expected
    assert re.search(r"float16 does not hold .*q_proj.*dequantised", fault.reason)
    with pytest.raises(RankFailed, match=r"set model\.keep_quantized=no"):
        answer(f"model.target={path}", "model.keep_quantized=yes", in_four_bits=True)
