import json
import os
import re
import resource
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import copytree

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pipespec.engine.checkpoint.fingerprint import fingerprint
from pipespec.engine.formats.architectures import REASONS, count_field
from pipespec.engine.inspection.inspection import Sizes, inspect
from pipespec.engine.slice.model_slice import ModelSlice
from pipespec.errors import ModelError
from pipespec.system.folders import resource_dir
from tests.helpers.kinds import by_kind
from tests.helpers.matrix import some_of
from tests.helpers.models import NUM_LAYERS, VOCAB_SIZE, build, build_multimodal, logits, shared

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBEDDING = "model.embed_tokens.weight"
DEMO = resource_dir("demo")
NAN = float("nan")
MOST_S = 12.0  # thrice what is usual, as others may use the machine


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return build("llama", tmp_path_factory.mktemp("llama") / "model", eos_token_id=[2, 3])


@pytest.fixture
def copy(llama, tmp_path) -> Path:
    return Path(copytree(llama, tmp_path / "model"))


@pytest.fixture
def sharded(tmp_path) -> Path:
    return build("llama", tmp_path / "sharded", max_shard_size="30KB")


def edit(path: Path, name: str = "config.json", **changes: object) -> None:
    content = json.loads((path / name).read_text()) | changes
    (path / name).write_text(json.dumps(content))


def change(path: Path, how: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """Change the tensors of a checkpoint."""
    tensors = load_file(path / WEIGHTS)
    how(tensors)
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        inspect(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def refused(path: Path, why: str) -> None:
    assert re.search(why, refusal(path))


def test_a_checkpoint_is_described(llama):
    info = inspect(llama)
    assert info.path == llama
    assert info.model_type == "llama"
    assert (info.num_layers, info.hidden_size, info.vocab_size) == (NUM_LAYERS, 48, VOCAB_SIZE)
    assert info.context == 256
    assert info.eos == (2, 3)
    attention = 2 * 48 * 48 + 2 * 48 * 24
    layer = 4 * (attention + 3 * 48 * 64 + 2 * 48)
    head = 4 * (VOCAB_SIZE * 48 + 48)
    assert info.stored == Sizes((layer,) * NUM_LAYERS, 4 * VOCAB_SIZE * 48, head)
    assert info.stored.total == NUM_LAYERS * layer + 4 * VOCAB_SIZE * 48 + head
    assert (info.storage.quantization, info.dtype) == (None, None)


def test_shards_count_like_one_file(llama, sharded, tmp_path):
    """Also if they are links, as in the cache of the hub."""
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert inspect(sharded).stored == inspect(llama).stored
    (tmp_path / "blobs").mkdir()
    for shard in sharded.glob("*.safetensors"):
        blob = shard.rename(tmp_path / "blobs" / shard.name)
        shard.symlink_to(f"../blobs/{blob.name}")
    assert inspect(sharded).stored == inspect(llama).stored


def test_eos_of_the_generation_config_goes_first(copy):
    edit(copy, "generation_config.json", eos_token_id=7)
    assert inspect(copy).eos == (7,)
    (copy / "generation_config.json").unlink()
    assert inspect(copy).eos == (2, 3)
    edit(copy, eos_token_id=None)
    assert inspect(copy).eos == ()


LONG = {"short_factor": [1 + i / 4 for i in range(6)], "long_factor": [2 + i for i in range(6)]}
LINEAR = {"type": "linear", "factor": 4.0}
OF_64 = {"original_max_position_embeddings": 64}


SCALED = {  # by name: how positions are scaled, the context, and the longest text without
    "yarn of an original": ({"rope_type": "yarn", "factor": 4.0, **OF_64}, 256, None),
    "linear": ({"rope_type": "linear", "factor": 4.0}, 1024, None),
    "yarn": ({"type": "yarn", "factor": 4.0}, 1024, None),
    "dynamic": ({"type": "dynamic", "factor": 2.0}, 512, 256),
    "linear of an original": ({"rope_type": "linear", "factor": 8.0, **OF_64}, 512, None),
    "longrope": ({"rope_type": "longrope", "factor": 2.0, **LONG}, 512, 256),
    "longrope of an original": ({"type": "longrope", **LONG, **OF_64}, 256, 64),
    "dynamic of an original": ({"rope_type": "dynamic", "factor": 4.0, **OF_64}, 256, None),
}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "field"), some_of(SCALED, ["rope_scaling", "rope_parameters"]))
def test_a_scaled_rotary_embedding_has_the_scaled_context(copy, kind, field):
    """Its frequencies are those of a text as long as the context, from the first token on."""
    scaling, context, unscaled = SCALED[kind]
    rope = {"rope_theta": 10000.0} if field == "rope_parameters" else {}
    edit(copy, **{"rope_parameters": None, field: scaling | rope})
    info = inspect(copy)
    assert (info.context, info.unscaled) == (context, unscaled)
    model = AutoModelForCausalLM.from_pretrained(copy, dtype=torch.float32)
    for longest in sorted({unscaled or 50, min(300, context), context}):  # which it never narrows
        prompt = [each % VOCAB_SIZE for each in range(longest)]
        with torch.no_grad():
            theirs = model(torch.tensor([prompt])).logits[0]
        for length in (40, longest):
            mine = logits(copy, prompt[:length], 2, context=longest)
            torch.testing.assert_close(mine, theirs[:length], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "scaling", "tokens", "found"),
    [
        # Of DeepSeek Coder, and of Vicuna 16k: the tokenizer says whether 256 are scaled already.
        *(("llama", LINEAR, most, found) for most, found in ((256, 256), (1024, 1024))),
        ("llama", LINEAR, 10**30, 1024),
        *(("phi3", {"type": kind, **LONG}, None, (256, 64)) for kind in ("longrope", "yarn")),
        ("gemma3_text", LINEAR, None, 256),
        ("hunyuan_v1_dense", {"type": "dynamic", "factor": 1, "alpha": 9}, None, 256),
        (
            "phimoe",
            {"type": "longrope", **LONG, **OF_64, "short_mscale": 1, "long_mscale": 2},
            None,
            64,
        ),
    ],
)
def test_positions_are_not_scaled_twice(tmp_path, kind, scaling, tokens, found):
    path = copytree(shared(kind), tmp_path / "model")
    edit(path, rope_parameters=None, rope_scaling=scaling, **OF_64)
    (path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": tokens}))
    info = inspect(path)
    assert (info.context, info.unscaled) == (found if isinstance(found, tuple) else (found, None))


@pytest.mark.parametrize(
    ("kind", "name", "buffer"),
    [
        ("qwen2", "model.layers.{}.self_attn.rotary_emb.inv_freq", torch.ones(6)),
        ("gpt_neox", "gpt_neox.layers.{}.attention.bias", torch.ones(1, 1, 8, 8) > 0),
    ],
)
def test_changes_that_mean_nothing_are_accepted(tmp_path, kind, name, buffer):
    path = copytree(shared(kind), tmp_path / "model")
    whole = inspect(path)
    # One file goes before an index, as in Transformers.
    (path / INDEX).write_text(json.dumps({"weight_map": {EMBEDDING: "m-00001-of-00002"}}))
    edit(path, transformers_version="4.0.0", _note="of nobody's", use_cache=False)
    tensors = dict(reversed(load_file(path / WEIGHTS).items()))
    tensors |= {name.format(i): buffer.clone() for i in range(NUM_LAYERS)}  # of old checkpoints
    if whole.tied:
        tensors["lm_head.weight"] = tensors[EMBEDDING].clone()
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
    assert replace(inspect(path), stored=whole.stored, matrices=whole.matrices) == whole


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_headers_are_inspected_without_importing_torch(tmp_path):
    """Also of a config that Transformers refuses, which is refused in the same way."""
    paths = [str(shared(model_type)) for model_type in ("qwen3_next", "gpt_oss")]
    broken = Path(copytree(paths[0], tmp_path / "model"))
    edit(broken, num_attention_heads="four")
    code = (
        "import sys; from pipespec.engine.inspection.inspection import inspect\n"
        f"for path in {paths}: print(inspect(path, fit=False))\n"
        "assert 'torch' not in sys.modules\n"
        f"inspect({str(broken)!r}, fit=False)"
    )
    own = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=own, capture_output=True, text=True)
    assert done.stdout.splitlines() == [str(inspect(path)) for path in paths], done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last == f"pipespec.errors.ModelError: {refusal(broken)}"


NESTED = "[" * 3000 + "]" * 3000


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (f'{{"a": {NESTED}}}', "it is nested too deeply"),
        ('{"a": %s}' % ("9" * 5000), "it holds a number of too many digits"),
        ('{"a": "\udcff"}', "it is not UTF-8 text at byte 7"),
    ],
)
def test_unreadable_json_is_refused(copy, text, why):
    raw = text.encode(errors="surrogateescape")
    for name in ("config.json", "generation_config.json", INDEX):
        kept = (copy / name).read_bytes() if (copy / name).exists() else None
        (copy / name).write_bytes(raw)
        if name.endswith("index.json"):  # a file with all weights goes before it
            (copy / WEIGHTS).unlink()
        assert f"{name} cannot be read ({why}" in refusal(copy)
        if kept is None:
            (copy / name).unlink()
        else:
            (copy / name).write_bytes(kept)
    (copy / WEIGHTS).write_bytes(len(raw).to_bytes(8, "little") + raw)
    assert "its header cannot be read" in refusal(copy)


@pytest.mark.parametrize(
    "name", ["../secret", "../../../../../etc/passwd", "/etc/passwd", "sub/model", "..", "", 3]
)
def test_an_index_names_no_file_outside_its_folder(sharded, tmp_path, name):
    shutil.copy(min(sharded.glob("*.safetensors")), tmp_path / "secret")
    shards = json.loads((sharded / INDEX).read_text())["weight_map"]
    edit(sharded, INDEX, weight_map={**shards, min(shards): name})
    assert f"names the shard {name!r}, which is no file of its folder" in refusal(sharded)
    assert "has no usable" in fingerprint(str(sharded)).problem


@pytest.mark.parametrize(
    ("index", "why"),
    [
        ({"weight_map": None}, "has no weight_map; fetch"),
        ({"weight_map": ["a"]}, "has no weight_map; fetch"),
        ([], "is not a JSON object"),
    ],
)
def test_an_index_that_maps_nothing_is_refused(copy, index, why):
    (copy / WEIGHTS).unlink()
    (copy / INDEX).write_text(json.dumps(index))
    assert why in refusal(copy)


def test_shards_that_lack_tensors_are_refused(sharded):
    shards = json.loads((sharded / INDEX).read_text())["weight_map"]
    edit(sharded, INDEX, weight_map={**shards, "model.layers.1.extra.weight": min(shards.values())})
    assert "names 1 tensors that no shard holds, for example model.layers.1.ex" in refusal(sharded)
    (sharded / INDEX).rename(sharded / "index")
    refused(sharded, r"model-00001-of-\d+.safetensors and no model")
    (sharded / "index").rename(sharded / INDEX)
    edit(sharded, INDEX, weight_map=shards)
    for absent, shard in enumerate(sorted(sharded.glob("*.safetensors")), start=1):
        shard.unlink()
        refused(sharded, rf"lacks {absent} of the \d+ files that its .*; put there all of them")


def test_a_multimodal_checkpoint_that_another_library_quantised_is_refused(tmp_path):
    path = build_multimodal("mistral3", tmp_path / "model")
    quantised = {"quant_method": "bitsandbytes", "load_in_4bit": True, "_load_in_4bit": True}
    edit(path, quantization_config=quantised)
    refused(path, "is multimodal and quantised by bitsandbytes, which is read of models of text")


def _header(entry: object, other: object = None, data: int = 4) -> bytes:
    text = json.dumps({"a": entry} if other is None else {"a": entry, "b": other}).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data)


def _entry(**changes: object) -> dict[str, object]:
    """Of a header; None takes a field away."""
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | changes
    return {name: value for name, value in entry.items() if value is not None}


DAMAGE = {
    "cut": lambda whole: whole[:-5],
    "cut in its header": lambda whole: whole[:50],
    "empty": lambda _: b"",
    "longer": lambda whole: whole + b"12345",
    "wrong length": lambda whole: struct.pack("<Q", 1 << 40) + whole[8:],
    "broken JSON": lambda whole: whole[:8] + b"[" + whole[9:],
    "other JSON": lambda _: struct.pack("<Q", 4) + b"[42]",
    "list": lambda _: _header([]),
    "overlap": lambda _: _header(_entry(), _entry(data_offsets=[2, 6]), 6),
    "hole": lambda _: _header(_entry(), _entry(data_offsets=[8, 12]), 12),
    **{
        str(changes): lambda _, changes=changes: _header(_entry(**changes))
        for changes in (
            *({"shape": shape} for shape in ([-1], [True], [1.5], [2**62, 2**62], [2], None)),
            *({"data_offsets": each} for each in ([4, 0], [0, 2**40], None)),
            *({"dtype": dtype} for dtype in (3, "F7", None)),
            {"shape": [10**30], "data_offsets": [0, 10**30]},
        )
    },
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_weight_file_is_refused(copy, how):
    file = copy / WEIGHTS
    file.write_bytes(DAMAGE[how](file.read_bytes()))
    assert f"{file} is not a whole safetensors file" in refusal(copy)


def test_a_missing_or_unreadable_file_is_named(copy):
    (copy / WEIGHTS).rename(copy / "pytorch_model.bin")
    assert "holds no model.safetensors" in refusal(copy)
    (copy / "config.json").write_text("{")
    assert "config.json cannot be read (it is not JSON" in refusal(copy)
    (copy / "config.json").unlink()
    assert "holds no config.json" in refusal(copy)
    os.mkfifo(copy / "config.json")  # which is not waited for
    assert "config.json cannot be read (it is no regular file)" in refusal(copy)


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


@pytest.mark.slow
@pytest.mark.parametrize("model_type", by_kind())
def test_a_missing_tensor_is_refused_of_every_architecture(tmp_path, model_type, long):
    """The first and the last of those that a layer in the middle has, and of those outside of
    layers; the short suite tries one of either, which it is differs from type to type."""
    path = copytree(shared(model_type), tmp_path / "model")
    tensors = load_file(path / WEIGHTS)
    inside = [name for name in tensors if ".layers.2." in name and ".experts." not in name]
    outside = [name for name in tensors if ".layers." not in name]
    names = (inside[0], inside[-1], outside[0], outside[-1])
    for name in names if long else names[len(model_type) % 2 :: 2]:
        kept = {key: value for key, value in tensors.items() if key != name}
        save_file(kept, path / WEIGHTS, metadata={"format": "pt"})
        refused(path, "holds no|does not fit its config.json: . missing tensors, for example")


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("model_type", "name", "how", "why"),
    [
        *(
            (kind, None, None, "not fit its config.json|concatenates do not fit together")
            for kind in ("deepseek_v3", "gpt_oss", "mixtral", "qwen3_moe")
        ),
        *(
            ("llama", EMBEDDING, lambda _, shape=shape: torch.ones(shape), "no token embedding")
            for shape in ([], [4], [1, 1, 4])
        ),
        *(
            ("llama", UP, how, f"1 mismatched tensors, for example {UP}")
            for how in (lambda t: t.T.contiguous(), torch.flatten, lambda t: t.reshape(-1, 8))
        ),
        ("llama", UP, torch.Tensor.short, f"holds {UP} as I16, but plain weights must be floating"),
    ],
)
def test_tensors_that_the_model_does_not_have_are_refused(tmp_path, model_type, name, how, why):
    """Without one of its experts, or with another in the place of one."""
    path = copytree(shared(model_type), tmp_path / "model")
    tensors = load_file(path / WEIGHTS)
    of_expert = next((n for n in tensors if ".layers.2." in n and ".experts" in n), "")
    was = tensors.pop(name or of_expert)
    if name:
        tensors[name] = how(was)
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
    refused(path, why)


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
        *(
            ({"rope_scaling": {"rope_type": kind, **LONG, "factor": 2.0, **wrong}}, f"rope_.*{why}")
            for kind, wrong, why in (
                ("linear", {"factor": "4.0"}, r"\.factor is '4.0', but must be a number"),
                ("yarn", {"factor": True}, r"\.factor is True, but must be a number"),
                ("dynamic", {"factor": 1e30}, r"\.factor is 1e\+30, but must be at most 10000"),
                ("dynamic", {"factor": NAN}, r"\.factor is nan, but must be a finite number"),
                ("yarn", {"attention_factor": [1.0]}, r"attention_factor is .* a number"),
                ("longrope", {"long_factor": [0.0] * 6}, r"\.long_factor is 0.0, .* above 0"),
                ("longrope", {"long_factor": ["2"] * 6}, r"\.long_factor is .*2.*a number"),
                ("longrope", {"long_factor": [2.0]}, "as many numbers in long_factor as in short"),
                ("linear", {"original_max_position_embeddings": {}}, "embeddings is {}, .* a num"),
                ("linear", {"original_max_position_embeddings": 1e20}, "is 1e.20, .* at most"),
            )
        ),
        ({"rope_parameters": {"full_attention": {"factor": "8"}}}, r"full_attention\.factor is"),
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
        ({"vocab_size": VOCAB_SIZE + 1}, "2 mismatched tensors"),
        ({"intermediate_size": 80}, "mismatched tensors"),
        ({"num_key_value_heads": 1}, "mismatched tensors"),
        ({"num_attention_heads": 8}, "mismatched tensors"),
        ({"head_dim": 24}, "mismatched tensors"),
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
        ({"model_type": "mamba"}, f"'mamba'.*{re.escape(REASONS['mamba'])}"),
    ],
)
def test_values_that_no_model_has_are_refused(tmp_path, changes, why):
    path = copytree(shared("llama"), tmp_path / "model")
    (path / "generation_config.json").unlink()
    edit(path, **changes)
    refused(path, why)


@pytest.mark.slow
def test_the_command_ends_with_one_sentence(tmp_path):
    """Before any rank starts: in so many seconds of computing, most of them for imports."""
    path = copytree(DEMO / "draft", tmp_path / "model")
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
