"""FP8 checkpoints: plain weights bit for bit, or left in eight bits."""

from __future__ import annotations

import json
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from pipespec.cluster import memory
from pipespec.cluster.held_weights import expanded, summary
from pipespec.config.choices import options
from pipespec.engine.checkpoint import inspect
from pipespec.engine.formats.fp8 import FP8, Fp8Weights
from pipespec.engine.fp8_linear import Fp8Linear
from pipespec.engine.model_slice import ModelSlice
from pipespec.errors import ModelError
from tests.helpers.models import NUM_LAYERS, build, logits, weights
from tools.rig import cluster
from tools.rig.fp8_files import KINDS, write

PROMPT = list(range(20, 33))
NEW_TOKENS = 12
# Blocks of 128 by 128 do not divide these sizes.
SIZES = {"hidden_size": 160, "intermediate_size": 288}
MIXTURES = ("mixtral", "qwen3_moe", "deepseek_v3", "glm4_moe", "qwen2_moe")
FIRST = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def fp8(tmp_path_factory):
    """`fp8(kind, model_type)`: a checkpoint and the same in plain float32 weights."""
    root = tmp_path_factory.mktemp("fp8")

    def get(kind: str, model_type: str = "llama", **how: Any) -> tuple[Path, Path]:
        folder = root / "-".join([kind, model_type, *map(str, how.values())]).replace(" ", "_")
        if not folder.exists():
            source = build(model_type, folder / "source", **SIZES)
            write(source, folder / "stored", folder / "plain", KINDS[kind], **how)
        return folder / "stored", folder / "plain"

    return get


@pytest.mark.parametrize(
    ("kind", "model_type"),
    [*((kind, "llama") for kind in KINDS), *(("deepseek", each) for each in MIXTURES)],
)
def test_a_slice_holds_the_dequantised_weights_bit_for_bit(fp8, kind, model_type):
    path, plain = fp8(kind, model_type)
    for layers in (range(4), range(1, 3)):
        found, expected = (weights(each, layers, dtype=torch.float32) for each in (path, plain))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("strategy", ["tensor", "channel"])
def test_the_reference_is_what_transformers_reads(fp8, strategy):
    """But for its rounding to the type of the scales."""
    path, plain = fp8(f"compressed {strategy}")
    theirs = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, quantization_config=CompressedTensorsConfig(dequantize=True)
    ).state_dict()
    ours = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [96, 127])
def test_every_code_is_read_as_pytorch_reads_it(dtype, width):
    """In float16 by its operations, else by compiled code; of blocks, and of one for each row."""
    numbers = [code for code in range(256) if code & 0x7F != 0x7F]
    codes = torch.tensor([numbers[:127], numbers[127:]]).to(torch.uint8)
    scales = torch.tensor([[1.0, 0.5], [0.25, 3.0]])[:, : -(-127 // width)]
    weights = Fp8Weights(codes.view(torch.float8_e4m3fn), scales, 1, width)
    layer = Fp8Linear("it", 2, 127)
    layer.fill(weights, torch.device("cpu"))
    found = torch.empty(2, 127, dtype=dtype)
    layer.dequantise(0, found)
    torch.testing.assert_close(found, weights.dense().to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("height", [1, 48, 160])
def test_rows_of_a_matrix_are_those_of_the_whole(height):
    """Wherever its blocks end."""
    random = torch.Generator().manual_seed(0)
    codes = torch.randn(160, 288, generator=random).to(torch.float8_e4m3fn)
    whole = Fp8Weights(codes, torch.rand(-(-160 // height), 3, generator=random), height, 128)
    for rows in (slice(0, 160), slice(0, 48), slice(64, 128), slice(150, 160)):
        assert torch.equal(whole.part(rows).dense(), whole.dense()[rows])


def test_weights_that_are_no_numbers_are_refused():
    codes = torch.full((2, 2), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    layer = Fp8Linear("it", 2, 2)
    with pytest.raises(ModelError, match="no numbers"):
        layer.fill(Fp8Weights(codes, torch.ones(1, 1), 2, 2), torch.device("cpu"))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_kept_weights_are_those_of_the_dequantised_model(fp8, kind):
    """And memory is foretold to the byte."""
    path, plain = fp8(kind)
    info = inspect(path)
    assert info.weight_format(None, "auto", "bfloat16") == FP8
    assert info.weight_format(None, "auto", "float32") == FP8
    assert info.weight_format(None, "no", "bfloat16") is None
    expected = logits(plain, PROMPT, 1, dtype=torch.float32)
    for dtype, most in ((torch.float32, 1e-5), (torch.float16, 0.02)):
        found = logits(path, PROMPT, 2, dtype=dtype, quantization=FP8)
        assert (found - expected).abs().max() <= most * expected.abs().max()
    # bfloat16 rounds the dequantised model nearly as much.
    rounded, narrow = (
        (logits(each, PROMPT, 2, dtype=torch.bfloat16, quantization=held) - expected).norm()
        for each, held in ((plain, None), (path, FP8))
    )
    assert narrow <= 1.5 * rounded
    foretold = info.loaded("bfloat16", FP8)
    for i in range(NUM_LAYERS):
        model = ModelSlice.load(
            path, range(i, i + 1), dtype=torch.bfloat16, quantization=FP8, num_slots=4
        )
        ends = (i == 0) * foretold.embedding + (i == NUM_LAYERS - 1) * foretold.head
        assert model.num_weight_bytes == foretold.layers[i] + ends


@pytest.mark.parametrize("model_type", MIXTURES)
def test_experts_stay_in_eight_bits(fp8, model_type):
    path, plain = fp8("deepseek", model_type)
    info = inspect(path)
    expected = logits(plain, PROMPT, 1, dtype=torch.float32)
    found = logits(path, PROMPT, 2, dtype=torch.float32, quantization=FP8)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    for i in (1, 2):
        model = ModelSlice.load(
            path, range(i, i + 1), dtype=torch.bfloat16, quantization=FP8, num_slots=4
        )
        assert model.num_weight_bytes == info.loaded("bfloat16", FP8).layers[i]
    in_files = sum(
        each.nbytes
        for name, each in load_file(path / "model.safetensors").items()
        if ".layers.1." in name
    )
    assert info.loaded("bfloat16", FP8).layers[1] <= 1.15 * in_files


def text(path: Path, *overrides: str) -> list[list[int]]:
    """Three requests at once."""
    deployment = cluster.make_deployment(path, path, *overrides)
    return cluster.answers(deployment, [PROMPT[start:] for start in (0, 3, 6)], NEW_TOKENS)


@pytest.mark.parametrize("model_type", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.long)])
def test_the_text_of_kept_weights_is_one_for_every_stage_count_and_policy(fp8, model_type):
    path, _ = fp8("deepseek", model_type)
    expected = text(path, "cluster.stages=1", "policy=root")
    assert len({tuple(tokens) for tokens in expected}) == 3
    for stages, policy in zip(cycle((2, 1, 4)), options("policy"), strict=False):
        assert text(path, f"cluster.stages={stages}", f"policy={policy}") == expected


def test_a_rank_says_what_it_holds_and_what_is_expanded(fp8):
    path, plain = fp8("deepseek")
    kept = cluster.make_deployment(path, plain, "cluster.stages=2")
    assert (kept.dtype, kept.dtype_of(kept.draft)) == ("bfloat16", "float32")
    line = summary(kept)
    assert line is not None and "stage 2" in line
    assert line.count("(8 bits, FP8)") == 2 and "draft" in line and "(float32)" in line
    assert expanded(kept) is None
    foretold = kept.target.loaded("bfloat16", FP8)
    layers = kept.layers[0]
    of_stage = foretold.embedding + sum(foretold.layers[layers.start : layers.stop])
    assert memory.weight_bytes(kept, kept.target, "cpu", layers) == of_stage
    made_plain = cluster.make_deployment(path, path, "model.keep_quantized=no")
    assert made_plain.dtype == "bfloat16"
    reason = expanded(made_plain)
    assert reason is not None and "as model.keep_quantized is no" in reason
    assert summary(cluster.make_deployment(plain, plain)) is None


def test_layers_that_are_left_unquantised_stay_as_they_are(fp8):
    path, _ = fp8("autofp8", skip="layers.1.")
    info = inspect(path)
    assert info.kept_layers[1].weights == 0 < info.kept_layers[0].weights
    logits(path, PROMPT, 2, dtype=torch.bfloat16, quantization=FP8)


@pytest.mark.parametrize(
    ("kind", "change", "config", "sentence"),
    [
        ("deepseek", None, {"weight_block_size": [64, 64]}, "must be .* for blocks of 64 by 64"),
        ("deepseek", None, {"weight_block_size": [0, 64]}, "blocks of 0 by 64"),
        ("deepseek", None, {"weight_block_size": None}, "names no blocks"),
        (
            "deepseek",
            lambda tensors: tensors.pop(f"{FIRST}.weight_scale_inv"),
            {},
            r"q_proj\.weight_scale is missing",
        ),
        (
            "deepseek",
            lambda tensors: tensors.update({f"{FIRST}.weight_scale_inv": torch.ones(2, 2).byte()}),
            {},
            "the scales of .* are U8",
        ),
        (
            "deepseek",
            lambda tensors: tensors.update(
                {f"{FIRST}.weight": torch.ones(160, 160).to(torch.float8_e5m2)}
            ),
            {},
            "as F8_E5M2, which is read of matrices alone",
        ),
        ("compressed tensor", None, {"config_groups": {}}, "names no weights"),
    ],
)
def test_odd_files_are_refused_in_a_sentence_before_anything_loads(
    fp8, tmp_path, kind, change, config, sentence
):
    path = fp8(kind)[0]
    stored = json.loads((path / "config.json").read_text())
    stored["quantization_config"] |= config
    (tmp_path / "config.json").write_text(json.dumps(stored))
    tensors = load_file(path / "model.safetensors")
    if change is not None:
        change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=sentence) as refused:
        inspect(tmp_path)
    assert "\n" not in str(refused.value)
