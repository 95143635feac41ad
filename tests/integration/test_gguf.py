"""GGUF files as checkpoints: weights, config, tokenizer, and what is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipespec.client.model_info import full_name
from pipespec.controller.embedded_redis import EmbeddedRedis
from pipespec.engine import tokenizer
from pipespec.engine.checkpoint import inspect
from pipespec.engine.model_slice import ModelSlice
from pipespec.errors import ModelError
from pipespec.instruments.diagnostics.inventory import fingerprint
from pipespec.system.folders import resource_dir
from tests.helpers.models import NUM_LAYERS, build
from tools.rig import cluster
from tools.rig.gguf_files import write

DEMO = resource_dir("demo")
PROMPT = list(range(20, 33))
NEW_TOKENS = 12
MADE = (Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q5_1)
WIDE = {"hidden_size": 256, "intermediate_size": 512}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """`files(kind, type)`: a random model as a GGUF file, with matrices of that type."""
    root = tmp_path_factory.mktemp("gguf")

    def get(kind: str, stored: Type) -> Path:
        file = root / f"{kind}-{stored.name}.gguf"
        if not file.exists():
            source = root / kind
            if not source.exists():
                # Transformers passes over the size of a head, which is 128 in Qwen3.
                build(kind, source, **WIDE, **({"head_dim": 128} if kind == "qwen3" else {}))
            write(source, file, kind, lambda name: Type.F16 if "embed" in name else stored)
        return file

    return get


def weights(path: Path, layers: range) -> dict[str, torch.Tensor]:
    model = ModelSlice.load(path, layers, dtype=torch.float32, num_slots=4)
    return dict(model._model.state_dict()) | dict(model._base.state_dict())


def whole(path: Path) -> AutoModelForCausalLM:
    """As Transformers reads it."""
    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("stored", [*MADE, Type.Q4_K, Type.Q6_K], ids=lambda each: each.name)
def test_a_slice_holds_the_dequantised_weights_bit_for_bit(files, kind, stored):
    """Those that Transformers' own reader gives the whole model."""
    path = files(kind, stored)
    expected = whole(path).state_dict()
    for start, stop in ((0, 4), (1, 3)):
        found = weights(path, range(start, stop))
        for name, tensor in found.items():
            if name.startswith("layers."):
                _, number, rest = name.split(".", 2)
                name = f"model.layers.{start + int(number)}.{rest}"
            elif not name.startswith("lm_head"):
                name = f"model.{name}"
            assert torch.equal(tensor, expected[name]), name
    assert inspect(path).loaded("float32", None).layers[1] == sum(
        tensor.nbytes for name, tensor in expected.items() if ".layers.1." in name
    )


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_plain_numbers_are_those_of_the_source(tmp_path, kind):
    source = build(kind, tmp_path / "source")
    path = write(source, tmp_path / "model.gguf", kind, lambda _: Type.F32)
    found, expected = weights(path, range(4)), weights(source, range(4))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def q4_k(block: np.ndarray) -> np.ndarray:
    """256 weights, number by number: ggml's `dequantize_row_q4_K`."""
    d, least = np.frombuffer(block[:4].tobytes(), np.float16).astype(np.float32)
    packed, codes = block[4:16].astype(int), block[16:].astype(int)
    out = []
    for part in range(8):
        if part < 4:
            scale, minimum = packed[part] & 63, packed[part + 4] & 63
        else:
            scale = (packed[part + 4] & 15) | (packed[part - 4] >> 6) << 4
            minimum = (packed[part + 4] >> 4) | (packed[part] >> 6) << 4
        nibbles = codes[32 * (part // 2) :][:32] >> (4 * (part % 2)) & 15
        one, other = np.float32(d * np.float32(scale)), np.float32(least * np.float32(minimum))
        out += [np.float32(one * np.float32(code)) - other for code in nibbles]
    return np.array(out, np.float32)


def q6_k(block: np.ndarray) -> np.ndarray:
    """The same of `dequantize_row_q6_K`."""
    low, high = block[:128].astype(int), block[128:192].astype(int)
    scales = block[192:208].view(np.int8).astype(int)
    d = np.frombuffer(block[208:].tobytes(), np.float16).astype(np.float32)[0]
    out = np.zeros(256, np.float32)
    for half in range(2):
        for i in range(32):
            for quarter in range(4):
                nibble = low[64 * half + i + 32 * (quarter % 2)] >> (4 * (quarter // 2)) & 15
                code = nibble | (high[32 * half + i] >> (2 * quarter) & 3) << 4
                at = 128 * half + 32 * quarter + i
                scale = np.float32(d * np.float32(scales[at // 16]))
                out[at] = scale * np.float32(code - 32)
    return out


@pytest.mark.parametrize(("stored", "reference"), [(Type.Q4_K, q4_k), (Type.Q6_K, q6_k)])
def test_k_quant_blocks_equal_those_of_ggml(files, stored, reference):
    path = files("qwen2", stored)
    (raw,) = [each for each in GGUFReader(path).tensors if each.name == "blk.1.ffn_up.weight"]
    found = weights(path, range(1, 2))["layers.0.mlp.up_proj.weight"]
    size = raw.data.shape[1]
    for row in (0, 3):
        expected = reference(np.array(raw.data[row][:size]))
        np.testing.assert_array_equal(found[row, : len(expected)].numpy(), expected)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_token_ids_are_those_of_the_dequantised_weights(files, kind):
    """Through the whole product; the draft is a GGUF file too."""
    path = files(kind, Type.Q8_0)
    (expected,) = cluster.reference(path.parent, [PROMPT], NEW_TOKENS, gguf_file=path.name)
    for stages in (1, 2, 4):
        deployment = cluster.make_deployment(
            path, files(kind, Type.Q4_0), f"cluster.stages={stages}", "policy.width=8"
        )
        with EmbeddedRedis() as redis:
            ((tokens, _, _),) = cluster.decode(
                deployment, redis, [{"prompt": tuple(PROMPT), "max_new_tokens": NEW_TOKENS}]
            )
        assert tokens == expected


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Path:
    """The demo target, with its tokenizer."""
    file = tmp_path_factory.mktemp("demo") / "target.gguf"
    return write(DEMO / "target", file, "llama", lambda _: Type.F16, tokenizer=DEMO / "target")


def test_the_tokenizer_is_in_the_file(demo):
    found, expected = tokenizer.load(demo), tokenizer.load(DEMO / "target")
    text = "Once upon a time\n\n\tthere were 12 of them: “né” \U0001f600!"
    assert found.encode(text) == expected.encode(text)
    assert found.decode(expected.encode(text)) == expected.decode(expected.encode(text))
    chat = [{"role": "user", "content": "Who?"}]
    assert found.apply_chat_template(chat, tokenize=False) == expected.apply_chat_template(
        chat, tokenize=False
    )
    assert inspect(demo).eos == inspect(DEMO / "target").eos
    again = AutoTokenizer.from_pretrained(demo.parent, gguf_file=demo.name)
    assert found.encode(text) == again.encode(text)


def test_generate_from_gguf_equals_the_plain_model(demo):
    """From the command line, the tokenizer included."""

    def said(target: Path) -> str:
        command = [sys.executable, "-m", "pipespec", "generate", "--prompt", "Once upon a time"]
        settings = [f"model.target={target}", "cluster.stages=2", "decode.max_new_tokens=12"]
        done = subprocess.run([*command, *settings], capture_output=True, text=True, check=True)
        return done.stdout

    assert said(demo) == said(DEMO / "target")


def test_a_file_is_known_by_its_whole_path(files, monkeypatch):
    path = files("llama", Type.F16)
    monkeypatch.chdir(path.parent)
    assert full_name(path.name) == str(path)


def test_hosts_compare_files(demo, tmp_path):
    other = shutil.copy(demo, tmp_path / "other.gguf")
    assert fingerprint(str(demo)).problem is None
    assert fingerprint(str(other)).config == fingerprint(str(demo)).config
    longer = tmp_path / "longer.gguf"
    longer.write_bytes(demo.read_bytes() + b"\0")
    assert fingerprint(str(longer)).shards != fingerprint(str(demo)).shards
    tuned = tmp_path / "tuned.gguf"  # other weights under the same settings
    tuned.write_bytes(demo.read_bytes()[:-2] + b"\1\2")
    assert fingerprint(str(tuned)).config != fingerprint(str(demo)).config


def test_a_folder_of_that_name_is_a_folder(tmp_path):
    path = build("llama", tmp_path / "model.gguf")
    assert inspect(path).dequantized_from is None


def test_what_cannot_be_read_is_refused_in_a_sentence(files, tmp_path):
    path, source = files("llama", Type.F16), tmp_path / "source"
    build("llama", source, **WIDE)

    def refused(file: Path, sentence: str) -> None:
        with pytest.raises(ModelError, match=sentence) as error:
            inspect(file)
        assert "\n" not in str(error.value)

    data = path.read_bytes()
    for size in (0, 10, 2000, len(data) // 2, len(data) - 100):
        short = tmp_path / f"short_{size}.gguf"
        short.write_bytes(data[:size])
        refused(short, "is not a whole GGUF file")
    part = shutil.copy(path, tmp_path / "model-00001-of-00002.gguf")
    refused(part, "is one part of several; join them")
    kind = write(source, tmp_path / "gemma.gguf", "gemma2", lambda _: Type.F16)
    refused(kind, "of the architecture 'gemma2', which is not read from GGUF; read are llama")
    scaled = write(
        source, tmp_path / "s.gguf", "llama", lambda _: Type.F16, llama__rope__scaling__type="yarn"
    )
    refused(scaled, "scales its rotary embedding, which is not read")
    for name in ("scaling__factor", "scale_linear"):
        file, field = tmp_path / f"{name}.gguf", {f"llama__rope__{name}": 4}
        write(source, file, "llama", lambda _: Type.F16, **field)
        refused(file, "scales its rotary embedding, which is not read")
    unscaled = {"llama__rope__scaling__type": "none", "llama__rope__scaling__factor": 4}
    assert inspect(write(source, tmp_path / "u.gguf", "llama", lambda _: Type.F16, **unscaled))
    partial = {"llama__rope__dimension_count": 2}
    file = write(source, tmp_path / "p.gguf", "llama", lambda _: Type.F16, **partial)
    refused(file, r"turns 2 of the \d+ numbers of a head by their position, which is not read")
    experts = write(source, tmp_path / "e.gguf", "llama", lambda _: Type.F16, llama__expert_count=8)
    refused(experts, "holds a mixture of experts, which is not read")
    refused(tmp_path / "none.gguf", "there is no model folder")
    text = tmp_path / "model.bin"
    text.write_text("x")
    refused(text, "is a file; give the folder that holds config.json, or a GGUF file")
    with pytest.raises(ModelError, match=r"the tokenizer in .* cannot be used"):
        tokenizer.load(path)


def test_tensor_of_an_unsupported_quantization_is_refused(files, tmp_path):
    """The type of one tensor is edited in the header."""
    path = files("llama", Type.Q8_0)
    data = bytearray(path.read_bytes())
    name = b"blk.0.ffn_up.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8
    assert data[at] == Type.Q8_0
    wrong, unknown = tmp_path / "wrong.gguf", tmp_path / "unknown.gguf"
    data[at] = Type.I8
    wrong.write_bytes(data)
    with pytest.raises(ModelError, match="tensors of type I8, which gguf does not dequantise"):
        inspect(wrong)
    data[at] = 99
    unknown.write_bytes(data)
    with pytest.raises(ModelError, match=r"of a type that gguf does not know .*99. is not a"):
        inspect(unknown)


def test_a_tensor_without_a_place_in_the_model_is_refused(files, tmp_path):
    """A Llama with biases, of which Transformers' config would say nothing."""
    data = files("llama", Type.F32).read_bytes()
    wrong = tmp_path / "wrong.gguf"
    wrong.write_bytes(data.replace(b"blk.0.attn_norm.weight", b"blk.0.attn_q.bias12345"))
    with pytest.raises(
        ModelError, match=r"1 tensors that llama .* has no place for, .*attn_q\.bias"
    ):
        inspect(wrong)


def test_the_command_refuses_a_file_without_a_traceback(files, tmp_path):
    short = tmp_path / "short.gguf"
    short.write_bytes(files("llama", Type.F16).read_bytes()[:2000])
    command = [sys.executable, "-m", "pipespec", "generate", "--prompt", "Once"]
    asked = [*command, f"model.target={short}"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "is not a whole GGUF file" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_package_is_named(files, monkeypatch, tmp_path):
    path = files("llama", Type.F16)
    other = shutil.copy(path, tmp_path / "unknown.gguf")
    inspect(path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelError, match="needs gguf, which is not installed; pip install"):
        inspect(other)
    info = inspect(path)  # a host that only asks recalls what was read
    with pytest.raises(ModelError, match=r"\(gguf\) needs gguf, which is not installed; pip"):
        info.require_quantizer("model.quantization", None)


PEAK = """
import resource, sys, torch
from pipespec.engine.model_slice import ModelSlice
def load(path):
    return ModelSlice.load(path, range(1, 2), dtype=torch.float32, num_slots=4)
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
load(sys.argv[1])
before = peak()
model = load(sys.argv[2])
print(peak() - before, model.num_weight_bytes)
"""


@pytest.mark.long
def test_no_more_than_the_slice_and_a_tensor_is_in_memory(files, tmp_path):
    """Of four layers of 12 million weights one is loaded."""
    sizes = {"hidden_size": 1024, "intermediate_size": 3072}
    source = build("llama", tmp_path / "source", **sizes)
    large = write(source, tmp_path / "large.gguf", "llama", lambda _: Type.Q8_0)
    small = files("llama", Type.Q8_0)
    inspect(large), inspect(small)  # the headers are read once, by whoever starts the ranks
    asked = [sys.executable, "-c", PEAK, str(small), str(large)]
    done = subprocess.run(asked, capture_output=True, text=True, check=True)
    grown, size = map(int, done.stdout.split())
    weights = 4 * 12.5e6
    file, tensor, room = weights / 4 * 1.1, 3.2e6 * 12, 12e6
    assert size + file + tensor + room < 4 * weights, "whole it would be no more"
    assert grown < size + file + tensor + room, f"{grown / 1e6:.0f} MB for {size / 1e6:.0f}"


def test_the_config_is_kept(files):
    """It is plain JSON, as `inspect` recalls it in another process."""
    info = inspect(files("qwen3", Type.F16))
    assert (info.model_type, info.num_layers, info.hidden_size) == ("qwen3", NUM_LAYERS, 256)
    assert json.loads(json.dumps(info.kind)) == f"qwen3, {NUM_LAYERS} layers of 256, gguf"
