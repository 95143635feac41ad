"""AWQ, GPTQ, compressed-tensors, FP8 and FP4: plain weights bit for bit, or left as they are."""

import json
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from pipespec.cluster.deployment import memory
from pipespec.cluster.deployment.checks import expanded, summary
from pipespec.config.choices import options
from pipespec.engine.formats.fp8 import FP8, Fp8Weights
from pipespec.engine.formats.gguf_blocks import BlockWeights
from pipespec.engine.formats.packing import PACKED_INT4, PACKED_INT8
from pipespec.engine.ggml import library as ggml
from pipespec.engine.inspection.inspection import inspect
from pipespec.engine.low_bit.kept_linear import DequantisedLinear
from pipespec.engine.slice.model_slice import ModelSlice
from pipespec.errors import ModelError
from pipespec.system.folders import resource_dir
from tests.helpers import few_bits
from tests.helpers.few_bits import FP4S, FP8S
from tests.helpers.models import NUM_LAYERS, logits, weights
from tools.rig import cluster
from tools.rig.packing import KINDS, compressed_tensors, pack, words

DEMO = resource_dir("demo")
PROMPT = list(range(20, 33))
NEW_TOKENS = 12
KEEPS = ("awq", "gptq", "gptq symmetric", "gptq v2", "compressed", "compressed asymmetric")
# Blocks of 128 by 128 do not divide the second.
SIZES = {"hidden_size": 64, "intermediate_size": 128}
ODD_SIZES = {"hidden_size": 160, "intermediate_size": 288}
# The most by which logits of kept weights differ in float32: ggml rounds rows to 8 bits, in each of
# four layers.
ROUNDED = {PACKED_INT4: 0.1, "mxfp4": 0.1, "nvfp4": 1e-4, FP8: 1e-4}


def if_long(*cases: Any) -> list[Any]:
    return [pytest.param(*case, marks=pytest.mark.long) for case in cases]


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """`packed(kind, model_type)`: a checkpoint and the same in plain weights."""
    root = tmp_path_factory.mktemp("packed")

    def get(kind: str, model_type: str = "llama", **options: Any) -> tuple[Path, Path]:
        folder = root / "-".join([kind, model_type, *map(str, options.values())]).replace(" ", "_")
        if not folder.exists():
            sizes = ODD_SIZES if kind in FP8S else SIZES
            few_bits.make(folder, kind, model_type, **sizes, **options)
        return folder / "packed", folder / "plain"

    return get


def assert_same_weights(path: Path, plain: Path, layers: range, kind: str, **how: Any) -> None:
    found, expected = (weights(each, layers, **how) for each in (path, plain))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=1e-6 if kind in FP4S else 0, atol=0, msg=name
        )


@pytest.mark.parametrize(
    ("kind", "model_type"),
    [
        *((kind, "llama") for kind in few_bits.FORMS),
        # Biases, and experts.
        *((kind, "qwen2") for kind in ("awq", "gptq", "compressed")),
        *((kind, "mixtral") for kind in ("awq", "gptq", "compressed", "mxfp4")),
        *(("deepseek", each) for each in ("qwen3_moe", "deepseek_v3")),
        *if_long(*(("deepseek", each) for each in ("mixtral", "glm4_moe", "qwen2_moe"))),
    ],
)
def test_a_slice_holds_the_plain_weights_bit_for_bit(packed, kind, model_type):
    for layers in (range(4), range(1, 2)):
        for dtype in (torch.float32, torch.float16) if kind in KINDS else (torch.float32,):
            assert_same_weights(*packed(kind, model_type), layers, kind, dtype=dtype)


@pytest.mark.parametrize("kind", ["awq", "autofp8"])
def test_layers_that_are_left_unquantised_stay_as_they_are(packed, kind):
    path, plain = packed(kind, skip="layers.1.")
    assert_same_weights(path, plain, range(4), kind)
    kept = inspect(path).storage.kept_layers
    assert kept[1].weights == 0 < kept[0].weights


def test_the_reference_packs_as_compressed_tensors_does(packed):
    """Its words, and Transformers' own reading of such a checkpoint."""
    codes = np.random.default_rng(0).integers(0, 16, (5, 24))
    theirs = pack_to_int32(torch.from_numpy(codes - 8).to(torch.int8), 4)
    assert torch.equal(theirs, torch.from_numpy(words(codes, 4)))
    of_ints = ("compressed", "compressed asymmetric", "compressed 8 bits")
    for kind in (*of_ints, "compressed tensor", "compressed channel"):
        path, plain = packed(kind)
        theirs, ours = (
            AutoModelForCausalLM.from_pretrained(
                each, dtype=torch.float16 if kind in of_ints else torch.bfloat16, **how
            ).state_dict()
            for each, how in (
                (path, {"quantization_config": CompressedTensorsConfig(dequantize=True)}),
                (plain, {}),
            )
        )
        assert all(torch.equal(theirs[name], ours[name]) for name in ours), kind


def integers(plain: Path, folder: Path) -> Path:
    """A checkpoint whose matrices are bytes with a scale for each row."""
    folder.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        tensors[name] = tensor
        if name.endswith("_proj.weight"):
            scale = tensor.float().abs().amax(1, keepdim=True) / 127
            codes = (tensor.float() / scale).round().to(torch.int8)
            tensors |= {name: codes, f"{name}_scale": scale.half()}
    how = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    stored = compressed_tensors("int-quantized", how)
    config = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": stored}))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_integers_of_eight_bits_become_plain_weights(packed, tmp_path):
    """As Transformers makes them of the whole model."""
    path = integers(packed("awq")[1], tmp_path / "bytes")
    expected = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float16, quantization_config=CompressedTensorsConfig(dequantize=True)
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


def text(path: Path, *overrides: str) -> list[list[int]]:
    """Three requests at once."""
    deployment = cluster.make_deployment(path, path, *overrides)
    kept = "model.keep_quantized=no" not in overrides
    assert (deployment.weight_format(deployment.target) is not None) == kept
    return cluster.answers(deployment, [PROMPT[start:] for start in (0, 3, 6)], NEW_TOKENS)


@pytest.mark.parametrize(
    ("kind", "model_type"),
    [
        *(("awq", "llama"), ("deepseek", "llama"), ("compressed asymmetric", "mixtral")),
        *if_long(
            ("gptq", "qwen3_moe"), ("deepseek", "qwen3_moe"), *((form, "llama") for form in FP4S)
        ),
    ],
)
def test_text_of_kept_weights_is_one_for_every_stage_count_and_policy(packed, kind, model_type):
    path, _ = packed(kind, model_type)
    how = ("model.dtype=bfloat16",)
    expected = text(path, *how, "cluster.stages=1", "policy=root")
    assert len({tuple(tokens) for tokens in expected}) == 3
    ways = list(zip(cycle((2, 1, 4)), options("policy"), strict=False))
    for stages, policy in ways if model_type == "llama" else ways[:1]:
        assert text(path, *how, f"cluster.stages={stages}", f"policy={policy}") == expected


@pytest.mark.parametrize(
    ("kind", "model_type"),
    [
        *((kind, "llama") for kind in (*KEEPS, *FP8S, "mxfp4")),
        *if_long(("nvfp4", "llama"), ("mxfp4", "mixtral"), ("nvfp4", "mixtral")),
        *(("awq", "mixtral"), ("deepseek", "deepseek_v3"), ("deepseek", "qwen3_moe")),
        *if_long(("gptq", "qwen3_moe"), ("deepseek", "glm4_moe"), ("deepseek", "qwen2_moe")),
    ],
)
def test_products_of_kept_weights_are_those_of_the_plain_ones(packed, kind, model_type):
    """But for rounding; and memory is foretold to the byte."""
    path, plain = packed(kind, model_type)
    form = FP8 if kind in FP8S else kind if kind in FP4S else PACKED_INT4
    info = inspect(path)
    for dtype in ("bfloat16", "float32"):
        assert info.weight_format(None, "auto", dtype) == form
        assert info.weight_format(None, "no", dtype) is None
    exact = logits(plain, PROMPT, 1, dtype=torch.float32)
    kept = logits(path, PROMPT, 2, dtype=torch.float32, quantization=form)
    if model_type == "llama":
        assert (kept - exact).norm() <= ROUNDED[form] * exact.norm()
    # A rounding may choose another expert of two that are nearly as good, for a row.
    differences = (kept - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert (differences > 2 * ROUNDED[form]).sum() <= 1
    # bfloat16 rounds the plain model nearly as much.
    rounded, narrow = (
        (logits(each, PROMPT, 2, dtype=torch.bfloat16, quantization=held) - exact).norm()
        for each, held in ((plain, None), (path, form))
    )
    assert model_type != "llama" or narrow <= 1.5 * rounded + ROUNDED[form] * exact.norm()
    foretold = info.loaded("bfloat16", form)
    for i in range(NUM_LAYERS):
        model = ModelSlice.load(
            path, range(i, i + 1), dtype=torch.bfloat16, quantization=form, num_slots=4
        )
        ends = (i == 0) * foretold.embedding + (i == NUM_LAYERS - 1) * foretold.head
        assert model.num_weight_bytes == foretold.layers[i] + ends
    smaller = 1.7 if form == FP8 else 2.5
    assert max(foretold.layers) < max(info.loaded("bfloat16", None).layers) / smaller


@pytest.mark.parametrize("form", ["compressed 8 bits", "int-quantized"])
def test_integers_of_eight_bits_stay_where_ggml_multiplies_them(packed, tmp_path, form):
    """In float32, but for rounding; where some have a zero point of their own, in no type."""
    path, plain = packed("compressed 8 bits")
    if form == "int-quantized":
        path = integers(plain, tmp_path / "bytes")
    info = inspect(path)
    assert info.weight_format(None, "auto", "float32") == PACKED_INT8
    assert info.weight_format(None, "auto", "bfloat16") is None
    exact, kept = (
        logits(path, PROMPT, 2, dtype=torch.float32, quantization=held)
        for held in (None, PACKED_INT8)
    )
    assert (kept - exact).norm() <= ROUNDED[PACKED_INT4] * exact.norm()
    model = ModelSlice.load(
        path, range(1, 2), dtype=torch.float32, quantization=PACKED_INT8, num_slots=4
    )
    assert model.num_weight_bytes == info.loaded("float32", PACKED_INT8).layers[1]
    asymmetric = inspect(packed("gptq 8 bits")[0])
    assert asymmetric.weight_format(None, "auto", "float32") is None


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
        ("deepseek", None, {"weight_block_size": [64, 64]}, "must be .* for blocks of 64 by 64"),
        ("deepseek", None, {"weight_block_size": [0, 64]}, "blocks of 0 by 64"),
        ("deepseek", None, {"weight_block_size": None}, "names no blocks"),
        ("deepseek", lambda t: t.pop(f"{FIRST}.weight_scale_inv"), {}, r"weight_scale is missing"),
        (
            "deepseek",
            lambda t: t.update({f"{FIRST}.weight_scale_inv": torch.ones(2, 2).byte()}),
            {},
            "the scales of .* are U8",
        ),
        (
            "deepseek",
            lambda t: t.update({f"{FIRST}.weight": torch.ones(160, 160).to(torch.float8_e5m2)}),
            {},
            "as F8_E5M2, which is read of matrices alone",
        ),
        ("compressed tensor", None, {"config_groups": {}}, "names no weights"),
        (
            "nvfp4",
            lambda t: t.pop(f"{FIRST}.weight_global_scale"),
            {},
            "is no matrix of 4-bit floats",
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
    path = edited(packed("gptq")[0], tmp_path / "odd", lambda t: t[f"{FIRST}.g_idx"].add_(7))
    with pytest.raises(ModelError, match="names groups that do not exist"):
        ModelSlice.load(path, range(1), dtype=torch.float32, num_slots=4)


def test_an_order_that_the_config_denies_does_not_stay_in_four_bits(packed, tmp_path):
    path = edited(packed("gptq reordered")[0], tmp_path / "odd", desc_act=False)
    with pytest.raises(ModelError, match=r"of any inputs, though config.json says otherwise; set "):
        ModelSlice.load(path, range(1), dtype=torch.bfloat16, quantization=PACKED_INT4, num_slots=4)
    plain = weights(path, range(1), dtype=torch.float16)
    expected = weights(packed("gptq reordered")[1], range(1), dtype=torch.float16)
    assert all(torch.equal(plain[name], expected[name]) for name in expected)


def test_a_kernel_that_is_wrong_is_not_used(packed, monkeypatch):
    path, _ = packed("awq")
    right = BlockWeights.dense
    monkeypatch.setattr(BlockWeights, "dense", lambda *args: right(*args) + 0.1 * len(args[1:]))
    monkeypatch.setattr(ggml, "load", lambda: None)
    with pytest.raises(
        ModelError, match=r"failed its self-test on cpu: .* set model.keep_quantized=no"
    ):
        ModelSlice.load(path, range(1), dtype=torch.bfloat16, quantization=PACKED_INT4, num_slots=4)


def far_from_zero(tensors: dict[str, torch.Tensor]) -> None:
    """Let a matrix of the ninth layer have scales whose product with a zero point float16 does not
    hold."""
    name = "model.layers.8.self_attn.q_proj"
    tensors[f"{name}.qzeros"].fill_(0x33333333)
    tensors[f"{name}.qweight"].fill_(0x33333333)
    tensors[f"{name}.qweight"][::32] = 0x44444444
    tensors[f"{name}.scales"].fill_(30000)


def test_scales_that_float16_does_not_hold_do_not_stay(tmp_path):
    pack(DEMO / "target", tmp_path / "packed", tmp_path / "plain", KINDS["awq"])
    path = edited(tmp_path / "packed", tmp_path / "odd", far_from_zero)
    how = {"dtype": torch.bfloat16, "quantization": PACKED_INT4, "num_slots": 4}
    assert ModelSlice.load(path, range(8), **how)
    with pytest.raises(ModelError, match=r"q_proj .*float16 does not hold .*keep_quantized=no"):
        ModelSlice.load(path, range(8, 10), **how)


def test_a_rank_says_what_it_holds_and_what_is_expanded(packed):
    path, plain = packed("deepseek")
    kept = cluster.make_deployment(path, plain, "cluster.stages=2")
    assert (kept.dtype, kept.dtype_of(kept.draft)) == ("bfloat16", "float32")
    line = summary(kept)
    assert line is not None and "stage 2" in line
    assert line.count("(8 bits, FP8)") == 2 and "draft" in line and "(float32)" in line
    assert expanded(kept) is None
    foretold = kept.target.loaded("bfloat16", FP8)
    layers = kept.layers[0]
    of_stage = foretold.embedding + sum(foretold.layers[layers.start : layers.stop])
    assert memory.weight_bytes(kept, kept.target, 1) == of_stage
    made_plain = cluster.make_deployment(path, path, "model.keep_quantized=no")
    assert made_plain.dtype == "bfloat16"
    reason = expanded(made_plain)
    assert reason is not None and "as model.keep_quantized is no" in reason
    assert summary(cluster.make_deployment(plain, plain)) is None


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
    layer = DequantisedLinear("it", 2, 2)
    with pytest.raises(ModelError, match="no numbers"):
        layer.fill(Fp8Weights(codes, torch.ones(1, 1), 2, 2), torch.device("cpu"))
